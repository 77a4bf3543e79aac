"""Baselines: which runs make one, which files are read, tolerances, and a sequence of looks."""

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.change.engine import Estimate, compare_shares, spent_at_looks
from ampacity.analysis.change.judged import CompareError, prepare
from ampacity.analysis.change.results import Check
from ampacity.analysis.change.samples import Blocks
from ampacity.analysis.gate.baseline import make_baseline
from ampacity.analysis.gate.baseline_file import read_baseline, write_baseline
from ampacity.analysis.gate.checks import WATCHED, CheckedChange, decide, parse_tolerances
from ampacity.analysis.gate.gate import _sentence, judge_gate
from ampacity.loadgen.rundir.files import Run
from benchmarks.servers.steps import STEP_SERVERS, step_run
from benchmarks.studies.gate_rates import later_first_token, study
from tests.analysis.gate.test_gate import baseline, checks, run
from tests.support.compared_runs import RATE, stage, ttfts
from tests.support.synthetic import request


def test_the_sentence_promises_no_more_than_its_checks() -> None:
    """Of three open checks two become decided with 120 and 377 more requests; the third by no
    length."""
    three = [
        Check(f"{name}_p50", "change", "5/s", more_requests=n)
        for name, n in (("ttft", 120), ("itl", 377), ("e2e", None))
    ]
    decided = Check("tpot_p50", "change", "5/s", "pass")
    assert _sentence("inconclusive", [*three, decided]).endswith(
        "e2e_p50 at 5/s. About 377 more requests, in the baseline as well, would decide 2 of these 3; each of the others gives its own reason."
    )
    assert _sentence("inconclusive", [*three[:2], decided]).endswith(
        ". About 377 more requests, in the baseline as well, would decide."
    )
    assert _sentence("inconclusive", [three[2]]) == "Inconclusive: e2e_p50 at 5/s."


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The baseline of 1,000 requests."""
    return make_baseline([run(tmp_path_factory.mktemp("of_a_run") / "base", stage(ttfts(1)))])


def test_baselines_that_cannot_be_used(tmp_path: Path, of_a_run: dict[str, Any]) -> None:
    text = write_baseline(of_a_run)
    for changed, says in (
        (text[:5000], "cut off"),
        (text.replace('"seed": 1', '"seed": 2'), "changed by hand"),
        ("{}", "is no baseline"),
        (text.replace('"schema_version": 4', '"schema_version": 5'), "schema_version 5"),
        (text.replace('"schema_version": 4', '"schema_version": 3'), "schema_version 3"),
    ):
        (tmp_path / "base.json").write_text(changed)
        with pytest.raises(CompareError, match=says) as error:
            read_baseline(tmp_path / "base.json")
        assert "\n" not in str(error.value)
    with pytest.raises(CompareError, match="does not exist"):
        read_baseline(tmp_path / "none.json")


def test_baseline_file_is_small_and_made_the_same_twice(tmp_path: Path) -> None:
    made = run(tmp_path / "base", stage(ttfts(1)))
    text = write_baseline(make_baseline([made]))
    assert text == write_baseline(make_baseline([made]))
    assert len(text) < 30_000
    (tmp_path / "base.json").write_text(text)
    assert read_baseline(tmp_path / "base.json")["levels"]["20/s"]["offered_rps"] == 20.0


def test_tolerances_as_people_write_them() -> None:
    assert parse_tolerances(["ttft_p99=10%", "error_rate=0.5%"]) == {
        "ttft_p99": 0.1,
        "error_rate": 0.005,
    }
    assert parse_tolerances(["itl=4%"]) == {"itl_p50": 0.04, "itl_p90": 0.04, "itl_p99": 0.04}
    assert set(parse_tolerances(["p99=20%"])) == {"ttft_p99", "itl_p99", "tpot_p99", "e2e_p99"}
    for wrong in ("ttft_p99", "ttft_p99=10", "latency=3%", "ttft_p99=0%", "=3%", "ttft_p95=3%"):
        with pytest.raises(CompareError, match="--tolerance"):
            parse_tolerances([wrong])


def level_of(content: dict[str, Any]) -> Any:
    return content["levels"]["20/s"]


def p99_of(content: dict[str, Any]) -> Any:
    return level_of(content)["quantiles"]["ttft_p99"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c: p99_of(c).update(runs=[]), "ttft_p99 of 20/s is not that of 1 runs"),
        (lambda c: level_of(c).update(requests=[]), "requests of 20/s is not that of 1 runs"),
        (
            lambda c: level_of(c).update(rates=level_of(c)["rates"] * 2),
            "rates of 20/s is not that of 1 runs",
        ),
        (
            lambda c: level_of(c)["errors"][0].update(size=[0.0] * 20),
            "errors of 20/s is not that of 1 runs",
        ),
        (
            lambda c: level_of(c)["cells"]["ttft"][1].update(edges=[2.0] + [1.0] * 18),
            "cells of ttft at 20/s are not in order",
        ),
        (lambda c: level_of(c)["cells"].update(ttft=[{"a": 1}]), "by"),
        (lambda c: c.update(capacity_rps={"a": 1}), "capacity_rps"),
        (lambda c: p99_of(c).update(tolerance={}), "same_schedule"),
        (lambda c: level_of(c)["quantiles"].update(ttft_p77=p99_of(c)), "quantiles"),
        (lambda c: p99_of(c).update(expected=[0.1]), "expected"),
        (lambda c: c["realised"].update(input_tokens="abc"), "realised"),
        (lambda c: p99_of(c).update(value_s=0.0), "value_s"),
        (lambda c: p99_of(c).update(value_s=1e308), "value_s"),
        (lambda c: p99_of(c).update(noise=-1.0), "noise"),
        (lambda c: level_of(c).update(skipped=-5), "skipped"),
        (lambda c: level_of(c).update(quantiles={}), "quantiles"),
        (lambda c: c["runs"][0].pop("seed"), "seed"),
        (lambda c: c.pop("levels"), "levels"),
        (lambda c: c.pop("runs"), "runs"),
        (lambda c: c.update(levels={}), "length >= 1 - at `\\$.levels`"),
        (lambda c: c["levels"]["20/s"].update(rates=[1, 2]), "rates"),
        (lambda c: c["levels"]["20/s"]["quantiles"]["ttft_p50"].pop("marks_s"), "marks_s"),
    ],
)
def test_a_baseline_that_was_edited_and_signed_anew_is_one_line(
    tmp_path: Path, spoil: Any, says: str, of_a_run: dict[str, Any]
) -> None:
    content = copy.deepcopy(of_a_run)
    spoil(content)
    (tmp_path / "base.json").write_text(write_baseline(content))
    with pytest.raises(CompareError, match=says) as error:
        read_baseline(tmp_path / "base.json")
    assert "\n" not in str(error.value)


def test_a_baseline_with_a_value_that_is_no_number_cannot_be_read(
    tmp_path: Path, of_a_run: dict[str, Any]
) -> None:
    text = write_baseline(of_a_run)
    (tmp_path / "base.json").write_text(text.replace('"noise": 0.', '"noise": NaN, "was": 0.', 1))
    with pytest.raises(CompareError, match="NaN is no number"):
        read_baseline(tmp_path / "base.json")


def test_a_run_without_any_latency_is_no_baseline(tmp_path: Path) -> None:
    bare = run(tmp_path / "bare", stage(ttfts(1)))
    none = {f"{m}_{p}": "x" for m in ("ttft", "itl", "tpot", "e2e") for p in ("p50", "p90", "p99")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampacity.analysis.gate.baseline.track", lambda *_: "x")
        with pytest.raises(
            CompareError, match="no latency that a gate could track: ttft_p10: x;"
        ) as error:
            make_baseline([bare])
    assert all(f"{name}: x" in str(error.value) for name in none)


def test_why_a_run_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(
        CompareError,
        match="20/s: 50 of 1000 requests failed or were in flight at cutoff: with more than 1%",
    ):
        make_baseline([run(tmp_path / "bad", stage(ttfts(1), failed=range(700, 750)))])
    # each lasts 16 of the 20 s: filling up and overload look the same
    endless = stage([15.96] * 400)
    with pytest.raises(CompareError, match=r"20/s: no steady state \(.* look the same\)"):
        make_baseline([run(tmp_path / "endless", endless, ["ttft_p90=500ms"])])
    with pytest.raises(CompareError, match="20/s: 60 requests after the warm-up, 100 are needed"):
        make_baseline([run(tmp_path / "short", stage(ttfts(1, 60)), warmup_requests=0)])


def test_a_stage_that_was_repeated_sent_the_same_and_is_paired(tmp_path: Path) -> None:
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
    disturbed = stage(ttfts(3, 1500))
    disturbed.client_limited = True
    again = stage(ttfts(1, 1500), start_s=100.0)
    values = ttfts(1, 1500)
    again.records = [
        request(1500 + i, 100.0 + i / RATE, ttft_s=float(t), gaps_s=[0.01] * 4)
        for i, t in enumerate(values)
    ]
    again.extra = {"schedule": 0}
    found = judge_gate(base, [run(tmp_path / "again", [disturbed, again])], {})
    assert found.same_schedule is True
    assert found.verdict == "pass", found.sentence


def test_what_the_looks_spend_adds_up_and_the_first_spends_most() -> None:
    """Pocock's function by hand: 5 % x ln(1 + (e - 1)/3) = 2.264 % at the first of three looks."""
    found = spent_at_looks(0.05, 3)
    assert sum(found) == pytest.approx(0.05)
    assert found[0] == pytest.approx(0.02264, abs=1e-5)
    assert found == sorted(found, reverse=True)
    assert spent_at_looks(0.05, 1) == pytest.approx([0.05])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sequence_errs_no_more_often_than_one_look(sign: int) -> None:
    """A candidate that is worse by just the tolerance, three samples at most: called worse, or no
    worse, in 5 % at most."""
    rng = np.random.default_rng(21)
    wrong = 0
    for _ in range(1500):
        base = Blocks(rng.binomial(100, 0.1, 20).astype(float), np.full(20, 100.0), 2000.0)
        ours: list[Blocks] = []
        for alpha in spent_at_looks(0.05, 3):
            ours.append(
                Blocks(rng.binomial(100, 0.1, 20).astype(float), np.full(20, 100.0), 2000.0)
            )
            e = compare_shares([base], ours, base.share, paired=False, noise=0.0)
            if (e.p_regression if sign > 0 else e.p_equivalence) <= alpha:
                wrong += 1
                break
    assert 0.01 < wrong / 1500 < 0.06


def test_a_batching_server_at_default_tolerances() -> None:
    """Three pairs, of one seed and of two: equal runs pass or nearly, 10 % longer steps and a TTFT
    25 % longer are found."""
    server = STEP_SERVERS["pieces"]
    rate = 0.6 * server.most_rps

    def measured(seed: int, noise: int, speed: float = 1.0) -> Run:
        return step_run(server, rate, 2000, seed, noise, jitter=0.03, speed=speed)

    verdicts: dict[str, list[str]] = {"equal": [], "steps": [], "ttft": []}
    for seed in range(3):
        base = make_baseline([prepare(measured(seed, 10 * seed))])
        for level in base["levels"].values():
            for name, entry in level["quantiles"].items():
                assert (
                    name.startswith("e2e")
                    or name.endswith("p99")
                    or entry["tolerance"]["same_schedule"] <= 0.15
                )
        for other in (seed, seed + 50):
            equal = measured(other, 10 * seed + 1)
            runs = {
                "equal": equal,
                "steps": measured(other, 10 * seed + 2, 1.1),
                "ttft": later_first_token(equal, 0.25),
            }
            for kind, run_ in runs.items():
                verdicts[kind].append(judge_gate(base, [prepare(run_)], {}).verdict)
    assert verdicts["equal"].count("pass") >= 5
    assert "regression" not in verdicts["equal"]
    assert verdicts["steps"] == ["regression"] * 6
    assert verdicts["ttft"] == ["regression"] * 6


def test_steps_that_are_longer_are_told_apart_from_a_fuller_server() -> None:
    """10 % longer steps: a plain TPOT rises by more, as more requests are in flight; at equal
    occupancy it is the 10 %."""
    server = STEP_SERVERS["slots"]
    base, slow = (
        prepare(step_run(server, 0.6 * server.most_rps, 2000, 5, n, jitter=0.0, speed=s))
        for n, s in ((1, 1.0), (2, 1.1))
    )
    plain = [j.summary.stages[0].tpot_s.p50 for j in (base, slow)]
    found = checks(judge_gate(make_baseline([base]), [slow], {}))["tpot_p50"]
    assert plain[1] / plain[0] > 1.13
    assert found.shift == pytest.approx(0.10, abs=0.01)
    # that of the two figures beside it
    assert found.change == pytest.approx(plain[1] / plain[0] - 1, abs=1e-3)


def test_a_longer_ttft_alone_is_found_near_saturation_with_other_requests() -> None:
    """At 85 % the length of the queue is mostly chance; a TTFT that nearly waits for nobody, p10,
    still tells 25 % more."""
    server = STEP_SERVERS["whole"]
    rate = 0.85 * server.most_rps
    base = make_baseline([prepare(step_run(server, rate, 2000, 3, 30, jitter=0.03))])
    for seed in (53, 54, 55):
        equal = step_run(server, rate, 2000, seed, seed, jitter=0.03)
        assert judge_gate(base, [prepare(equal)], {}).verdict != "regression"
        found = judge_gate(base, [prepare(later_first_token(equal, 0.25))], {})
        assert found.verdict == "regression"
        assert checks(found)["ttft_p10"].shift == pytest.approx(0.25, abs=0.06)


def test_a_candidate_is_measured_again_until_the_answer_is_clear() -> None:
    """The study plays what ``gate --max-samples`` does: 300 requests leave one look open, three
    samples say it."""
    options = argparse.Namespace(
        server="pieces",
        load=0.6,
        requests=300,
        looks=3,
        pairs=3,
        first_seed=7,
        baseline_runs=3,
        jitter=0.03,
        run_noise=0.005,
        change=0.1,
        ttft_change=0.25,
        changed_every=1,
    )
    cells = study(options)
    assert set(cells) == {
        f"{k}, {s} seed" for k in ("equal", "steps", "ttft") for s in ("same", "other")
    }
    for name, cell in cells.items():
        assert sum(cell.answers.values()) == (4 if "same" in name else 3)
        assert sum(n * look for look, n in cell.samples.items()) >= sum(cell.answers.values())
        assert max(cell.samples) <= 3
    assert cells["ttft, same seed"].answers["regression"] == 4
    assert cells["equal, same seed"].answers["regression"] == 0


def by_distance(worse: float, passing: float, *, watched: bool = False) -> CheckedChange:
    """By its distance from both limits in standard errors of 1."""
    limits = [Estimate(x, 1.0, 0.0, float("inf")) for x in (worse, passing)]
    return CheckedChange(Check("ttft_p50", "change", "20/s"), 1000, *limits, watched)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        # surely beyond 3 %, the figure beyond the tolerance
        (by_distance(3.0, 1.0), "regression"),
        (by_distance(3.0, -1.0), "inconclusive"),  # surely beyond 3 %, perhaps inside the tolerance
        (by_distance(3.0, -2.0), "pass"),  # surely inside the tolerance: z(0.95) = 1.645
        (by_distance(1.0, 0.5), "inconclusive"),  # beyond the tolerance, perhaps by chance
        (by_distance(-1.0, -5.0, watched=True), WATCHED),  # nothing passes that is only watched
        # the only one watched; among two it may be chance
        (by_distance(1.8, 0.5, watched=True), "inconclusive"),
        (by_distance(2.1, 0.5, watched=True), "regression"),  # by Holm: z(1 - 0.05/2) = 1.960
    ],
)
def test_what_is_a_regression_and_what_passes(found: CheckedChange, verdict: str) -> None:
    """One of two checks, the other of which is plainly equal."""
    assert [c.verdict for c in decide([found, by_distance(-6.0, -9.0)], 0.05)] == [verdict, "pass"]


def test_a_baseline_of_before_is_read(tmp_path: Path) -> None:
    """Without TTFT p10, and with tolerances beyond 15 %, which are those of metrics that are only
    watched."""
    base = make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))])
    quantiles = base["levels"]["20/s"]["quantiles"]
    del quantiles["ttft_p10"]
    quantiles["ttft_p99"]["tolerance"] = {"same_schedule": 0.4, "other_schedule": None}
    (tmp_path / "base.json").write_text(write_baseline(base))
    found = judge_gate(
        read_baseline(tmp_path / "base.json"), [run(tmp_path / "c", stage(ttfts(1, 1500)))], {}
    )
    assert found.verdict == "pass"
    assert "ttft_p10" not in checks(found)
    assert "may differ by more than 15%" in found.untracked["ttft_p99 at 20/s"]


def test_a_tolerance_that_is_given_is_no_matter_of_noise(tmp_path: Path) -> None:
    """12 % slower, which by default is a regression; not surely more than the 10 % that are
    allowed, and not less."""
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
    slower = run(tmp_path / "slow", stage(ttfts(2, 1500, 1.12)), seed=2)
    assert checks(judge_gate(base, [slower], {}))["ttft_p50"].verdict == "regression"
    given = checks(judge_gate(base, [slower], parse_tolerances(["ttft=10%"])))["ttft_p50"]
    assert (given.verdict, given.tolerance) == ("inconclusive", 0.1)
