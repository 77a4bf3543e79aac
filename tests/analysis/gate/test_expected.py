"""What the gate compares of a quantile, and what it takes for the draw of the schedule."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.change import samples
from ampacity.analysis.change.judged import Judged, prepare
from ampacity.analysis.gate.baseline import make_baseline
from ampacity.analysis.gate.baseline_file import write_baseline
from ampacity.analysis.gate.gate import judge_gate
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations
from tests.support.repeats import often
from tests.support.synthetic import Stage, cohort, make_run, request


def observed(values: Any) -> Observations:
    records = [request(i, i * 0.1, ttft_s=float(v)) for i, v in enumerate(values)]
    return cohort(*records).ttft(from_schedule=True)


def test_marks_lie_around_the_quantile_and_leave_its_share_above_them() -> None:
    """1 to 1000 ms: nine ranks from 0.85 to 0.95 in steps of 0.0125, each the smallest value with
    that share below."""
    o = observed(np.random.default_rng(1).permutation(np.arange(1, 1001)) * 1e-3)
    marks = samples.pooled_marks([o], 0.9)
    assert isinstance(marks, samples.Marks)
    assert marks.limits_s * 1e3 == pytest.approx([850, 863, 875, 888, 900, 913, 925, 938, 950])
    assert samples.over_each(o, marks).sum() == pytest.approx(100)
    median = samples.pooled_marks([o], 0.5)
    assert isinstance(median, samples.Marks)
    assert median.limits_s[[0, 4, 8]] * 1e3 == pytest.approx([400, 500, 600])


def test_samples_that_are_all_equal_are_split_so_that_the_share_is_right() -> None:
    o = observed(np.full(200, 0.1))
    for q in (0.5, 0.9, 0.99):
        marks = samples.pooled_marks([o], q)
        assert isinstance(marks, samples.Marks)
        assert samples.over_each(o, marks).sum() == pytest.approx(200 * (1 - q))
        assert samples.over_each(o, marks.times(1.03)).sum() == 0
        assert samples.moved_by([o], marks, 1 - q) == pytest.approx(1.0, abs=1e-6)


def test_marks_reach_no_farther_than_what_was_answered() -> None:
    """Of 100 requests 6 failed: the marks of p90 lie at ranks 0.86 to 0.94; p95 is infinite."""
    values = [request(i, i * 0.1, ttft_s=0.1 + i * 1e-3) for i in range(94)]
    failed = [request(94 + i, 9.4 + i * 0.1, ttft_s=None, status="http_error") for i in range(6)]
    o = cohort(*values, *failed).ttft(from_schedule=True)
    assert np.isfinite(o.quantile_bounds(0.9)[1])
    marks = samples.pooled_marks([o], 0.9)
    assert isinstance(marks, samples.Marks)
    assert marks.limits_s * 1e3 == pytest.approx(np.arange(185, 194))
    assert samples.over_each(o, marks).sum() == pytest.approx(10)
    assert isinstance(samples.pooled_marks([o], 0.94), samples.Marks)
    assert samples.pooled_marks([o], 0.95) == "infinite: requests that failed reach into it"


def test_how_far_the_marks_have_moved() -> None:
    values = np.random.default_rng(2).lognormal(-2, 0.5, 2000)
    marks = samples.pooled_marks([observed(values)], 0.9)
    assert isinstance(marks, samples.Marks)
    # samples are 0.1 % apart
    assert samples.moved_by([observed(values * 1.07)], marks, 0.1) == pytest.approx(1.07, abs=1e-3)
    # no factor leaves more than all of them: there is no such end of an interval
    assert samples.moved_by([observed(values)], marks, 1.0) is None
    # everything is above 0
    assert (
        samples.moved_by([observed(values)], samples.Marks(np.array([0.0]), np.zeros(1)), 0.5)
        is None
    )


@pytest.mark.parametrize("kind", ["ttft", "itl", "itl of known tokens"])
def test_shares_over_are_the_misses_of_all(kind: str) -> None:
    rng = np.random.default_rng(3)
    tokens = [1, 2, 1, 3, 1] if kind == "itl of known tokens" else None
    records = [
        request(
            i,
            i * 0.1,
            ttft_s=float(rng.exponential(0.1)),
            gaps_s=rng.exponential(0.02, 4).tolist(),
            chunk_tokens=tokens,
        )
        for i in range(100)
    ]
    records.append(request(100, 10.0, ttft_s=None, status="http_error"))
    records.append(
        request(
            101,
            10.1,
            ttft_s=None,
            status="unfinished",
            ended_ns=records[0].scheduled_ns + int(10.15e9),
        )
    )
    c = cohort(*records)
    o = c.ttft(from_schedule=True) if kind == "ttft" else c.itl
    limits = np.array([0.0, 0.01, 0.04, 0.06, 1.0, np.inf])
    assert o.shares_over(limits) * o.n == pytest.approx(o.misses_each(limits).sum(axis=1))


def test_a_queue_by_hand() -> None:
    """10 ms a token: 1 s, 2 s and 0.5 s of work, due at 0, 1 and 1.5 s. The third waits until 3 s."""
    due, tokens = (0.0, 1.0, 1.5), (100, 200, 50)
    records = [
        request(i, t, input_tokens_planned=n)
        for i, (t, n) in enumerate(zip(due, tokens, strict=True))
    ]
    assert samples.queue_time_s(cohort(*records).requests, 0.01) == pytest.approx([1.0, 2.0, 2.0])


def test_the_table_is_the_excess_of_each_cell() -> None:
    """Two of four over the threshold in cell 0, one of one in cell 2: 0.5 and 1, less 0.6 of all."""
    over, cells = np.array([1.0, 1, 0, 0, 1]), [np.array([0, 0, 0, 0, 2])]
    (found,) = samples.tables_of(cells, over, np.ones(5), 0.6)
    assert found[:3] == pytest.approx([-0.1, 0.0, 0.4])
    assert not found[3:].any()


def test_tables_of_two_quantities_add_up() -> None:
    """0.2 more in the upper half of one quantity and 0.4 more in the other's, unevenly crossed:
    both are found."""
    a, b = np.array([0] * 6 + [1] * 6), np.array([0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1])
    over = 0.2 * a + 0.4 * b
    tables = samples.tables_of([a, b], over, np.ones(12), float(over.mean()))
    assert tables[0][1] - tables[0][0] == pytest.approx(0.2, abs=0.01)
    assert tables[1][1] - tables[1][0] == pytest.approx(0.4, abs=0.01)
    assert samples.expected_of(tables, [a, b]) == pytest.approx(over - over.mean(), abs=0.01)


def test_mean_in_flight_by_hand() -> None:
    """A streams from 1 to 5 s; B is in flight from 2 to 4: 1.5 for A; B's tokens come from 3 to 4
    s, with A there: 2."""
    a = request(0, 0.0, ttft_s=1.0, gaps_s=[4.0])
    b = request(1, 2.0, ttft_s=1.0, gaps_s=[1.0])
    c = request(2, 4.5, ttft_s=None, status="http_error")  # at its arrival: A and itself
    requests = cohort(a, b, c).requests
    assert samples.mean_in_flight(requests, requests, 100e9)[:2] == pytest.approx([1.5, 2.0])


S_PER_TOKEN = 1e-4


def queue_run(path: Path, seed: int, slower: float = 1.0, n: int = 1200) -> Judged:
    """Poisson arrivals, log-normal prompts, and the TTFT that a single queue would give, with 10 %
    of noise."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(0.2, n))
    tokens = np.round(rng.lognormal(6.5, 1.0, n))
    plan: Cohort = cohort(
        *(
            request(i, t, input_tokens_planned=int(k))
            for i, (t, k) in enumerate(zip(due, tokens, strict=True))
        )
    )
    ttft = samples.queue_time_s(plan.requests, slower * S_PER_TOKEN) * rng.lognormal(0, 0.1, n)
    records = [
        request(i, t, ttft_s=float(x), gaps_s=[0.01] * 4, input_tokens_planned=int(k))
        for i, (t, k, x) in enumerate(zip(due, tokens, ttft, strict=True))
    ]
    return prepare(
        make_run(path, [Stage(records, n * 0.2, offered_rps=5.0)], seed=seed, run_id=path.name)
    )


def test_the_queue_that_the_times_come_from_is_found(tmp_path: Path) -> None:
    run = queue_run(tmp_path / "run", 1)
    requests = run.records.requests
    ttft_s = (requests.first_token_ns - requests.scheduled_ns) * 1e-9
    assert samples.fit_queue([requests], [ttft_s]) == pytest.approx(S_PER_TOKEN, rel=0.3)
    assert samples.fit_queue(
        [requests], [np.where(np.arange(1200) < 100, np.nan, ttft_s)]
    ) == pytest.approx(S_PER_TOKEN, rel=0.3)


def test_what_the_draw_explains_is_no_change_and_a_change_is_found_all_the_same(
    tmp_path: Path,
) -> None:
    """Pairs of other schedules. Raw medians differ by several percent; the equal ones must not
    be called worse, and 7 % more than the tolerance must be found, which without the table it
    mostly is not."""
    equal, found, without, n = [], [], [], often(3, 5)
    for seed in range(n):
        base = json.loads(write_baseline(make_baseline([queue_run(tmp_path / f"b{seed}", seed)])))
        same = queue_run(tmp_path / f"s{seed}", 100 + seed)
        slow = queue_run(tmp_path / f"l{seed}", 200 + seed, slower=1.1)

        def ttft(run: Judged, base: dict[str, Any] = base) -> dict[str, Any]:
            checks = judge_gate(base, [run], {"ttft_p50": 0.03}).checks
            return next(c for c in checks if c.name == "ttft_p50")

        equal.append(ttft(same))
        found.append(ttft(slow).verdict)
        for metric, entry in base["levels"]["5/s"]["quantiles"].items():
            if metric.startswith("ttft"):
                entry["expected"] = None
        without.append(ttft(slow).verdict)
    assert "regression" not in [c.verdict for c in equal]
    assert max(abs(c.shift) for c in equal) < 0.03
    assert found.count("regression") >= n - 1
    assert without.count("regression") <= n - 2


def test_a_closed_loop_and_sessions_have_no_table(tmp_path: Path) -> None:
    """Their schedule depends on the server: what it explains may be the very change that is looked
    for."""
    records = [
        request(i, i * 0.05, ttft_s=0.1 + i % 7 * 0.01, gaps_s=[0.01] * 4) for i in range(400)
    ]
    for made in (
        Stage(records, 20.0, concurrency=4),
        Stage(records, 20.0, offered_rps=20.0, extra={"played_sessions": True}),
    ):
        base = make_baseline([prepare(make_run(tmp_path / f"{made.concurrency}", [made]))])
        (level,) = base["levels"].values()
        assert [c["by"] for c in level["cells"]["ttft"]] == ["at_arrival"]
