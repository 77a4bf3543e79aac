"""docs/reliability.md lists every ending, and a sample of its cells is what comes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.fault_matrix import COMMANDS, DOCS, cell
from tests.support.faults import FAULTS

ROWS = {
    cells[1]: cells
    for line in DOCS.read_text(encoding="utf-8").splitlines()
    if len(cells := [part.strip().strip("`") for part in line.strip("|").split(" | ")]) > 2
}
LISTED = [line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]


def test_the_page_lists_every_ending_and_one_of_each_kind_for_each_command() -> None:
    assert set(FAULTS) <= set(LISTED)
    kinds = {"ok", "reset", "truncated", "timeout", "bad_request", "auth", "upstream"}
    kinds |= {"rate_limited", "overloaded", "redirect", "stream_error", "protocol_error", "empty"}
    assert kinds <= {cells[0] for cells in ROWS.values()}


@pytest.mark.parametrize(("command", "ending"), [("check", "rate_limited"), ("run", "error_event")])
def test_a_sample_of_the_cells(command: str, ending: str, tmp_path: Path) -> None:
    column = 2 + list(COMMANDS).index(command)
    assert cell(command, ending, tmp_path) == ROWS[ending][column]
