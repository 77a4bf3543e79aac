"""The windows of a soak's directory: what is missing, damaged or of another window."""

import shutil
from pathlib import Path

import pytest

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.experiments.windows import summarise_soak
from ampacity.frames import load
from ampacity.loadgen.rundir.files import RunDirError, part_of, read_meta
from ampacity.loadgen.rundir.rotate import RotatingWriter, part_summary
from tests.support.synthetic import Stage, request, run_meta

SOAK = {"rate_rps": 10.0, "duration_s": 30.0, "window_s": 10.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three windows of 100 requests, the number k with 10 + k tokens each; not yet summarised."""
    stages = [
        Stage(
            [
                request(100 * k + i, 10.0 * k + i / 10, gaps_s=[0.01] * (9 + k), stage=k)
                for i in range(100)
            ],
            10.0,
            10.0 * k,
            extra={"from_s": 10.0 * k},
        )
        for k in range(3)
    ]
    with RotatingWriter(tmp_path / "run", run_meta(stages, soak=SOAK)) as writer:
        for record in (r for stage in stages for r in stage.records):
            writer.append(record)
        writer.finish()
    return tmp_path / "run"


def summary_of(run: Path) -> Summary:
    return summarise_soak(run, read_meta(run))[1]


def test_a_window_without_its_file_is_named_and_nothing_of_it_is_counted(run: Path) -> None:
    assert (summary_of(run).partial, summary_of(run).requests) == (None, 300)
    part_of(run, 1).unlink()
    part_summary(run, 1).unlink()
    found = summary_of(run)
    assert found.partial == f"not whole: {part_of(run, 1)} is missing"
    assert (found.requests, found.errors["unfinished"]) == (200, 0)


def test_a_damaged_stream_is_said_and_kept(run: Path) -> None:
    """Before it is Parquet: a second report, and a person, can still look at it."""
    stream = part_of(run, 1).with_suffix(".arrows")
    held = bytearray(stream.read_bytes())
    middle = len(held) // 2
    held[middle : middle + 600] = bytes(600)
    stream.write_bytes(held)
    for _ in range(2):
        assert f"of {stream} cannot be read" in str(summary_of(run).partial)
        assert stream.read_bytes() == held


def test_a_summary_or_records_of_another_window_are_not_taken(run: Path) -> None:
    summary_of(run)
    shutil.copy(part_summary(run, 2), part_summary(run, 1))
    assert [stage.index for stage in summary_of(run).stages] == [0, 1, 2]
    part_summary(run, 1).unlink()
    shutil.copy(part_of(run, 2), part_of(run, 1))
    with pytest.raises(RecordsError, match=f"^{part_of(run, 1)}: row 0: stage is 2,"):
        summary_of(run)


def test_from_python_a_soak_is_judged_as_by_the_command_and_nothing_is_written(run: Path) -> None:
    before = sorted(run.rglob("*"))
    found = load(run).summary
    assert sorted(run.rglob("*")) == before
    assert (found.soak, found.verdict) == (summary_of(run).soak, summary_of(run).verdict)


def test_a_file_in_the_place_of_the_folder_is_one_line(run: Path) -> None:
    (run / "windows").write_text("")
    with pytest.raises(RunDirError, match="windows cannot be made: File exists"):
        summary_of(run)
