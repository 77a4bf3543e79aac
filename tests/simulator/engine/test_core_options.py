"""Each option of the engine, with figures worked out by hand."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import Engine, Request, Speculation
from ampacity.simulator.engine.options import POLICIES
from ampacity.simulator.models.hardware import PRESETS, linear_config
from benchmarks.servers.truth import simulate
from tests.support.repeats import often
from tests.support.simulator.engine_runs import prefix_hashes, run_dry, tiny

# Prefix cache


def test_a_prefix_hit_leaves_only_the_rest_to_compute() -> None:
    """16 of 18 prompt tokens are four cached blocks: 2 ms instead of 18."""
    config = tiny(prefix_caching=True)
    names = prefix_hashes("system", 16, 4)
    requests = [Request(18, 1, block_hashes=names) for _ in range(2)]
    outcome = simulate(config, [0.0, 1.0], requests)
    assert outcome.ttft_s == pytest.approx([0.018, 0.002])
    assert outcome.cached_tokens.tolist() == [0, 16]


def test_the_last_prompt_token_is_always_computed() -> None:
    config = tiny(prefix_caching=True)
    requests = [Request(16, 1, block_hashes=prefix_hashes("p", 16, 4)) for _ in range(2)]
    outcome = simulate(config, [0.0, 1.0], requests)
    # Only 12 of 16 may come from the cache, as the first output token needs a computed one
    assert outcome.cached_tokens.tolist() == [0, 12]
    assert outcome.ttft_s == pytest.approx([0.016, 0.004])


def test_requests_of_one_step_share_blocks() -> None:
    engine = Engine(tiny(prefix_caching=True))
    names = prefix_hashes("p", 16, 4)
    for _ in range(3):
        engine.submit(Request(18, 4, block_hashes=names), 0.0)
    result = engine.step(0.0)
    # Four shared blocks and one each of their own; 18 + 2 + 2 tokens computed
    assert (16 - engine.free_blocks, result.prefill_tokens) == (4 + 3, 22)
    assert (engine.prefix_queries, engine.prefix_hits) == (54, 32)
    run_dry(engine, result.end_s)
    assert engine.free_blocks == 16


def test_least_recently_used_blocks_are_given_up_first() -> None:
    """16 blocks, prefixes of 5: after a, b, c and b again, d evicts the rest of a and c's tail."""
    engine = Engine(tiny(prefix_caching=True))

    def ask(name: str) -> int:
        request = Request(21, 1, block_hashes=prefix_hashes(name, 20, 4))
        engine.submit(request, 0.0)
        run_dry(engine)
        return request.cached_tokens

    # 15 named blocks idle; c's run kept a's first block free
    assert [ask(name) for name in "abc"] == [0, 0, 0]
    assert ask("b") == 20
    assert ask("d") == 0  # needs 6 of 16: the oldest go, which are a's
    assert ask("b") == 20
    assert ask("d") == 20
    assert ask("a") == 0


def test_a_conversation_finds_its_answer_again() -> None:
    """Turn 2 has turn 1's prompt and answer: 8 + 8 tokens, the last without KV entry."""
    config = tiny(prefix_caching=True)
    names = prefix_hashes("chat", 24, 4)
    turns = [Request(8, 9, block_hashes=names), Request(20, 2, block_hashes=names)]
    assert simulate(config, [0.0, 1.0], turns).cached_tokens.tolist() == [0, 16]


def naive_hits(rows: list[tuple[int, int, int]], blocks: int) -> list[int]:
    """Cached tokens of successive requests, with a list as the cache, oldest first."""
    idle: list[tuple[object, ...]] = []
    found = []
    for number, (prompt, shared, prefix) in enumerate(rows):
        names = [(prefix, n) if n < shared else (number, prefix, n) for n in range(prompt // 4)]
        hits = 0
        while hits < (prompt - 1) // 4 and names[hits] in idle:
            hits += 1
        for name in names[:hits]:
            idle.remove(name)
        while len(idle) > blocks - math.ceil(prompt / 4):
            idle.pop(0)
        idle += reversed([name for name in names if name not in idle])
        found.append(4 * hits)
    return found


@settings(max_examples=often(50, 200), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 15), st.integers(0, 4)),
        min_size=1,
        max_size=40,
    ),
    st.integers(16, 40),
)
def test_same_hits_as_a_naive_cache(rows: list[tuple[int, int, int]], blocks: int) -> None:
    engine = Engine(tiny(prefix_caching=True, kv_blocks=blocks))
    found = []
    for number, (prompt, shared, prefix) in enumerate(rows):
        names = [(prefix, n) if n < shared else (number, prefix, n) for n in range(prompt // 4)]
        request = Request(prompt, 1, block_hashes=names)
        engine.submit(request, 0.0)
        run_dry(engine)
        found.append(request.cached_tokens)
    assert found == naive_hits(rows, blocks)


prefixed = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=40,
)


@settings(max_examples=often(37, 150), deadline=None)
@given(
    prefixed,
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(POLICIES),
            "speculation": st.sampled_from([None, Speculation(3, 0.6)]),
            "static_batching": st.booleans(),
            "kv_blocks": st.integers(16, 30),
        }
    ),
)
def test_conservation_under_every_option(
    rows: list[tuple[int, int, int, bool]], options: dict[str, Any]
) -> None:
    """Each request gets its tokens, aborted ones none; then all blocks and slots are free."""
    fixed = {"max_num_batched_tokens": 18, "max_loras": 2, "adapter_load_s": 0.1}
    engine = Engine(tiny(**options, prefix_caching=True, **fixed))
    given_tokens: Counter[Request] = Counter()
    requests = []
    for number, (prompt, output, prefix, dropped) in enumerate(rows):
        names = [(prefix, n) for n in range(3)] + [(prefix, number, n) for n in range(20)]
        request = Request(
            prompt,
            output,
            block_hashes=names,
            adapter=f"lora{prefix}" if prefix else None,
        )
        engine.submit(request, 0.001 * number)
        requests.append((request, dropped and number % 3 == 0))
    now_s, steps = 0.0, 0
    while (result := engine.step(now_s)) is not None:
        given_tokens.update(engine.recipients(result))
        now_s = result.end_s
        steps += 1
        assert steps < 5000
        assert 0 <= engine.free_blocks <= options["kv_blocks"]
        if steps == 6:
            for request in (one for one, dropped in requests if dropped):
                engine.abort(request)
    for request, _ in requests:
        if request.aborted:
            assert given_tokens[request] < request.output_tokens
        else:
            assert given_tokens[request] == request.output_tokens
            assert request.finish_s is not None
            if options["speculation"] is not None:
                assert request.token_s is not None
                assert len(request.token_s) == request.output_tokens
    assert engine.free_blocks == options["kv_blocks"]
    assert (engine.running, engine.waiting) == (engine.batch.size, engine.batch.context) == (0, 0)


# Speculative decoding


@pytest.mark.parametrize(
    ("drafts", "acceptance", "expected"),
    # (1 - a^(K+1)) / (1 - a): 1 + 0.8 + 0.64 + 0.512 + 0.4096; 1 + 0.5
    [(4, 0.8, 3.3616), (1, 0.5, 1.5), (3, 1.0, 4.0), (3, 0.0, 1.0)],
)
def test_tokens_per_speculative_step(drafts: int, acceptance: float, expected: float) -> None:
    speculation = Speculation(drafts, acceptance)
    config = replace(linear_config(1.0, 0.0, max_num_seqs=64), speculation=speculation)
    tokens = 600
    outcome = simulate(config, np.zeros(64), np.ones(64), np.full(64, tokens))
    # The first token is the prefill's; each further step takes 1 s
    per_step = (tokens - 1) / (outcome.finish_s - outcome.first_token_s)
    assert per_step.mean() == pytest.approx(expected, rel=0.01)


def test_verification_computes_every_draft() -> None:
    """3 drafts, none accepted: the same tokens, but 4 computed for each request in a step."""
    config = tiny(speculation=Speculation(3, 0.0, draft_s=0.5))
    outcome = simulate(config, [0.0, 0.0], [1, 1], [3, 3])
    # A prefill step of 2 tokens, then two steps of 8 tokens and half a second of drafting
    assert outcome.token_times_s(0) == pytest.approx([0.002, 0.510, 1.018])


def test_all_drafts_accepted_come_at_once() -> None:
    outcome = simulate(tiny(speculation=Speculation(3, 1.0)), [0.0], [1], [7])
    # Prefill 1 ms; 4 tokens in 4 ms; the last 2 in 4 ms
    assert outcome.token_times_s(0) == pytest.approx([0.001, *[0.005] * 4, *[0.009] * 2])
    lengths, counts = outcome.gaps_s()
    assert np.repeat(lengths, counts) == pytest.approx([0.001] * 4 + [0.002] * 2)


# Policies


def turns(policy: str, **changes: object) -> list[tuple[int, int]]:
    """(requests decoding, prompt tokens) of each step: one request, then two more 2 ms after it."""
    engine = Engine(tiny(policy=policy, max_num_batched_tokens=8, **changes))
    engine.submit(Request(2, 4), 0.0)
    for _ in range(2):
        engine.submit(Request(6, 2), 0.002)
    seen, now_s = [], 0.0
    while (result := engine.step(now_s)) is not None:
        seen.append((result.decoding, result.prefill_tokens))
        now_s = result.end_s
    return seen


def test_prompts_and_decoding_under_each_policy() -> None:
    # fcfs mixes: 1 decode + 7 prompt tokens, then the 5 that are left
    assert turns("fcfs") == [(0, 2), (1, 7), (2, 5), (2, 0)]
    # Prompts first: 8 and 4 tokens, while the first request waits; then all three decode
    assert turns("prefill-priority") == [(0, 2), (0, 8), (0, 4), (3, 0), (1, 0), (1, 0)]
    # Decoding first: nothing new until the first request is through
    assert turns("decode-priority") == [(0, 2), (1, 0), (1, 0), (1, 0), (0, 8), (0, 4), (2, 0)]


def test_decoding_that_waits_for_prompts_shows_in_its_gaps() -> None:
    config = tiny(policy="prefill-priority", max_num_batched_tokens=32)
    outcome = simulate(config, [0.0, 0.002], [2, 20], [3, 1])
    # 2 ms; 20 ms for the other's prompt; then two decode steps of 1 ms
    assert outcome.token_times_s(0) == pytest.approx([0.002, 0.023, 0.024])
    lengths, counts = outcome.gaps_s()
    assert np.sort(np.repeat(lengths, counts)) == pytest.approx([0.001, 0.021])


def test_static_batching_pays_for_places_whose_requests_have_finished() -> None:
    """Steps of 10 + b ms. Outputs of 1, 2 and 4: three prompts, then three steps with b = 3."""
    config = replace(linear_config(0.010, 0.001, max_num_seqs=3), static_batching=True)
    outcome = simulate(config, [0.0] * 4, [1] * 4, [1, 2, 4, 1])
    # and the fourth alone: 11 ms
    assert outcome.finish_s == pytest.approx([0.013, 0.026, 0.052, 0.063])
    continuous = simulate(
        linear_config(0.010, 0.001, max_num_seqs=3), [0.0] * 4, [1] * 4, [1, 2, 4, 1]
    )
    # The fourth joins in the second step: 13, 13, 11, 11
    assert continuous.finish_s == pytest.approx([0.013, 0.026, 0.048, 0.026])


# Adapters


def test_adapters_are_paged_least_recently_used() -> None:
    engine = Engine(tiny(max_loras=2, adapter_load_s=1.0))
    loads = []
    for name in ["a", "b", "a", "c", "a", "b", None]:
        before = engine.adapters.loads
        request = Request(1, 1, adapter=name)
        engine.submit(request, 0.0)
        run_dry(engine)
        loads.append(engine.adapters.loads - before)
        assert request.finish_s == pytest.approx(0.001 + loads[-1])
    # c pushes b out (a was used after it); then b comes back for c
    assert loads == [1, 1, 0, 1, 0, 1, 0]


def test_a_request_whose_adapter_finds_no_slot_is_passed_over() -> None:
    engine = Engine(tiny(max_loras=1))
    first, other, same = (
        Request(1, 4, adapter="a"),
        Request(1, 2, adapter="b"),
        Request(1, 2, adapter="a"),
    )
    for request in (first, other, same):
        engine.submit(request, 0.0)
    assert run_dry(engine) == [same, first, other]


# Errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 3}, "at least max_num_seqs"),
        ({"kv_blocks": 15}, "KV cache holds 60 tokens"),
        ({"policy": "random"}, "unknown policy 'random'; known: fcfs"),
        ({"max_loras": 0}, "max_loras must be at least 1"),
        (
            {"speculation": Speculation(16, 0.5)},
            r"\(64\) must be at least max_num_seqs \(4\) times 17",
        ),
    ],
)
def test_bad_options(change: dict[str, object], words: str) -> None:
    with pytest.raises(SimulatorError, match=words):
        tiny(**change)


@pytest.mark.parametrize("values", [(0, 0.5), (2, 1.5), (2, -0.1), (2, math.nan)])
def test_bad_speculation(values: tuple[int, float]) -> None:
    with pytest.raises(SimulatorError):
        Speculation(*values)


def test_options_off_change_nothing() -> None:
    """Prefix cache and adapter slots do not change the times of requests without either."""
    rng = np.random.default_rng(2)
    arrivals = np.cumsum(rng.exponential(0.02, 300))
    inputs, outputs = rng.integers(1, 3000, 300), rng.integers(1, 300, 300)
    base = PRESETS["llama3-8b-h100"]
    plain = simulate(base, arrivals, inputs, outputs)
    with_options = simulate(
        replace(base, prefix_caching=True, max_loras=4), arrivals, inputs, outputs
    )
    assert np.array_equal(plain.finish_s, with_options.finish_s)
    for request in range(300):
        assert np.array_equal(plain.token_times_s(request), with_options.token_times_s(request))
