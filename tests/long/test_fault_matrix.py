"""docs/reliability.md has every ending, and a sample of its cells is what comes of a run."""

from pathlib import Path

import pytest

from ampacity.loadgen.rundir.records import kind_of
from tests.long.fault_matrix import COMMANDS, DOCS, cell
from tests.support.servers.faults import FAULTS

ROWS = {
    cells[1]: cells
    for line in DOCS.read_text(encoding="utf-8").splitlines()
    if len(cells := [part.strip().strip("`") for part in line.strip("|").split(" | ")]) > 2
}
LISTED = {
    cells[0].strip("`"): [cell.strip("`") for cell in cells]
    for line in DOCS.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `") and len(cells := [p.strip() for p in line[1:].split("|")]) == 6
}


def test_the_page_lists_every_ending_for_each_command() -> None:
    assert set(FAULTS) == set(LISTED)
    assert set(FAULTS) <= {ending for ending, cells in ROWS.items() if len(cells) == 9}


def test_each_ending_is_listed_as_it_must_be_counted() -> None:
    for name, fault in FAULTS.items():
        if name == "late":  # cut off by a short stage, answered in a longer one
            continue
        _, http, tokens, kind, *_ = LISTED[name]
        assert kind == kind_of(fault.status, int(http) if http else None), name
        if fault.tokens is not None and fault.tokens >= 0:
            assert int(tokens or 0) == fault.tokens, name


@pytest.mark.parametrize(("command", "ending"), [("check", "rate_limited"), ("run", "error_event")])
def test_a_sample_of_the_cells(command: str, ending: str, tmp_path: Path) -> None:
    column = 2 + list(COMMANDS).index(command)
    assert cell(command, ending, tmp_path) == ROWS[ending][column]
