"""The quota of an endpoint, found from what limiters of each kind let through."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.capacity.next_load import Finished, Goal, next_step
from ampacity.analysis.slo import parse_slos
from ampacity.analysis.summary import summarise as summary_of_run
from ampacity.analysis.timeline import timeline_of
from ampacity.experiments.sweep import next_rate
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.reports.charts.timeline import timeline_chart
from tests.support.contract import on_stages, summarise
from tests.support.synthetic import Stage, at_ns, make_run, request

Limiter = Callable[[float, float], bool]  # (time in s, cost) -> whether it is let through


def bucket(size: float, window_s: float) -> Limiter:
    """Full at first, and refilled evenly."""
    held = {"level": size, "at": 0.0}

    def take(at_s: float, cost: float) -> bool:
        held["level"] = min(size, held["level"] + (at_s - held["at"]) * size / window_s)
        held["at"] = at_s
        through = held["level"] >= cost
        held["level"] -= cost if through else 0.0
        return through

    return take


def fixed(size: float, window_s: float) -> Limiter:
    """Begins anew with each window."""
    used: dict[int, float] = {}

    def take(at_s: float, cost: float) -> bool:
        window = int(at_s // window_s)
        through = used.get(window, 0.0) + cost <= size
        used[window] = used.get(window, 0.0) + (cost if through else 0.0)
        return through

    return take


def sliding(size: float, window_s: float) -> Limiter:
    """Counts what was let through in the last window."""
    log: deque[tuple[float, float]] = deque()

    def take(at_s: float, cost: float) -> bool:
        while log and log[0][0] <= at_s - window_s:
            log.popleft()
        through = sum(c for _, c in log) + cost <= size
        if through:
            log.append((at_s, cost))
        return through

    return take


def played(
    limiter: Limiter, rate_rps: float, length_s: float, seed: int = 1, **how: Any
) -> list[RequestRecord]:
    """Poisson arrivals at a limiter; ``tokens``: it counts tokens, of 50 to 150 a request."""
    drawn = np.random.default_rng(seed)
    times_s = np.sort(drawn.uniform(0, length_s, drawn.poisson(rate_rps * length_s)))
    records, first, stage = [], how.get("first", 0), how.get("stage", 0)
    for i, at_s in enumerate(times_s.tolist()):
        tokens = int(drawn.integers(45, 145)) if how.get("tokens") else 95
        cost = tokens + 5.0 if how.get("tokens") else 1.0
        more: dict[str, Any] = {"input_tokens": tokens, **how.get("columns", {})}
        if not limiter(at_s - how.get("begins_s", 0.0), cost):
            more |= {"status": "http_error", "http_status": 429, "error": how.get("error", "no")}
            more |= {"ttft_s": None}
        gaps = [] if "ttft_s" in more else [0.01] * 4
        at_s += how.get("begins_s", 0.0)
        more = {"http_status": 200, "gaps_s": gaps, **more}
        records.append(request(first + i, at_s, stage=stage, **more))
    return records


@pytest.mark.parametrize("limiter", [bucket, fixed, sliding])
@pytest.mark.parametrize("seed", range(5))
def test_the_quota_is_found_within_3_percent(
    limiter: Callable[[float, float], Limiter], seed: int, tmp_path: Path
) -> None:
    """Once the allowance is used up and two windows have passed; at 1.2 to 3 times the quota."""
    drawn = np.random.default_rng(seed)
    size, over = float(drawn.integers(60, 600)), float(drawn.uniform(1.2, 3.0))
    length_s = 60 / (over - 1) * (limiter is bucket) + 180  # used up, and two windows more
    records = played(limiter(size, 60.0), over * size / 60, length_s, seed)
    run = make_run(tmp_path / "run", [Stage(records, length_s)], ["ttft_p95=1s"])
    found = summarise(run)
    assert found["quota"]["unit"] == "requests"
    assert found["quota"]["per_min"] == pytest.approx(size, rel=0.03)
    assert found["capacity"]["capacity_rps"] is None
    assert "hardware is not known" in found["capacity"]["reason"]
    assert found["verdict"].startswith("No capacity is named: the endpoint's quota ")
    assert found["fleet"]["instances"] is None
    assert "next_command" not in found


@pytest.mark.parametrize(
    "told",
    [
        {"error": "Rate limit reached for gpt on tokens per min (TPM)"},
        {"columns": {"quota_requests": 500.0, "quota_requests_left": 400.0}
         | {"quota_tokens": 30_000.0, "quota_tokens_left": 20.0}},
    ],
)  # fmt: skip
def test_a_quota_of_tokens(told: dict[str, Any], tmp_path: Path) -> None:
    records = played(bucket(30_000, 60.0), 8.0, 240.0, tokens=True, **told)
    found = summarise(make_run(tmp_path / "run", [Stage(records, 240.0)], []))["quota"]
    assert (found["unit"], found["binds"]) == ("tokens", True)
    assert found["per_min"] == pytest.approx(30_000, rel=0.03)


def test_what_the_headers_say_stands_beside_it(tmp_path: Path) -> None:
    says = {"quota_requests": 500.0, "quota_requests_left": 0.0}
    records = played(bucket(500, 60.0), 16.0, 240.0, columns=says)
    found = summarise(make_run(tmp_path / "run", [Stage(records, 240.0)], []))
    expected = found["quota"]["text"]
    assert expected in (f"quota {n} requests/min (header says 500)" for n in range(485, 516))
    cause = next(c for c in found["limits"] if c["rule"] == "quota")
    assert found["quota"]["text"] in cause["title"]
    assert cause["holds"]


@pytest.mark.parametrize(
    ("stated", "wrong"), [(1.0, ", which is wrong: 3 got through in that time"), (2.0, "")]
)
def test_a_header_that_the_answers_refute_is_said_to_be_wrong(
    stated: float, wrong: str, tmp_path: Path
) -> None:
    """Three requests get through at once: more than twice 1, not more than twice 2."""
    says = {"quota_requests": stated, "quota_window_s": 3600.0}
    records = played(fixed(3, 3600.0), 16.0, 20.0, columns=says)
    found = summarise(make_run(tmp_path / "run", [Stage(records, 20.0)], []))["quota"]["text"]
    assert found == f"quota of unknown size (header says {stated:.0f} in 3600 s{wrong})"


def test_what_is_left_and_what_is_refused_is_drawn(tmp_path: Path) -> None:
    says = {"quota_requests": 500.0, "quota_requests_left": 125.0, "headers_ns": at_ns(3.0)}
    records = played(bucket(500, 60.0), 16.0, 120.0, columns=says)
    run = make_run(tmp_path / "run", [Stage(records, 120.0)], [])
    timeline = timeline_of(run)
    assert timeline.server == {"quota_left": [(3.0, 0.25)]}
    refused = sum(r.http_status == 429 for r in records)
    assert sum(timeline.failed_rps["rate_limited"]) * timeline.step_s == pytest.approx(refused)
    chart = timeline_chart(timeline, summary_of_run(run))
    assert "failures/s, quota left" in chart.alt


def test_a_stage_too_short_names_no_number(tmp_path: Path) -> None:
    records = played(fixed(300, 60.0), 20.0, 50.0)
    found = summarise(make_run(tmp_path / "run", [Stage(records, 50.0)], []))["quota"]
    assert found["per_min"] is None
    assert "two windows" in found["reason"]
    assert found["text"] == "quota of unknown size"


def two_stages(tmp_path: Path, *, slow: bool) -> dict[str, Any]:
    """A stage at half of the quota, slow or not, and one at twice of it."""
    calm = [request(i, 0.25 * i, ttft_s=2.0 if slow else 0.1, gaps_s=[0.01]) for i in range(480)]
    limited = played(bucket(480, 60.0), 16.0, 240.0, first=1000, stage=1, begins_s=130.0)
    stages = [Stage(calm, 120.0), Stage(limited, 240.0, start_s=130.0)]
    return summarise(make_run(tmp_path / "run", stages, ["ttft_p95=1s"]))


def test_a_quota_above_the_hardwares_limit_takes_nothing_from_it(tmp_path: Path) -> None:
    assert two_stages(tmp_path / "slow", slow=True)["quota"]["binds"] is False
    found = two_stages(tmp_path / "quick", slow=False)
    assert found["quota"]["binds"] is True
    assert "up to 4 req/s met the SLOs" in found["verdict"]


def test_no_higher_load_is_tried(tmp_path: Path) -> None:
    stages = two_stages(tmp_path, slow=False)["stages"]
    assert stages[1]["errors"]["rate_limited"] > 0
    assert on_stages(next_rate)(stages[:1]) == 8.0
    assert on_stages(next_rate)(stages) is None
    end = on_stages(next_step)(stages, Goal(tuple(parse_slos(["ttft_p95=1s"])), 0.05))
    assert isinstance(end, Finished)
    assert "are refused with 429: a quota, not the hardware" in end.why
