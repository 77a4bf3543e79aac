"""First seconds of fuzzing in every test run; ``make test-long`` goes on for hours."""

from pathlib import Path

import pytest

from tests.long.fuzz import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    done, failed = fuzz(name, 0.5, seed=20, keep=tmp_path)
    assert (done > 0, failed) == (True, 0)
