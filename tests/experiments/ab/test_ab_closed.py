"""An A/B that was killed while its two runs were closed."""

from pathlib import Path
from typing import Any

import pytest

from ampacity import __version__
from ampacity.analysis.change.judged import CompareError, prepare
from ampacity.experiments import ab as experiment
from ampacity.experiments.ab import close_arms
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.simulator.server.launch import Started
from tests.support.args import args_of


def test_an_ab_that_is_killed_while_it_is_closed_is_compared(
    tmp_path: Path,
    ampacity: Any,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    server: Started,
) -> None:
    """B is closed and A is not, as after a kill between the two: nothing more is sent."""
    out, finish = tmp_path / "x", RunWriter.finish
    load = "--rates 20 --duration 200ms --rounds 2 --input-tokens 10 --output-tokens 4 --out"

    def finish_b(self: RunWriter, samples: Any = None) -> None:
        if self.path.name == "a":
            raise KeyboardInterrupt
        finish(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "finish", finish_b)
        assert ampacity("ab", "--aa", server.url, *args_of(load), out) == 130
    resume = f"ampacity ab --resume {out}"
    assert f"left at once, without the report: '{resume}' writes it" in capsys.readouterr().err
    kept = (out / "b/requests.parquet").read_bytes()
    assert [load_run(out / n).meta["status"] for n in "ab"] == ["running", "complete"]
    with pytest.raises(CompareError, match=f"killed before it could finish: '{resume}' goes on"):
        prepare(load_run(out / "a"))
    assert ampacity("run", "--resume", out / "a") == 2
    assert f"that run is of 'ampacity ab': {resume}" in capsys.readouterr().err

    monkeypatch.setattr(experiment, "conduct", None)  # no load
    for _ in range(2):  # where only the comparison is missing it is written, too
        assert ampacity("ab", "--resume", out) in (0, 2)  # a busy machine may limit the client
        (out / "compare.html").unlink()
    runs = [load_run(out / n) for n in "ab"]
    assert (out / "b/requests.parquet").read_bytes() == kept
    assert [(r.complete, r.meta["status"], r.meta.get("seams")) for r in runs] == [
        (True, "complete", None)
    ] * 2
    a, b = (r.requests["output_tokens_planned"].to_pylist() for r in runs)
    assert a == b
    assert not list(out.glob("*/*.arrows"))


@pytest.mark.parametrize(
    ("of_b", "of_a"),
    [
        ("--max-requests 30 is used up", "b: --max-requests 30 is used up"),
        ("a: --max-requests 30 is used up", "--max-requests 30 is used up"),
    ],
)
def test_an_arm_is_closed_with_the_reason_of_the_other(
    of_b: str, of_a: str, tmp_path: Path
) -> None:
    meta = {
        "tool": {"version": __version__},
        "clock": {"monotonic_ns": 0, "utc": "2026-01-01T00:00:00Z"},
        "endpoint": {"answer_s": 1.0},
        "stages": [],
        "notes": [],
    }
    with RunWriter(tmp_path / "a", meta | {"status": "running"}):
        pass
    end = {"status": "budget", "status_reason": of_b, "ended_utc": "2026-01-01T01:00:00Z"}
    with RunWriter(tmp_path / "b", meta | end) as writer:
        writer.finish()
    assert close_arms(tmp_path / "a", tmp_path / "b")
    found = load_run(tmp_path / "a").meta
    assert {name: found[name] for name in end} == end | {"status_reason": of_a}
