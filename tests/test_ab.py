"""``ampacity ab``: turns against drift, in virtual time and against a simulator."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ampacity.config import Settings, make_settings
from ampacity.experiments import ab as experiment
from ampacity.experiments.ab import arms, interleave
from ampacity.experiments.predict import IDLE_NS, ORIGIN_NS, VirtualRig
from ampacity.experiments.predict import predict as run_virtual
from ampacity.progress import Progress
from ampacity.values import ConfigError
from analysis.arms import Arm
from analysis.comparable import prepare
from analysis.compare import compare
from loadgen.rundir import load_run
from simulator.hardware import find_config
from simulator.launch import start_in_process

ROUNDS, STAGE_S = 3, 60.0
SPAN_S = 4 * ROUNDS * (STAGE_S + IDLE_NS * 1e-9)


class Clock:
    """One clock for both rigs: what runs later runs on a slower engine, by 10 % from the first to the last stage."""

    def __init__(self, drift: float) -> None:
        self.drift, self.now_ns = drift, ORIGIN_NS

    def slowness(self) -> float:
        return 1 + self.drift * (self.now_ns - ORIGIN_NS) * 1e-9 / SPAN_S


class Drifting:
    """A virtual rig whose engine gets slower with the time of the clock; ``slower`` times its pace from the start."""

    def __init__(self, rig: VirtualRig, clock: Clock, slower: float) -> None:
        self._rig, self._clock, self._slower = rig, clock, slower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rig, name)

    async def open_stage(self, rate_rps: float) -> Any:
        from simulator.deployment import Deployment

        factor = self._clock.slowness() * self._slower
        self._rig._deployment = Deployment(find_config(f"linear:{0.02 * factor},{0.0005 * factor}"))
        self._rig._start_ns = self._clock.now_ns
        judged = await self._rig.open_stage(rate_rps, STAGE_S)
        self._clock.now_ns = self._rig._start_ns
        return judged


def virtual_ab(
    path: Path, order: Sequence[int], *, drift: float = 0.0, slower: float = 1.0
) -> dict[str, Any]:
    """An A/B of one simulated engine with a drift, in the given order of arms; the comparison."""
    raw = {"url": "http://predicted.invalid/v1", "input_tokens": "lognormal:p50=100,p99=400", "output_tokens": "40", "rates": "6", "out": path}  # fmt: skip
    settings = [replace(s, out=path / n) for s, n in zip([make_settings(raw)] * 2, "ab", strict=True)]
    progress, clock, engine = (
        Progress(Console(file=io.StringIO())),
        Clock(drift),
        find_config("linear:0.02,0.0005"),
    )

    async def nested() -> None:
        async def with_first(first: VirtualRig) -> None:
            async def with_both(second: VirtualRig) -> None:
                rigs = Drifting(first, clock, 1.0), Drifting(second, clock, slower)
                await interleave(rigs, ROUNDS, aa=slower == 1)  # type: ignore[arg-type]

            await run_virtual(settings[1], engine, [], progress, drive=with_both, experiment="ab")

        await run_virtual(settings[0], engine, [], progress, drive=with_first, experiment="ab")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "ORDER", tuple(order))
        asyncio.run(nested())
    return compare([Arm(n.upper(), prepare(load_run(path / n))) for n in "ab"])


def differing(result: dict[str, Any]) -> set[str]:
    return {s["metric"] for s in result["shift"] for q in s["quantiles"] if q["verdict"] == "differs"}


def test_an_endpoint_that_drifts_does_not_differ_from_itself(tmp_path: Path) -> None:
    """10 % slower over the run: A B B A finds nothing; A A B B, every A before its B, would cry wolf."""
    turns = virtual_ab(tmp_path / "turns", (0, 1, 1, 0), drift=0.1)
    assert turns["interleaved_pairs"] == 2 * ROUNDS
    assert turns["same_schedule"] is True
    assert differing(turns) == set()
    assert turns["sentence"] == "A/A: no difference between the endpoint and itself."
    naive = virtual_ab(tmp_path / "naive", (0, 0, 1, 1), drift=0.1)
    assert {"itl", "e2e"} <= differing(naive)
    assert "differs from itself" in naive["sentence"]


def test_a_real_difference_is_found_through_the_drift(tmp_path: Path) -> None:
    """B's steps take 5 % longer; the endpoint gets 10 % slower meanwhile."""
    result = virtual_ab(tmp_path / "run", (0, 1, 1, 0), drift=0.1, slower=1.05)
    assert {"itl", "tpot", "e2e"} <= differing(result)
    itl = next(q for s in result["shift"] if s["metric"] == "itl" for q in s["quantiles"] if q["q"] == 0.5)
    assert itl["change"] == pytest.approx(0.05, abs=0.01)
    low, high = itl["change_ci"]
    assert low < 0.05 < high


def test_the_noise_floor_is_said_per_metric(tmp_path: Path) -> None:
    from reports.compare import tables
    from reports.figures import significant

    result = virtual_ab(tmp_path / "run", (0, 1, 1, 0), drift=0.1)
    floor = next(t for t in tables(result) if t.title.startswith("Smallest difference"))
    assert [row[0].text for row in floor.rows][:4] == ["TTFT", "ITL", "TPOT", "E2E"]
    p50 = next(q for s in result["shift"] if s["metric"] == "e2e" for q in s["quantiles"] if q["q"] == 0.5)
    assert 0.02 <= p50["smallest_seen"] < 0.05
    assert floor.rows[3][2].text == f"{significant(100 * p50['smallest_seen'], 2)} %"


def settings(**raw: Any) -> Settings:
    return make_settings({"url": "http://127.0.0.1:1/v1", **raw})


def test_arms_have_other_texts_and_directories_and_one_level(tmp_path: Path) -> None:
    a, b = arms(settings(rates="2", out=tmp_path / "x", salt="s"), settings(rates="2", salt="s"))
    assert (a.salt, b.salt) == ("s-a", "s-b")
    assert (a.out, b.out) == (tmp_path / "x" / "a", tmp_path / "x" / "b")
    assert arms(settings(rates="2"), settings(rates="2"))[0].salt is None  # then each run draws its own
    for wrong in ({}, {"rates": "1,2"}, {"concurrency": "1,2"}):
        with pytest.raises(ConfigError, match="one load level"):
            arms(settings(**wrong), settings(**wrong))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with start_in_process("demo") as started:
        yield started.url


def test_wrong_numbers_of_endpoints_are_refused(ampacity: Any, capsys: Any) -> None:
    assert ampacity("ab", "http://127.0.0.1:1/v1", "--rate", "2") == 2
    assert "two URLs, or one with --aa" in capsys.readouterr().err
    assert ampacity("ab", "--aa", "http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1", "--rate", "2") == 2
    assert "one URL with --aa" in capsys.readouterr().err


def test_one_endpoint_against_itself_over_the_wire(
    tmp_path: Path, ampacity: Any, capsys: Any, server: str
) -> None:
    """Two run directories, stage k of both with the same lengths and arrivals, in the order A B B A, other texts."""
    code = ampacity("ab", "--aa", server, "--rate", "20", "--duration", "200ms", "--rounds", "2", "--input-tokens", "10",
                    "--output-tokens", "4", "--out", tmp_path / "x", "--json")  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["aa"] is True
    assert [r["path"] for r in result["runs"]] == [str(tmp_path / "x" / n) for n in "ab"]
    metas = [json.loads((tmp_path / "x" / n / "run.json").read_text()) for n in "ab"]
    starts = sorted((s["start_ns"], n) for n, meta in zip("ab", metas, strict=True) for s in meta["stages"])
    assert "".join(n for _, n in starts) == "abbaabba"
    assert metas[0]["ab"]["pair"] == metas[1]["ab"]["pair"]
    assert metas[0]["salt"] != metas[1]["salt"]
    tables = [pq.read_table(tmp_path / "x" / n / "requests.parquet").to_pylist() for n in "ab"]
    for a, b in zip(*tables, strict=True):
        assert a["output_tokens_planned"] == b["output_tokens_planned"]
        offsets = [
            r["scheduled_ns"] - m["stages"][r["stage"]]["start_ns"]
            for r, m in zip((a, b), metas, strict=True)
        ]
        assert offsets[0] == offsets[1]
    assert (tmp_path / "x" / "compare.html").is_file()


def test_an_arm_that_cannot_be_reached_is_one_line_and_no_comparison(tmp_path: Path, ampacity: Any, capsys: Any, server: str) -> None:  # fmt: skip
    code = ampacity(
        "ab", server, "http://127.0.0.1:9/v1", "--rate", "20", "--duration", "1s", "--out", tmp_path / "x"
    )
    assert code == 2
    assert "127.0.0.1:9" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x" / "compare.html").exists()
