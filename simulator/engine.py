"""Continuous batching as a discrete-event core: no I/O, no clock, deterministic.

One `step` is one iteration: every decoding request gets one token, prompts are computed in chunks under the
token budget, waiting requests are admitted first come first served. Tokens appear at the end of the step.
The work per step does not grow with the batch: as every decoding request advances by one token a step, its
last step, its next KV block and the resident context follow from the step's number.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from simulator import SimulatorError
from simulator.steptime import StepTime

UNBOUNDED_BLOCKS = 1 << 60


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler may use. Limits carry vLLM's names; kv_blocks None means no limit."""

    name: str
    step_time: StepTime
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    kv_blocks: int | None = None
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_tokens"):
            if getattr(self, field) < 1:
                raise SimulatorError(f"{self.name}: {field} must be at least 1, got {getattr(self, field)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SimulatorError(
                f"{self.name}: max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or decoding could not advance every request"
            )
        if self.kv_blocks is not None and self.kv_blocks * self.block_tokens < self.max_model_len:
            raise SimulatorError(
                f"{self.name}: the KV cache holds {self.kv_blocks * self.block_tokens} tokens, less than "
                f"max_model_len {self.max_model_len}; lower max_model_len or use more memory"
            )


class Request:
    """One request. The engine fills `first_token_s`, `finish_s` and the numbers of the steps."""

    __slots__ = (
        "_join_kv_tokens",
        "_join_step",
        "aborted",
        "arrival_s",
        "finish_s",
        "first_step",
        "first_token_s",
        "generated_tokens",
        "last_step",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "segments",
    )

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrival_s = 0.0
        self.first_token_s: float | None = None
        self.finish_s: float | None = None
        self.first_step = -1
        self.last_step = -1  # while decoding: the step that will give the last token
        self.generated_tokens = 0  # up to the last prefill; decode steps since then are not counted in
        self.preemptions = 0
        self.segments: list[tuple[int, int]] | None = None  # (first, last) steps with tokens, if preempted
        self.aborted = False
        self._join_step = -1
        self._join_kv_tokens = 0


class StepResult(NamedTuple):
    """One planned iteration; its tokens are there at `end_s`."""

    number: int
    start_s: float
    end_s: float
    decoding: int  # requests that get a token by decoding
    prefill_tokens: int
    prompts: list[Request]  # their prefill ended here: they get a token too
    finished: list[Request]
    preempted: list[Request]


class Engine:
    """An engine of one replica. Drive it with `submit`, `step` and `abort`; time is the caller's."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.steps = 0
        self.preemptions = 0
        self.kv_blocks = config.kv_blocks if config.kv_blocks is not None else UNBOUNDED_BLOCKS
        self.free_blocks = self.kv_blocks
        self._waiting: deque[Request] = deque()
        self._aborted_waiting = 0
        self._running: dict[Request, None] = {}  # in order of admission
        self._partial: Request | None = None  # the one request whose prefill goes on in the next step
        self._partial_done = 0
        self._context = 0  # KV entries of all decoding requests
        self._finishing: dict[int, list[Request]] = {}  # by the number of the step
        # Decoding requests by (KV tokens - step number) mod block size: the class that needs a block is known.
        self._phases = [0] * config.block_tokens

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self._aborted_waiting

    @property
    def busy(self) -> bool:
        return bool(self._running) or self.waiting > 0

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.kv_blocks

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request that arrives at now_s. Raises SimulatorError when it could never be served."""
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise SimulatorError("a request needs at least one prompt token and one output token")
        if total > self.config.max_model_len:
            raise SimulatorError(
                f"prompt and output have {total} tokens, more than max_model_len {self.config.max_model_len}"
            )
        request.arrival_s = now_s
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it is, and free what it holds. A finished one is left alone."""
        if request.aborted or request.finish_s is not None:
            return
        request.aborted = True
        if request in self._running:
            self._release(request, self.steps - 1)
        else:
            self._aborted_waiting += 1

    def step(self, now_s: float) -> StepResult | None:
        """Plan one iteration that starts at now_s, or at the next queued arrival if that is later.

        Only requests that have arrived by then are admitted. Returns None when there is nothing to do.
        The state afterwards is that of the step's end: call it again with a time of at least `end_s`.
        """
        if not self._running:
            while self._waiting and self._waiting[0].aborted:
                self._drop_aborted()
            if not self._waiting:
                return None
            if self._waiting[0].arrival_s > now_s:
                now_s = self._waiting[0].arrival_s
        number = self.steps
        preempted = self._grow_decoding(number)
        decoding = len(self._running) - (self._partial is not None)
        self._context += decoding
        prompts: list[Request] = []
        prefill_tokens, prefill_kv, prefill_pairs = self._prefill(now_s, decoding, prompts)
        end_s = now_s + self.config.step_time.seconds(
            decoding + len(prompts) + (self._partial is not None),
            decoding + prefill_tokens,
            self._context + prefill_kv,
            self._context + prefill_pairs,
            len(prompts),
        )
        finished = self._finish(number, end_s)
        if prompts:
            self._join(prompts, number, end_s, finished)
        self.steps = number + 1
        return StepResult(number, now_s, end_s, decoding, prefill_tokens, prompts, finished, preempted)

    def recipients(self, result: StepResult) -> list[Request]:
        """Requests that get a token at the end of `result`, which must be the latest step; aborted ones not."""
        partial = self._partial
        running = list(self._running) if partial is None else [r for r in self._running if r is not partial]
        return running + result.finished if result.finished else running

    def _grow_decoding(self, number: int) -> list[Request]:
        """Take the blocks that this step's decode tokens need; preempt the latest admitted if there are none."""
        phase = (1 - number) % self.config.block_tokens
        preempted: list[Request] = []
        while self._phases[phase] > self.free_blocks:
            victim = next(reversed(self._running))
            self._preempt(victim, number - 1)
            preempted.append(victim)
        self.free_blocks -= self._phases[phase]
        return preempted

    def _preempt(self, victim: Request, last_step: int) -> None:
        """Drop the victim's KV entries and queue it first; prompt and output so far are prefilled anew."""
        if victim is not self._partial:
            if victim.segments is None:
                victim.segments = []
            segment_start = victim._join_step
            victim.segments.append((segment_start, last_step))
            victim.generated_tokens += last_step - segment_start
        self._release(victim, last_step)
        victim.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(victim)

    def _prefill(self, now_s: float, decoding: int, prompts: list[Request]) -> tuple[int, int, float]:
        """Spend what decoding leaves of the token budget. Returns tokens, KV entries and attended pairs.

        Blocks for the whole prompt are taken at admission (so what was preempted in this step never fits at
        once). A request whose prompt is finished goes to prompts.
        """
        budget = total_budget = self.config.max_num_batched_tokens - decoding
        kv_tokens = 0
        pairs = 0.0
        partial = self._partial
        if partial is not None:
            done = self._partial_done
            chunk = min(partial.prompt_tokens + partial.generated_tokens - done, budget)
            budget -= chunk
            kv_tokens = done + chunk
            pairs = chunk * (done + 0.5 * (chunk + 1))
            if kv_tokens == partial.prompt_tokens + partial.generated_tokens:
                prompts.append(partial)
                self._partial = None
            else:
                self._partial_done = kv_tokens
        waiting = self._waiting
        block = self.config.block_tokens
        max_num_seqs = self.config.max_num_seqs
        while budget > 0 and waiting and len(self._running) < max_num_seqs:
            request = waiting[0]
            if request.aborted:
                self._drop_aborted()
                continue
            length = request.prompt_tokens + request.generated_tokens
            blocks = -(-length // block)
            if request.arrival_s > now_s or blocks > self.free_blocks:
                break
            waiting.popleft()
            self.free_blocks -= blocks
            self._running[request] = None
            chunk = length
            if length > budget:
                chunk = self._partial_done = budget
                self._partial = request
            else:
                prompts.append(request)
            budget -= chunk
            kv_tokens += chunk
            pairs += 0.5 * chunk * (chunk + 1)
        return total_budget - budget, kv_tokens, pairs

    def _finish(self, number: int, end_s: float) -> list[Request]:
        """Release the decoding requests that get their last token in this step."""
        due = self._finishing.pop(number, None)
        if due is None:
            return []
        # A request that was preempted or aborted in the meantime is no longer due.
        finished = [r for r in due if r.last_step == number and not r.aborted]
        for request in finished:
            self._complete(request, number, end_s)
        return finished

    def _complete(self, request: Request, number: int, end_s: float) -> None:
        if request.segments is not None:
            request.segments.append((request._join_step, number))
        request.finish_s = end_s
        request.generated_tokens = request.output_tokens
        self._release(request, number)
        request.last_step = number

    def _join(self, prompts: list[Request], number: int, end_s: float, finished: list[Request]) -> None:
        """Give each finished prefill its token and let it decode from the next step on."""
        block = self.config.block_tokens
        for request in prompts:
            kv_tokens = request.prompt_tokens + request.generated_tokens
            request.generated_tokens += 1
            request._join_step = number
            request._join_kv_tokens = kv_tokens
            if request.first_token_s is None:
                request.first_token_s = end_s
                request.first_step = number
            self._phases[(kv_tokens - number) % block] += 1
            self._context += kv_tokens
            left = request.output_tokens - request.generated_tokens
            request.last_step = number + left
            if left:
                self._finishing.setdefault(number + left, []).append(request)
            else:
                self._complete(request, number, end_s)
                finished.append(request)

    def _release(self, request: Request, last_step: int) -> None:
        """Free the blocks of a running request whose last executed step is last_step."""
        del self._running[request]
        block = self.config.block_tokens
        if request._join_step < 0:
            # Still in prefill (the partial request, or one admitted in the step that is under way).
            if request is self._partial:
                self._partial = None
            self.free_blocks += -(-(request.prompt_tokens + request.generated_tokens) // block)
            return
        kv_tokens = request._join_kv_tokens + last_step - request._join_step
        self.free_blocks += -(-kv_tokens // block)
        self._context -= kv_tokens
        self._phases[(request._join_kv_tokens - request._join_step) % block] -= 1
        request._join_step = -1
        request.last_step = -1

    def _drop_aborted(self) -> None:
        self._waiting.popleft()
        self._aborted_waiting -= 1
