"""The engine's rules, and its bookkeeping against a naive engine that counts every token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import Engine, EngineConfig, Request
from ampacity.simulator.engine.steptime import Linear, Roofline
from ampacity.simulator.models.hardware import linear_config
from benchmarks.servers.truth import simulate
from tests.support.repeats import often
from tests.support.simulator.engine_runs import run_dry, tiny

# Every term of the step time is different, so that a wrong count anywhere shows.
TELLING = Roofline(1e3, 7.0, 11.0, 0.13, 1e5, 1e4, overhead_s=1e-3, communication_s_per_token=1e-4)


def small(**changes: object) -> EngineConfig:
    return tiny(step_time=TELLING, **({"max_num_batched_tokens": 16} | changes))


class Naive:
    """An engine with the same rules that counts every token."""

    def __init__(
        self, config: EngineConfig, arrivals: list[float], inputs: list[int], outputs: list[int]
    ) -> None:
        self.config, self.arrivals, self.inputs, self.outputs = config, arrivals, inputs, outputs
        self.times: list[list[float]] = [[] for _ in arrivals]
        self.waiting: list[int] = []
        self.running: list[int] = []  # in order of admission
        self.decoding: set[int] = set()
        self.stored = [0] * len(arrivals)  # KV entries computed
        self.reserved = [0] * len(arrivals)  # blocks held

    def blocks(self, entries: int) -> int:
        return math.ceil(entries / self.config.block_tokens)

    def missing(self, r: int) -> int:
        """Return the tokens that prefill must still compute."""
        return self.inputs[r] + len(self.times[r]) - self.stored[r]

    def free(self) -> int:
        return (self.config.kv_blocks or 0) - sum(self.reserved[r] for r in self.running)

    def growth(self) -> int:
        return sum(self.blocks(self.stored[r] + 1) - self.reserved[r] for r in self.decoding)

    def preempt(self) -> bool:
        """Make room for decoding; return True if a request was preempted."""
        waited = len(self.waiting)
        while self.growth() > self.free():
            victim = self.running.pop()
            self.decoding.discard(victim)
            self.stored[victim] = self.reserved[victim] = 0
            self.waiting.insert(0, victim)
        return len(self.waiting) > waited

    def admit(self, budget: int) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            spent = sum(self.missing(r) for r in self.running if r not in self.decoding)
            r = self.waiting[0]
            need = self.blocks(self.missing(r))
            if spent >= budget or need > self.free():
                break
            self.running.append(self.waiting.pop(0))
            self.reserved[r] = need

    def step(self) -> float:
        """Compute one step; return its duration."""
        evicted = self.preempt()
        batch = [r for r in self.running if r in self.decoding]
        for r in batch:
            self.stored[r] += 1
            self.reserved[r] = self.blocks(self.stored[r])
        tokens, kv = len(batch), sum(self.stored[r] for r in batch)
        pairs = float(kv)
        budget = self.config.max_num_batched_tokens - tokens
        if not evicted:
            self.admit(budget)
        for r in [r for r in self.running if r not in self.decoding]:
            chunk = min(budget, self.missing(r))
            pairs += sum(self.stored[r] + n for n in range(1, chunk + 1))
            self.stored[r] += chunk
            budget -= chunk
            tokens += chunk
            kv += self.stored[r]
            if not self.missing(r):
                self.decoding.add(r)
        memory = (1e3 + 7.0 * kv) / 1e5
        compute = (11.0 * tokens + 0.13 * pairs) / 1e4
        return max(memory, compute) + 1e-3 + 1e-4 * tokens

    def run(self) -> list[list[float]]:
        """Return the token times of each request."""
        now, coming = 0.0, 0
        while coming < len(self.arrivals) or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, self.arrivals[coming])
            while coming < len(self.arrivals) and self.arrivals[coming] <= now:
                self.waiting.append(coming)
                coming += 1
            now += self.step()
            for r in list(self.decoding):
                self.times[r].append(now)
                if len(self.times[r]) == self.outputs[r]:
                    self.decoding.discard(r)
                    self.running.remove(r)
                    self.stored[r] = self.reserved[r] = 0
        return self.times


lengths = st.lists(
    st.tuples(st.floats(0, 0.05), st.integers(1, 32), st.integers(1, 32)), min_size=1, max_size=25
)


@settings(max_examples=often(25, 100), deadline=None)
@given(lengths, st.integers(1, 6), st.integers(6, 40), st.integers(16, 40))
def test_same_token_times_as_a_naive_engine(
    rows: list[tuple[float, int, int]], seqs: int, budget: int, blocks: int
) -> None:
    """Random loads with chunked prefill and preemption: all token times are equal."""
    config = small(max_num_seqs=seqs, max_num_batched_tokens=budget, kv_blocks=blocks)
    arrivals = np.cumsum([row[0] for row in rows]).tolist()
    inputs, outputs = [row[1] for row in rows], [row[2] for row in rows]
    outcome = simulate(config, arrivals, inputs, outputs)
    expected = Naive(config, arrivals, inputs, outputs).run()
    for number, times in enumerate(expected):
        assert outcome.token_times_s(number) == pytest.approx(times)
        assert outcome.finish_s[number] == pytest.approx(times[-1])
    gaps, counts = outcome.gaps_s()
    plain = np.concatenate([np.diff(times) for times in expected])
    assert np.sort(np.repeat(gaps, counts)) == pytest.approx(np.sort(plain))


def test_kv_exhaustion_preempts_the_latest_and_everyone_finishes() -> None:
    # 16 blocks of 4 tokens; two requests of 4 + 44 tokens want 12 blocks each in the end
    engine = Engine(small())
    first, second = Request(4, 44), Request(4, 44)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    assert run_dry(engine) == [first, second]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert engine.preemptions == 1
    assert (engine.free_blocks, engine.running, engine.waiting) == (16, 0, 0)
    # Both hold 8 blocks (32 tokens) when the pool is full; the next token preempts the second.
    assert second.segments is not None
    (_, start, stop), (_, again, end) = second.segments
    assert (start, stop - start + 1 + end - again + 1) == (0, 44)
    assert stop == 28  # step 0 stores the prompt's 4 entries, step n the (4 + n)th: 32 at step 28


def test_first_come_first_served() -> None:
    """A short request behind a long one that does not fit waits: nobody overtakes."""
    engine = Engine(small(max_num_batched_tokens=64))
    big, huge, tiny = Request(40, 8), Request(48, 8), Request(1, 1)
    for request in (big, huge, tiny):
        engine.submit(request, 0.0)
    result = engine.step(0.0)
    assert result.prompts == [big]
    assert (engine.running, engine.waiting) == (1, 2)  # tiny would fit, but huge is first
    assert run_dry(engine, result.end_s) == [big, tiny, huge]
    assert huge.first_token_s == tiny.first_token_s


def test_slots_limit_the_batch() -> None:
    engine = Engine(small(max_num_seqs=2))
    for _ in range(5):
        engine.submit(Request(1, 3), 0.0)
    result = engine.step(0.0)
    assert result is not None
    assert (engine.running, engine.waiting) == (2, 3)


def test_chunked_prefill_shares_the_budget_with_decoding() -> None:
    engine = Engine(small(max_num_batched_tokens=10, kv_blocks=32))
    short, long = Request(4, 20), Request(25, 2)
    engine.submit(short, 0.0)
    engine.submit(long, 0.0)
    seen = []
    now_s = 0.0
    while long.first_token_s is None:
        result = engine.step(now_s)
        seen.append((result.decoding, result.prefill_tokens))
        now_s = result.end_s
    # 4 of short and 6 of long; then one decode token and 9; the last 10 need two steps
    assert seen == [(0, 10), (1, 9), (1, 9), (1, 1)]


def test_tokens_appear_at_the_end_of_the_step() -> None:
    engine = Engine(linear_config(0.01, 0.001, 0.05))
    request = Request(100, 3)
    engine.submit(request, 1.0)
    assert run_dry(engine, 0.0) == [request]
    # The prompt's step takes 10 + 1 + 50 ms and gives a token; two more steps of 11 ms
    assert request.first_token_s == pytest.approx(1.061)
    assert request.finish_s == pytest.approx(1.083)


def test_nobody_is_admitted_before_arriving() -> None:
    engine = Engine(linear_config(1.0, 0.0))
    early, late = Request(1, 2), Request(1, 1)
    engine.submit(early, 0.0)
    # the server learns of it before a step that is planned for an earlier time
    engine.submit(late, 0.5)
    run_dry(engine, 0.0)
    assert early.finish_s == pytest.approx(2.0)
    assert late.first_token_s == pytest.approx(2.0)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5, 11])
def test_abort_frees_what_is_held(steps_before: int) -> None:
    """In the queue, in prefill, between chunks and while decoding; the others are not touched."""
    engine = Engine(small(max_num_batched_tokens=8, kv_blocks=32))
    other, dropped, last = Request(6, 12), Request(20, 12), Request(6, 12)
    for request in (other, dropped, last):
        engine.submit(request, 0.0)
    now_s = 0.0
    for _ in range(steps_before):
        result = engine.step(now_s)
        now_s = result.end_s
    engine.abort(dropped)
    engine.abort(dropped)
    assert dropped not in run_dry(engine, now_s)
    assert other.finish_s is not None
    assert last.finish_s is not None
    assert dropped.finish_s is None
    assert (engine.free_blocks, engine.running, engine.waiting) == (32, 0, 0)
    assert engine.step(now_s) is None


def test_abort_after_the_end_is_harmless() -> None:
    engine = Engine(small())
    request = Request(3, 3)
    engine.submit(request, 0.0)
    run_dry(engine)
    engine.abort(request)
    assert (engine.free_blocks, request.aborted) == (16, False)


def test_what_can_never_be_served_is_refused() -> None:
    engine = Engine(small())
    with pytest.raises(SimulatorError, match="65 tokens, more than max_model_len 64"):
        engine.submit(Request(60, 5), 0.0)
    with pytest.raises(SimulatorError, match="at least one"):
        engine.submit(Request(0, 5), 0.0)
    assert engine.step(0.0) is None


def test_linear_step_time_must_be_positive() -> None:
    with pytest.raises(SimulatorError):
        Linear(0.0, 0.0, 1.0)
