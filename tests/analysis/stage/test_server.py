"""Samples of the server's metrics, hand-worked."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ampacity.analysis.contract.stage import Server
from ampacity.analysis.stage.server import ABSENT, server_figures
from ampacity.loadgen.telemetry import SCHEMA
from tests.support.contract import summarise
from tests.support.synthetic import ORIGIN_NS, Stage, make_run, request, warned

S = 1_000_000_000


def samples(rows: list[dict[str, float]]) -> pa.Table:
    return pa.Table.from_pylist(
        [{"at_ns": i * S, **row} for i, row in enumerate(rows)], schema=SCHEMA
    )


def test_gauges_are_means_counters_are_growth_inside_the_window() -> None:
    table = samples(
        [
            {"running": 100, "waiting": 100, "preemptions_total": 0},  # before the window
            json.loads("""{"running": 2, "waiting": 0, "kv_cache_usage": 0.1,
                "preemptions_total": 3, "prefix_cache_hits_total": 100,
                "prefix_cache_queries_total": 400}"""),
            json.loads("""{"running": 4, "waiting": 3, "kv_cache_usage": 0.9, "engines": 2,
                "tensor_active": 0.4, "memory_active": 0.8, "adapter_slots": 4,
                "adapter_slots_used": 3, "cached_tokens_total": 10,
                "kv_block_lifetime_s_total": 5.0, "kv_blocks_evicted_total": 10,
                "preemptions_total": 5, "prefix_cache_hits_total": 150,
                "prefix_cache_queries_total": 500}"""),
            json.loads("""{"running": 6, "waiting": 0, "kv_cache_usage": 0.5,
                "tensor_active": 0.6, "memory_active": 0.9, "cached_tokens_total": 50,
                "kv_block_lifetime_s_total": 65.0, "kv_blocks_evicted_total": 30,
                "preemptions_total": 8, "prefix_cache_hits_total": 190,
                "prefix_cache_queries_total": 600}"""),
            {"running": 100, "waiting": 100, "preemptions_total": 100},  # after it
        ]
    )
    assert server_figures(table, 1 * S, 4 * S) == Server(
        samples=3,
        engines=2,
        running=4,
        running_max=6,
        waiting=1,
        kv_cache_usage_max=0.9,
        preemptions=5,
        prefix_hit_rate=pytest.approx(90 / 200),
        cached_tokens=40,
        kv_block_lifetime_s=pytest.approx(60 / 20),
        spec_acceptance_rate=None,
        adapter_slots=4,
        adapter_slots_used_max=3,
        gpu_utilization=None,
        tensor_active=pytest.approx(0.5),
        memory_active=pytest.approx(0.85),
        gpu_memory_used_bytes=None,
        reason=ABSENT,
    )


def test_a_counter_that_went_back_says_nothing_and_the_engines_own_rate_stands() -> None:
    table = samples(
        [
            {"running": 1, "preemptions_total": 9, "prefix_hit_rate": 0.25},
            {"running": 1, "preemptions_total": 0, "prefix_hit_rate": 0.75},
        ]
    )
    found = server_figures(table, 0, 2 * S)
    assert (found.preemptions, found.prefix_hit_rate) == (None, 0.5)


def test_no_sample_no_figures() -> None:
    assert server_figures(None, 0, S) is None
    assert server_figures(samples([]), 0, S) is None
    assert server_figures(samples([{"running": 1}]), 5 * S, 6 * S) is None


def test_the_columns_of_an_older_version_may_be_fewer() -> None:
    table = samples([{"running": 2}]).select(["at_ns", "running"])
    found = server_figures(table, 0, S)
    assert (found.running, found.gpu_utilization) == (2, None)


# -- speculation -----------------------------------------------------------------------------------

DRAFTS = "spec_draft_tokens_total"
ACCEPTED = "spec_accepted_tokens_total"


@pytest.mark.parametrize(
    ("rows", "workload", "said"),
    [
        # 40 of 100 drafted tokens were accepted
        ([{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}], {}, "accepted 40% of them"),
        (
            [{"spec_acceptance_rate": 0.25}, {"spec_acceptance_rate": 0.35}],
            {},
            "accepted 30% of them",
        ),
        # random words that no draft guesses: spoilt as much as can be
        ([{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 0}], {}, "accepted 0% of them"),
        (
            [{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}],
            {"prompt_file": {"file": "p.jsonl"}},
            None,
        ),
        (
            [{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}],
            {"trace": {"recorded_prompts": 7, "requests": 7}},
            None,
        ),
        (
            [{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}],
            {"trace": {"recorded_prompts": 7, "requests": 1200}},
            "on prompts of random words (in 1,193 of 1,200 requests)",
        ),
        (
            [{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}],
            {"trace": {"recorded_prompts": 995, "requests": 1000}},
            None,
        ),
        (
            [{DRAFTS: 0, ACCEPTED: 0}, {DRAFTS: 100, ACCEPTED: 40}],
            {"trace": {"recorded_prompts": 0, "requests": 7}},
            "40%",
        ),
        ([{DRAFTS: 5, ACCEPTED: 1}, {DRAFTS: 5, ACCEPTED: 1}], {}, None),  # it can, and did not
        (
            [{"spec_acceptance_rate": 0.0}, {"spec_acceptance_rate": 0.0}],
            {},
            None,
        ),  # a gauge of no drafts
        ([{"running": 1}, {"running": 2}], {}, None),
    ],
)
def test_a_server_that_speculates_on_made_up_words_is_said_to(
    rows: list[dict[str, float]], workload: dict[str, object], said: str | None, tmp_path: Path
) -> None:
    records = [request(i, i * 0.05, gaps_s=[0.01] * 7) for i in range(200)]
    run = make_run(
        tmp_path / "run",
        [Stage(records, 10.0)],
        workload={"name": "w", "prompts": "unique", **workload},
    )
    table = pa.Table.from_pylist(
        [{"at_ns": ORIGIN_NS + (8 + i) * S, **row} for i, row in enumerate(rows)], schema=SCHEMA
    )
    summary = summarise(replace(run, server=table))
    found = next((w["text"] for w in summary["warnings"] if w["code"] == "speculation"), None)
    assert (found is None) is (said is None)
    if said is not None and found is not None:
        assert said in found
        assert "--prompts FILE" in found


@pytest.mark.parametrize(
    ("running", "waiting", "more"),
    [(15, 4, None), (16, 8, "14"), (500, 900, "1,390"), (9, 1, None)],
)
def test_far_more_than_this_run_has_in_flight_is_other_load_and_no_cause(
    running: int, waiting: int, more: str | None, tmp_path: Path
) -> None:
    """20 requests/s of 0.5 s are 10 in flight; 1.5 times that and 5 more are 20."""
    records = [request(i, i * 0.05, ttft_s=0.43, gaps_s=[0.01] * 7) for i in range(200)]
    run = make_run(tmp_path / "run", [Stage(records, 10.0)])
    gauges = {"running": running, "waiting": waiting, "kv_cache_usage": 0.99, "engines": 1}
    rows = [{"at_ns": ORIGIN_NS + s * S, **gauges} for s in range(1, 10)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    summary = summarise(replace(run, server=table))
    text = warned(summary, "foreign_load") or ""
    assert (f" the server runs {more} more requests than this run sends: " in text) == bool(more)
    assert summary["stages"][0]["server"]["running"] == (None if more else running)
    held = [limit["rule"] for limit in summary["limits"] if limit["holds"]]
    assert ("kv_pressure" in held) == (more is None)


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ({"kv_cache_usage": 7.5}, "share of the KV cache of 7.5"),  # in per cent
        ({"prefix_hit_rate": -0.5}, "share of prefix hits of -0.5"),
        ({"gpu_utilization": 80.0}, "GPU utilization of 80"),
        ({"kv_cache_usage": 1.0, "prefix_hit_rate": 0.0}, ""),
    ],
)
def test_a_share_that_is_none_is_left_out_and_said(
    odd: dict[str, float], name: str, tmp_path: Path
) -> None:
    server = server_figures(samples([{"running": 1, **odd}] * 3), 0, 3 * S)
    said = f"{name}: not between 0 and 1, and left out"
    assert (said in (server.reason or "")) == bool(name)
    if name:
        assert getattr(server, next(iter(odd)).replace("usage", "usage_max")) is None
    else:
        assert (server.kv_cache_usage_max, server.prefix_hit_rate) == (1.0, 0.0)
