"""Rules against illnesses: each rule finds the endpoint that has its illness, and no other.

The runs are predicted: a simulated engine in virtual time, whose settings make it ill. What no
setting of it can do is done to the records of a healthy run. Rows of ILLNESSES are the matrix of
docs/diagnosis.md.
"""

import asyncio
import collections
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from rich.console import Console

from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.limits.table import RULES, find_limits
from ampacity.analysis.summary import summarise
from ampacity.config import make_settings
from ampacity.experiments.virtual import player
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.progress import Progress
from ampacity.reports.pages.limits import limits_with_figures
from ampacity.simulator.models.hardware import find_deployment
from tests.support import sample_summary
from tests.support.repeats import often

REQUESTS = often(600, 2000)
Change = Callable[[Run], Run]
Row = dict[str, Any]  # of requests.parquet
AT_FIRST_CHUNK = "headers_ns", "first_event_ns", "first_token_ns", "first_answer_ns"


def _records(change: Callable[[Row], None]) -> Change:
    """Return a change of each record of a run; its times follow from those of its chunks."""

    def changed(run: Run) -> Run:
        rows = sorted(run.requests.to_pylist(), key=lambda row: row["scheduled_ns"])
        for row in rows:
            before = row["chunk_at_us"]
            change(row)
            for name in (*AT_FIRST_CHUNK, "last_token_ns", "ended_ns"):
                chunk = 0 if name in AT_FIRST_CHUNK else -1
                if row["status"] == "ok" and row[name] is not None:
                    row[name] += 1000 * (row["chunk_at_us"][chunk] - before[chunk])
        return dataclasses.replace(run, requests=pa.Table.from_pylist(rows, run.requests.schema))

    return changed


def _quota(per_s: int) -> Change:
    """Refuse what exceeds a number of requests in each second."""
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    refused = {"status": "http_error", "http_status": 429, "error": "HTTP 429: slow down"}
    refused |= {"chunk_at_us": [], "chunk_tokens": None, "output_tokens": None}
    refused |= dict.fromkeys((*AT_FIRST_CHUNK, "last_token_ns", "finish_reason"))

    def refuse(row: Row) -> None:
        second = row["stage"], row["scheduled_ns"] // 10**9
        used[second] += 1
        if used[second] > per_s:
            row.update(refused, ended_ns=row["started_ns"] + 10**6)

    return _records(refuse)


def _paged_adapter(row: Row) -> None:
    if row["class"] == "adapter":
        row["chunk_at_us"] = [at + 200_000 for at in row["chunk_at_us"]]


def _in_groups_of_16(row: Row) -> None:
    at = row["chunk_at_us"]
    row["chunk_at_us"] = [at[min(i // 16 * 16 + 15, len(at) - 1)] for i in range(len(at))]


def _ever_slower(row: Row) -> None:
    """Give none of the requests at the start of a stage, and 20 % at its end, 200 ms more."""
    progress, chance = row["request_id"] % REQUESTS / REQUESTS, row["request_id"] * 37 % 100 / 100
    if chance < 0.2 * progress:
        row["chunk_at_us"] = [at + 200_000 for at in row["chunk_at_us"]]


def _one_replica_of_eight_is_slow(row: Row) -> None:
    at = row["chunk_at_us"]
    if row["request_id"] % 8 == 0:
        row["chunk_at_us"] = [at[0] + 3 * (t - at[0]) // 2 for t in at]


def _busy_client(run: Run) -> Run:
    stages = [dict(stage) for stage in run.meta["stages"]]
    stages[1]["audit"] = {"client_limited_reason": "lag p99 40 ms"}
    return dataclasses.replace(run, meta=run.meta | {"stages": stages})


def _disturbed_and_repeated(run: Run) -> Run:
    """Let stage 0 be disturbed, and stage 1 be its repetition."""
    stages = [dict(stage) for stage in run.meta["stages"]]
    stages[0]["audit"] = {"client_limited_reason": "lag p99 40 ms"}
    stages[1]["offered_rps"] = stages[0]["offered_rps"]
    return dataclasses.replace(run, meta=run.meta | {"stages": stages})


HEALTHY: dict[str, Any] = {"input_tokens": 500, "output_tokens": 100, "rates": "2,8,16"}
HEALTHY |= {"slo": ["ttft_p95=500ms", "tpot_p95=50ms"]}
ADAPTERS = """
classes:
  base: {weight: 1, input_tokens: 500, output_tokens: 100}
  adapter: {weight: 1, input_tokens: 500, output_tokens: 100}
"""
ON_RECORDS: dict[str, tuple[Change, set[str]]] = {
    # what is done to the records of the healthy run: (change, rules that hold)
    "a quota of 5 requests/s": (_quota(5), {"quota"}),
    "an adapter that is paged in": (_records(_paged_adapter), {"slow_class"}),
    "a gateway that sends 16 tokens at once": (_records(_in_groups_of_16), {"held_back"}),
    "an endpoint that gets slower and slower": (_records(_ever_slower), {"drift"}),
    "one replica of eight is slow": (_records(_one_replica_of_eight_is_slow), {"replicas"}),
    "a busy client": (_busy_client, {"client_limited"}),
    "a disturbed stage that was repeated": (_disturbed_and_repeated, set()),
}
OVERLOAD = {"queueing", "plateau"}  # what any engine shows beyond its throughput
ILLNESSES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # name: (engine, load, rules that hold)
    "healthy": ("llama3-8b-h100", HEALTHY, set()),
    "prompts of 4,000 tokens at 12/s": (
        "llama3-8b-h100",
        {"input_tokens": 4000, "output_tokens": 20, "rates": "0.5,4,12", "slo": ["ttft_p95=500ms"]},
        OVERLOAD | {"prefill_bound"},
    ),
    "answers of 400 tokens at 80/s": (
        "llama3-8b-h100,max_num_seqs=2048",
        {"input_tokens": 50, "output_tokens": 400, "rates": "0.5,40,80", "slo": ["tpot_p95=12ms"]},
        {"decode_bound", "plateau"},
    ),
    "long prompts between short ones": (
        "llama3-8b-h100",
        {"input_tokens": "lognormal:p50=800,p99=7000", "output_tokens": 200, "rates": "0.5,4,8"}
        | {"slo": ["itl_p99=40ms", "ttft_p95=2s"]},
        {"prefill_interference"},
    ),
    "an SLO on TTFT below one prompt": (
        "llama3-8b-h100",
        {"input_tokens": 6000, "output_tokens": 50, "rates": "0.3,1", "slo": ["ttft_p95=50ms"]},
        {"slow_prefill_alone"},
    ),
    "an SLO on TPOT below one step": (
        "llama3-8b-h100",
        {"input_tokens": 500, "output_tokens": 100, "rates": "0.3,2", "slo": ["tpot_p95=5ms"]},
        {"slow_decode_alone"},
    ),
    "prefill and decoding in each other's way": (
        "llama3-8b-h100",
        {"input_tokens": 2000, "output_tokens": 200, "rates": "0.5,5,10"}
        | {"slo": ["ttft_p95=200ms", "tpot_p95=25ms"]},
        {"both_slos", "prefill_bound"},
    ),
    "a KV cache of a small card": (
        "llama3-8b-l4",
        {"input_tokens": 300, "output_tokens": 700, "rates": "0.05,0.6,1.2"}
        | {"slo": ["tpot_p95=200ms"]},
        OVERLOAD | {"kv_pressure"},
    ),
    "eight sequences at most": (
        "llama3-8b-h100,max_num_seqs=8",
        {"input_tokens": 300, "output_tokens": 200, "rates": "0.5,3,6", "slo": ["ttft_p95=500ms"]},
        OVERLOAD | {"batch_capped"},
    ),
    "drafts that are rejected": (
        "llama3-8b-h100,speculation=4:0.3:0.002",
        {"input_tokens": 300, "output_tokens": 200, "rates": "0.5,4", "slo": ["ttft_p95=500ms"]},
        {"speculation"},
    ),
    "shared prompts without a prefix cache": (
        "llama3-8b-h100",
        {"workload": "agentic", "rates": "0.05", "slo": ["ttft_p95=3s"]},
        {"prefix_cache"},
    ),
}


def predicted(
    engine: str, load: dict[str, Any], folder: Path, seed: int = 1, requests: int = REQUESTS
) -> Run:
    """Predict a run; ``requests``: of a stage at least."""
    given = {"url": "http://predicted.invalid/v1", "duration": "30s", "out": str(folder)}
    settings = make_settings({**given, **load, "seed": seed})
    quiet = Progress(Console(file=io.StringIO()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "REQUESTS_MIN", requests)
        path = asyncio.run(predict(settings, find_deployment(engine), ["ampacity"], quiet))
    return load_run(path)


@pytest.fixture(scope="module")
def summary_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    """Return the summary of the prediction of an illness, which is made once."""

    @functools.cache
    def made(illness: str) -> Summary:
        engine, load, _ = ILLNESSES[illness]
        return summarise(predicted(engine, load, tmp_path_factory.mktemp("ill") / "run"))

    return made


def holding(limits: Sequence[Limit]) -> set[str]:
    return {limit.rule for limit in limits if limit.holds}


@pytest.mark.slow
@pytest.mark.parametrize("illness", list(ILLNESSES))
def test_the_rules_that_hold_are_those_of_the_illness(
    illness: str, summary_of: Callable[[str], Summary]
) -> None:
    limits = summary_of(illness).limits
    assert holding(limits) == ILLNESSES[illness][2]
    for limit in limits:
        assert limit.lever
        assert limit.refuted_by
        assert limit.evidence or not limit.holds
        assert limit.reason or limit.holds is not None
    ranked = [limit.holds for limit in limits]
    assert ranked == sorted(ranked, key=[True, None, False].index)


@pytest.fixture(scope="module")
def healthy(summary_of: Callable[[str], Summary]) -> Summary:
    return summary_of("healthy")


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Predict a healthy run of two classes with lengths that are equal."""
    folder = tmp_path_factory.mktemp("healthy")
    (folder / "adapters.yaml").write_text(ADAPTERS, encoding="utf-8")
    load = {"workload": str(folder / "adapters.yaml")} | HEALTHY
    del load["input_tokens"], load["output_tokens"]
    return predicted("llama3-8b-h100", load, folder / "run")


def test_two_classes_are_healthy(two_classes: Run) -> None:
    assert holding(summarise(two_classes).limits) == set()


@pytest.mark.parametrize("illness", list(ON_RECORDS))
def test_what_is_done_to_records_is_found(illness: str, two_classes: Run) -> None:
    change, expected = ON_RECORDS[illness]
    limits = summarise(change(two_classes)).limits
    assert holding(limits) == expected
    if expected == {"replicas"}:
        step, share = (e.value for e in limits[0].evidence)
        assert step == pytest.approx(1.5, rel=0.1)
        assert share == pytest.approx(0.13, abs=0.02)
    if expected == {"quota"}:
        share, carried, *_ = (e.value for e in limits[0].evidence)
        assert share == pytest.approx(1 - 5 / 16, abs=0.02)
        assert carried == pytest.approx(5, rel=0.02)


def test_the_cause_is_judged_at_the_load_nearest_to_the_capacity(
    summary_of: Callable[[str], Summary],
) -> None:
    """12/s is far above the capacity; at 4/s the P95 is over its limit, though not decided."""
    first, *_ = summary_of("prompts of 4,000 tokens at 12/s").limits
    assert (first.rule, {e.stage for e in first.evidence}) == ("prefill_bound", {"4 req/s"})


def _with_stages(summary: Summary, change: Callable[[Stage], dict[str, Any]]) -> Summary:
    """Return the summary with some fields of its stages replaced."""
    stages = [msgspec.structs.replace(stage, **change(stage)) for stage in summary.stages]
    return msgspec.structs.replace(summary, stages=stages)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Return the summary of one engine that is bound by its prompts."""
    engine, load, _ = ILLNESSES["prompts of 4,000 tokens at 12/s"]
    folder = tmp_path_factory.mktemp("one") / "run"
    return summarise(predicted(engine, load | {"rates": "0.5,3,12"}, folder))


@pytest.mark.parametrize(("engines", "share"), [(1, 1.0), (2, 0.5), (8, 0.125), (None, None)])
def test_the_engine_is_busy_for_its_share_of_the_prompts(
    engines: int | None, share: float | None, one: Summary
) -> None:
    """Behind a router each of N engines computes an N-th of the prompts."""
    several = _with_stages(
        one, lambda s: {"server": s.server and msgspec.structs.replace(s.server, engines=engines)}
    )
    (bound,) = [limit for limit in find_limits(several) if limit.rule == "prefill_bound"]
    (of_one,) = [limit for limit in one.limits if limit.rule == "prefill_bound"]
    if share is None:
        assert bound.holds is None
        assert "how many engines share the load" in (bound.reason or "")
    elif bound.holds:
        assert bound.strength == pytest.approx(share * of_one.strength)
    else:
        assert share * of_one.strength < 1
    beyond = [e.value for e in of_one.evidence if "offered load" in e.figure]
    assert beyond == [pytest.approx(12 / (one.capacity.capacity_rps_ci[1] or 0))]


def test_what_was_not_measured_cannot_be_told(healthy: Summary) -> None:
    """Without the server's metrics three rules cannot tell; a rule that needs none answers."""
    blind = _with_stages(healthy, lambda _: {"server": None})
    told = {limit.rule: limit for limit in find_limits(blind)}
    for rule in ("kv_pressure", "batch_capped", "speculation"):
        assert told[rule].holds is None
        assert "the server's own metrics were not read" in (told[rule].reason or "")
    assert told["queueing"].holds is False


def test_every_rule_is_in_the_document() -> None:
    text = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule.name}`" in text, rule.name
    for illness in (*ILLNESSES, *ON_RECORDS):
        assert f"| {illness} |" in text, illness


def test_what_the_run_itself_shows_of_a_refutation_is_given() -> None:
    """TTFT p99 is 100 ms at 1/s and 752 ms at 5/s, where ITL grew to 1.78 times its low level; 3/s
    is the highest of its loads that is about half of that.
    """
    given = sample_summary.open_sweep()
    low, half, broken = (given["stages"][i] for i in (0, 2, 4))
    low["ttft_s"]["p99"] = 0.1
    (found,) = [f for f in find_limits(read_summary(given)) if f.rule == "queueing"]
    shown = [(e.figure, e.value, e.stage, e.unit) for e in found.tested]
    assert shown == [
        ("TTFT p99", half["ttft_s"]["p99"], "3 req/s", "s"),
        ("TTFT p99", broken["ttft_s"]["p99"], "5 req/s", "s"),
        ("a rate lower by", pytest.approx(0.4), None, "share"),
    ]
    (shown_limit,) = limits_with_figures([found])
    assert shown_limit.tested == (
        "Here it falls: TTFT p99 355 ms at 3 req/s; TTFT p99 752 ms at 5 req/s; a rate lower by 40.0%"
    )
    broken["ttft_s"]["p99"] = 0.4  # four times as much: 4/s is still below three times
    given["stages"][3]["ttft_s"]["p99"], broken["itl_s"]["p50"] = 0.1, low["itl_s"]["p50"]
    for p99, outcome in ((0.299, None), (0.2, False), (None, None)):
        half["ttft_s"]["p99"] = p99
        (found,) = [f for f in find_limits(read_summary(given)) if f.rule == "queueing"]
        assert found.refuted is outcome
    half["ttft_s"]["p99"], broken["ttft_s"]["p99"] = 0.295, 0.32  # 92 % of it: it stays
    (found,) = [f for f in find_limits(read_summary(given)) if f.rule == "queueing"]
    assert found.refuted is True


def test_the_most_that_run_while_others_wait_is_the_number_of_sequences(
    summary_of: Callable[[str], Summary],
) -> None:
    found = summary_of("eight sequences at most")
    (capped,) = [one for one in found.limits if one.rule == "batch_capped"]
    assert capped.title.endswith(": the engine probably runs at most 8 at once")
    two = _with_stages(
        found, lambda s: {"server": s.server and msgspec.structs.replace(s.server, engines=2.0)}
    )
    (capped,) = [one for one in find_limits(two) if one.rule == "batch_capped"]
    assert "max_num_seqs" not in capped.title  # of each engine nobody knows


def test_requests_that_wait_while_fewer_run_than_at_other_times_name_no_limit_of_sequences(
    summary_of: Callable[[str], Summary],
) -> None:
    """6 of the 8 that ran at most: below nine tenths of them."""

    def fewer(s: Stage) -> dict[str, Any]:
        return {"server": s.server and msgspec.structs.replace(s.server, running=6.0)}

    found = find_limits(_with_stages(summary_of("eight sequences at most"), fewer))
    assert [one.holds for one in found if one.rule == "batch_capped"] in ([], [False])


def _holds(rule: str) -> Limit:
    texts = dict.fromkeys(("title", "lever", "refuted_by"), rule)
    return Limit(rule=rule, holds=True, evidence=(), tested=(), refuted=None, strength=1.0, **texts)


def test_symptoms_stand_under_the_first_cause_in_the_endpoint() -> None:
    """A client that was the limit causes no queue in the endpoint."""
    names = ("client_limited", "batch_capped", "queueing", "plateau")
    shown = limits_with_figures([_holds(name) for name in names])
    assert [one.limit.rule for one in shown] == ["client_limited", "batch_capped"]
    assert [one.limit.rule for one in shown[1].symptoms] == ["queueing", "plateau"]
    alone = limits_with_figures([_holds("client_limited"), _holds("queueing")])
    assert [one.limit.rule for one in alone] == ["client_limited", "queueing"]


@pytest.mark.parametrize(("ok", "holds"), [(150, False), (160, True)])
def test_a_kind_of_requests_has_twenty_of_them(ok: int, holds: bool) -> None:
    """Of 160 requests an eighth, 20, are 1.5 times as slow; of 150 only 18.8 would be."""
    given = sample_summary.open_sweep()
    for stage in given["stages"]:
        q = [0.05, 0.2, 0.5, 0.875, 0.95]
        stage["curves"]["tpot_s"] = {"q": q, "value": [0.01, 0.01, 0.01, 0.01, 0.015]}
        stage |= {"ok": ok, "stable": True}
        stage["ttft_s"] |= {"p50": 0.01}
    found = {one.rule: one.holds for one in find_limits(read_summary(given))}
    assert found["replicas"] is holds
