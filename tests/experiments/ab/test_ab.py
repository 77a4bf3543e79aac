"""``ampacity ab``: turns against drift, in virtual time and against a simulator."""

import asyncio
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.change.results import Comparison
from ampacity.analysis.compare import shift
from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.rounds import _pairs, deciding_rounds
from ampacity.analysis.compare.scorecard import compare
from ampacity.analysis.metrics.observations import Observations
from ampacity.config import make_settings
from ampacity.experiments import ab as experiment
from ampacity.experiments.ab import arms, interleave
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.virtual.player import IDLE_NS, ORIGIN_NS
from ampacity.experiments.virtual.predict import predict as run_virtual
from ampacity.live_panel import Outlook
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.reports.change.compare import (
    comparison_markdown,
    render_comparison,
    write_comparison_page,
)
from ampacity.settings import Settings
from ampacity.simulator.models.hardware import find_config
from ampacity.simulator.server.launch import Started
from ampacity.values import ConfigError
from tests.support.args import Command, args_of

ROUNDS, STAGE_S = 3, 80.0  # a p99 takes 299 requests in each stage
SPAN_S = 4 * ROUNDS * (STAGE_S + IDLE_NS * 1e-9)


class Clock:
    """One clock for both rigs: what runs later runs on a slower engine, by 10 % from the first to
    the last stage."""

    def __init__(self, drift: float) -> None:
        self.drift, self.now_ns = drift, ORIGIN_NS

    def slowness(self) -> float:
        return 1 + self.drift * (self.now_ns - ORIGIN_NS) * 1e-9 / SPAN_S


class Drifting:
    """A virtual rig whose engine gets slower with the time of the clock; ``slower`` times its pace
    from the start."""

    def __init__(self, rig: Rig, clock: Clock, slower: float) -> None:
        self._rig, self._clock, self._slower = rig, clock, slower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rig, name)

    async def open_stage(self, rate_rps: float) -> Any:
        from ampacity.simulator.engine.deployment import Deployment

        factor = self._clock.slowness() * self._slower
        self._rig.player.deployment = Deployment(
            find_config(f"linear:{0.02 * factor},{0.0005 * factor}")
        )
        self._rig.player.start_ns = self._clock.now_ns
        judged = await self._rig.open_stage(rate_rps, STAGE_S)
        self._clock.now_ns = self._rig.player.start_ns
        return judged


def virtual_ab(
    path: Path, order: Sequence[int], *, drift: float = 0.0, slower: float = 1.0
) -> Comparison:
    """An A/B of one simulated engine with a drift, in the given order of arms; the comparison."""
    raw = {
        "url": "http://predicted.invalid/v1",
        "input_tokens": "lognormal:p50=100,p99=400",
        "output_tokens": "40",
        "rates": "6",
        "out": path,
    }
    settings = [
        replace(s, out=path / n) for s, n in zip([make_settings(raw)] * 2, "ab", strict=True)
    ]
    progress, clock, engine = (
        Progress(Console(file=io.StringIO())),
        Clock(drift),
        find_config("linear:0.02,0.0005"),
    )

    async def nested() -> None:
        async def with_first(first: Rig) -> None:
            async def with_both(second: Rig) -> None:
                rigs = Drifting(first, clock, 1.0), Drifting(second, clock, slower)
                await interleave(rigs, ROUNDS, aa=slower == 1)

            await run_virtual(settings[1], engine, [], progress, drive=with_both, experiment="ab")

        await run_virtual(settings[0], engine, [], progress, drive=with_first, experiment="ab")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "ORDER", tuple(order))
        asyncio.run(nested())
    return compare([ComparedRun(n.upper(), prepare(load_run(path / n))) for n in "ab"])


def differing(result: Comparison) -> set[str]:
    return {s.metric for s in result.shift for q in s.quantiles if q.verdict == "differs"}


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A B B A against one endpoint that gets 10 % slower meanwhile."""
    return virtual_ab(tmp_path_factory.mktemp("ab") / "turns", (0, 1, 1, 0), drift=0.1)


def test_an_endpoint_that_drifts_does_not_differ_from_itself(
    tmp_path: Path, turns: Comparison
) -> None:
    """10 % slower over the run: A B B A finds nothing; A A B B, every A before its B, would cry
    wolf."""
    assert turns.interleaved_pairs == 2 * ROUNDS
    assert turns.same_schedule is True
    assert differing(turns) == set()
    assert turns.sentence == "A/A: no difference between the endpoint and itself."
    naive = virtual_ab(tmp_path / "naive", (0, 0, 1, 1), drift=0.1)
    assert {"itl", "e2e"} <= differing(naive)
    assert "differs from itself" in naive.sentence


def test_progress_names_the_arm_under_load_and_how_many_stages_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    expected: list[Outlook] = []
    monkeypatch.setattr(Progress, "note", lambda _, text: said.append(text))
    known = Progress.expect

    def expect(progress: Progress, outlook: Outlook) -> None:
        expected.append(outlook)
        known(progress, outlook)

    monkeypatch.setattr(Progress, "expect", expect)
    virtual_ab(tmp_path / "ab", (0, 1))
    lines = [text.partition(": 6")[0] for text in said if "stage" in text]
    assert lines == [f"{arm}: stage {i}" for i in range(ROUNDS) for arm in "AB"]
    assert [(o.arm, o.before, o.stages) for o in expected] == [
        ("A", 0, 6),
        ("B", 1, 6),
        ("A", 1, 6),
        ("B", 2, 6),
        ("A", 2, 6),
        ("B", 3, 6),
    ]
    assert len({o.began_s for o in expected}) == 1


def test_the_next_command_has_the_rounds_that_would_decide(turns: Comparison) -> None:
    """t(1) = 12.706, t(2) = 4.303, t(3) = 3.182, t(4) = 2.776, t(7) = 2.365, t(8) = 2.306 at 97.5 %:
    of 2 pairs ± 20 % is s = 0.2 √2 / 12.706 = 0.0223, of 4 pairs 0.2 √4 / 3.182 = 0.126."""
    wide = msgspec.structs.replace(
        turns.shift[0].quantiles[0],
        q=0.5,
        verdict="inconclusive",
        p=0.2,
        change=0.1,
        change_ci=(-0.1, 0.3),
    )
    assert _pairs(wide, 2, 100, 0.975) == 3  # 4.303 s / √3 = 5.5 %, less than the change
    alike = msgspec.structs.replace(wide, change=0.0, change_ci=(-0.2, 0.2))
    assert _pairs(alike, 2, 100, 0.975) == 5  # 2.776 s / √5 = 2.8 %; 3 % do not matter
    assert _pairs(alike, 2, 4, 0.975) is None
    shift = msgspec.structs.replace(turns.shift[0], quantiles=[wide])
    found = msgspec.structs.replace(
        turns, aa=False, scorecard=[], shift=[shift], interleaved_pairs=4
    )
    assert deciding_rounds(found, 2, 1000) == 5  # 9 pairs: 2.306 s / √9 = 9.7 %, of 8: 10.5 %
    assert deciding_rounds(found, 2, 4) is None
    assert deciding_rounds(msgspec.structs.replace(found, aa=True), 2, 1000) is None
    other = msgspec.structs.replace(wide, q=0.6)
    beside = msgspec.structs.replace(
        found, shift=[msgspec.structs.replace(shift, quantiles=[other])]
    )
    assert deciding_rounds(beside, 2, 1000) is None


def test_a_quantile_needs_in_each_stage_what_it_needs_in_a_stage() -> None:
    """299 for a p99, however many rounds there are: of 40 requests the largest would stand for it,
    which is a p97.6."""

    def stage(n: int) -> Observations:
        values = np.arange(1.0, n + 1)
        return Observations("requests", values, np.arange(n), None, np.zeros(n), np.full(n, np.nan))

    assert shift._value([stage(40)] * 10, 0.99) == "needs 299 requests in each stage, has 40"
    expected = "needs 299 requests in each stage, has 298"
    assert shift._value([stage(400), stage(298)], 0.99) == expected
    assert shift._value([stage(58)], 0.95) == "needs 59 requests, has 58"
    # ranks of p99
    assert shift._value([stage(299), stage(400)], 0.99) == pytest.approx((297 * 396) ** 0.5)


def test_a_real_difference_is_found_through_the_drift(tmp_path: Path) -> None:
    """B's steps take 5 % longer; the endpoint gets 10 % slower meanwhile."""
    result = virtual_ab(tmp_path / "run", (0, 1, 1, 0), drift=0.1, slower=1.05)
    assert {"itl", "tpot", "e2e"} <= differing(result)
    itl = next(q for s in result.shift if s.metric == "itl" for q in s.quantiles if q.q == 0.5)
    assert itl.change == pytest.approx(0.05, abs=0.01)
    low, high = itl.change_ci
    assert low < 0.05 < high


def test_the_noise_floor_is_said_per_metric(turns: Comparison) -> None:
    from ampacity.reports.change.compare_tables import tables
    from ampacity.reports.render.figures import significant

    floor = next(t for t in tables(turns) if t.title.startswith("Smallest difference"))
    assert [row[0].text for row in floor.rows][:4] == ["TTFT", "ITL", "TPOT", "E2E"]
    p50 = next(q for s in turns.shift if s.metric == "e2e" for q in s.quantiles if q.q == 0.5)
    assert 0.02 <= p50.smallest_seen < 0.05
    assert floor.rows[3][2].text == f"{significant(100 * p50.smallest_seen, 2)} %"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ab") / "run"
    virtual_ab(path, (0, 1, 1, 0))
    return path


def limited_in(measured: Path, path: Path, a: Sequence[int], b: Sequence[int]) -> list[ComparedRun]:
    """The same A/B, with a client that was the limit in these stages of each."""
    shutil.copytree(measured, path)
    for name, stages in (("a", a), ("b", b)):
        meta = json.loads((path / name / "run.json").read_text())
        for i in stages:
            meta["stages"][i]["audit"] |= {
                "client_limited": True,
                "client_limited_reason": "slip p99 80 ms",
            }
        (path / name / "run.json").write_text(json.dumps(meta))
    return [ComparedRun(n.upper(), prepare(load_run(path / n), limited_too=True)) for n in "ab"]


@pytest.mark.parametrize(
    ("status", "reason", "exits", "says"),
    [
        ("budget", "--max-requests 30 is used up", 0, "ended by its budget at stage 5"),
        ("interrupted", "interrupted by SIGTERM", 130, "interrupted at stage 5"),
    ],
)
def test_an_ab_that_ended_early_says_so(
    *,
    status: str,
    reason: str,
    exits: int,
    says: str,
    measured: Path,
    tmp_path: Path,
    ampacity: Any,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "x"
    shutil.copytree(measured, out)
    for name in "ab":
        meta = json.loads((out / name / "run.json").read_text())
        meta |= {"status": status, "status_reason": reason}
        meta["stages"][-1]["ended_early"] = reason
        (out / name / "run.json").write_text(json.dumps(meta))

    async def run_before(*_: Any) -> Path:
        return out

    monkeypatch.setattr(experiment, "run_ab", run_before)
    words = f"ab --aa http://127.0.0.1:1/v1 --rates 6 --rounds 3 --out {out}".split()
    assert ampacity(*words) == exits
    told = capsys.readouterr().err
    assert f"PARTIAL   {says}" in told
    assert ("limits hold for each endpoint" in told) == (status == "budget")
    assert (f"nothing is compared: 'ampacity ab --resume {out}' goes on" in told) == (exits == 130)


def test_where_no_pair_is_left_nothing_is_compared(
    measured: Path, tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limited in all six stages, B in two: 8 stages, no pair; exit 2 with everything on disk."""
    out = tmp_path / "x"
    limited_in(measured, out, range(6), (1, 4))

    async def run_before(*_: Any) -> Path:
        return out

    monkeypatch.setattr(experiment, "run_ab", run_before)
    command("ab --aa http://127.0.0.1:1/v1 --rates 6 --rounds 3 --out", out, status=2)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "WINNER none Nothing is compared: no pair of stages is left: the client was the limit in 8 stages (6 "
        "of A, 2 of B). "
        "Use a quieter or larger machine, or a lower --rates."
    )
    for wrong in ("no difference", "None", "--concurrency", "open ("):
        assert wrong not in said
    result = msgspec.json.decode((out / "compare.json").read_text(), type=Comparison)
    assert (result.compared, result.interleaved_pairs, result.interleaved_pairs_planned) == (
        False,
        0,
        6,
    )
    assert [r.client_limited_stages for r in result.runs] == [[0, 1, 2, 3, 4, 5], [1, 4]]
    assert all(
        (out / name).is_file() for name in ("compare.html", "a/report.html", "b/summary.json")
    )


def test_lost_pairs_are_said_with_their_reason_everywhere(measured: Path, tmp_path: Path) -> None:
    """A lost stages 0 and 1, B 2 and 3: two pairs, one in each order, which leave nothing to see
    their noise by."""
    result = compare(limited_in(measured, tmp_path / "x", (0, 1), (2, 3)))
    lost = "2 of 6 pairs of stages are left: the client was the limit in 4 stages (2 of A, 2 of B)"
    few = "too few pairs of stages: use more --rounds"
    assert result.sentence == f"Nothing is compared: {few}."
    assert {q.reason for s in result.shift for q in s.quantiles} == {few}
    assert {r.verdict for r in result.scorecard} == {"unknown"}
    terminal = io.StringIO()
    render_comparison(result, Console(file=terminal, width=80))
    write_comparison_page(tmp_path / "page.html", result)
    for text in (
        terminal.getvalue(),
        comparison_markdown(result),
        (tmp_path / "page.html").read_text(),
    ):
        told = " ".join(text.replace("\\", "").split())
        assert lost in told
        assert few in told
        assert "open (" not in told


def test_pairs_in_one_order_only_are_said_to_hold_the_drift(measured: Path, tmp_path: Path) -> None:
    """A B B A: pairs 0, 2 and 4 ran A first, the others B first, and those are lost."""
    result = compare(limited_in(measured, tmp_path / "x", (1, 3, 5), ()))
    assert result.interleaved_pairs == 3
    said = result.notes[0]
    assert "the client was the limit in 3 stages (3 of A). All of them ran in one order" in said


def test_the_next_command_is_the_same_ab_with_more_rounds(
    measured: Path, tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x"
    limited_in(measured, out, (), ())

    async def run_before(*_: Any) -> Path:
        return out

    monkeypatch.setattr(experiment, "run_ab", run_before)
    monkeypatch.setattr("ampacity.analysis.compare.rounds.deciding_rounds", lambda *_: 7)
    command("ab --aa http://127.0.0.1:1/v1 --rates 6 --rounds 3 --out", out)
    said = capsys.readouterr().out
    assert "NEXT      ampacity ab --aa http://127.0.0.1:1/v1 --rates 6 --rounds 7\n" in said


def test_one_stage_is_one_stage(measured: Path, tmp_path: Path) -> None:
    result = compare(limited_in(measured, tmp_path / "x", (), (3,)))
    assert "the client was the limit in 1 stage (1 of B)" in result.notes[0]


def test_the_pairs_that_are_left_are_compared(measured: Path, tmp_path: Path) -> None:
    result = compare(limited_in(measured, tmp_path / "x", (0,), (3,)))
    assert result.compared is True
    assert result.interleaved_pairs == 4
    assert result.notes[0].startswith(
        "4 of 6 pairs of stages are left: the client was the limit in 2 stages (1 of A, 1 of B)"
    )
    assert result.sentence == "A/A: no difference between the endpoint and itself."


def test_the_cheaper_of_two_that_carried_the_same_load_is_no_winner(measured: Path) -> None:
    """Half the price at the same load is half the cost of that load: what each could carry is not
    known."""
    judged = [prepare(load_run(measured / n)) for n in "ab"]
    result = compare([ComparedRun("A", judged[0], 1, 2.0), ComparedRun("B", judged[1], 1, 1.0)])
    costs = [r for r in result.scorecard if r.question == "cost" and None not in r.values]
    assert [r.name for r in costs] == ["usd_per_million_output_tokens", "ttft_p99_s_x_usd_per_hour"]
    for row in costs:
        assert row.values[1] / row.values[0] == pytest.approx(0.5, rel=0.1)
        assert (row.winner, row.best, row.verdict) == (None, None, "unknown")
        assert "not what it can carry" in row.reason
    assert "USD" not in result.sentence


def settings(**raw: Any) -> Settings:
    return make_settings({"url": "http://127.0.0.1:1/v1", **raw})


def test_arms_have_other_texts_and_directories_and_one_level(tmp_path: Path) -> None:
    a, b = arms(settings(rates="2", out=tmp_path / "x", salt="s"), settings(rates="2", salt="s"))
    assert (a.salt, b.salt) == ("s-a", "s-b")
    assert (a.out, b.out) == (tmp_path / "x" / "a", tmp_path / "x" / "b")
    # then each run draws its own
    assert arms(settings(rates="2"), settings(rates="2"))[0].salt is None
    for wrong in ({}, {"rates": "1,2"}, {"concurrency": "1,2"}):
        with pytest.raises(ConfigError, match="one load level"):
            arms(settings(**wrong), settings(**wrong))


def test_wrong_numbers_of_endpoints_are_refused(command: Command, capsys: Any) -> None:
    command("ab http://127.0.0.1:1/v1 --rates 2", status=2)
    assert "two URLs, or one with --aa" in capsys.readouterr().err
    command("ab --aa http://127.0.0.1:1/v1 http://127.0.0.1:2/v1 --rates 2", status=2)
    assert "one URL with --aa" in capsys.readouterr().err


def test_one_endpoint_against_itself_over_the_wire(
    tmp_path: Path, ampacity: Any, capsys: Any, server: Started
) -> None:
    """Two run directories, stage k of both with the same lengths and arrivals, in the order A B B
    A, other texts."""
    code = ampacity(
        "ab",
        "--aa",
        server.url,
        *args_of(
            "--rates 20 --duration 200ms --rounds 2 --input-tokens 10 --output-tokens 4 --out"
        ),
        tmp_path / "x",
        "--json",
    )
    result = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    # a busy machine may limit the client in so short stages
    assert code == (0 if result.compared else 2)
    assert result.aa is True
    assert [r.path for r in result.runs] == [str(tmp_path / "x" / n) for n in "ab"]
    metas = [json.loads((tmp_path / "x" / n / "run.json").read_text()) for n in "ab"]
    starts = sorted(
        (s["start_ns"], n) for n, meta in zip("ab", metas, strict=True) for s in meta["stages"]
    )
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


def test_an_arm_that_cannot_be_reached_is_one_line_and_no_comparison(
    tmp_path: Path, ampacity: Any, capsys: Any, server: Started
) -> None:
    code = ampacity(
        "ab",
        server.url,
        *args_of("http://127.0.0.1:9/v1 --rates 20 --duration 1s --out"),
        tmp_path / "x",
    )
    assert code == 2
    assert "127.0.0.1:9" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x" / "compare.html").exists()
