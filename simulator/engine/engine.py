"""Continuous batching as a discrete-event simulation: no I/O, no clock, deterministic.

In one `step` every decoding request gets one token (or several, under speculative decoding),
prompts are computed in chunks within the token budget, and waiting requests are admitted by the
policy. Tokens appear at the end of the step.
"""

import math

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.adapters import AdapterSlots
from ampacity.simulator.engine.batch import LockstepBatch, SpeculativeBatch
from ampacity.simulator.engine.options import EngineConfig, Speculation
from ampacity.simulator.engine.prefix_cache import BlockCache
from ampacity.simulator.engine.queues import WaitingQueue
from ampacity.simulator.engine.request import NOT_JOINED, Request, StepResult

__all__ = ["Engine", "EngineConfig", "Request", "Speculation", "StepResult"]

UNBOUNDED_BLOCKS = 1 << 60


# Prefill of a step: tokens computed, KV entries used, attended pairs, seconds to load adapters.
_Prefill = tuple[int, int, float, float]
_NO_PREFILL: _Prefill = (0, 0, 0.0, 0.0)


class Engine:
    """One replica. The caller drives it with `submit`, `step` and `abort`, and keeps the time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.steps = 0
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # and found
        self.kv_blocks = config.kv_blocks if config.kv_blocks is not None else UNBOUNDED_BLOCKS
        self.free_blocks = self.kv_blocks
        self.adapters = AdapterSlots(config.max_loras or math.inf, config.adapter_load_s)
        self._cache = BlockCache(config.block_tokens) if config.prefix_caching else None
        self._queue = WaitingQueue()
        self.batch = LockstepBatch(config.block_tokens)
        if config.speculation is not None:
            self.batch = SpeculativeBatch(config.block_tokens, config.speculation, config.seed)
        self._step_seconds = config.step_time.seconds
        self._draft_s = 0.0 if config.speculation is None else config.speculation.draft_s
        self._running: dict[Request, None] = {}  # in order of admission
        self._partial: Request | None = None  # its prefill continues in the next step
        self._partial_done = 0
        # prefill and decode alternate instead of sharing steps
        alternating = ("prefill-priority", "decode-priority")
        self._takes_turns = config.static_batching or config.policy in alternating
        self._forming = False  # under decode-priority: the batch is being filled
        self._batch_start_s = 0.0  # requests that had arrived by then are in it
        self._padding = 0  # under static batching: slots of requests that have finished

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.kv_blocks

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request at its arrival. Raises SimulatorError if it can never be served."""
        self.check(request)
        request.arrival_s = now_s
        self._queue.push(request)

    def check(self, request: Request) -> None:
        """Raise SimulatorError if the request can never be served."""
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise SimulatorError("a request needs at least one prompt token and one output token")
        if total > self.config.max_model_len:
            raise SimulatorError(
                f"prompt and output have {total} tokens, more than max_model_len "
                f"{self.config.max_model_len}"
            )

    def abort(self, request: Request) -> None:
        """Drop a request and free its blocks. Does nothing if it has finished."""
        if request.aborted or request.finish_s is not None:
            return
        request.aborted = True
        if request in self._running:
            self._release(request)
        else:
            self._queue.note_abort()

    def step(self, now_s: float) -> StepResult | None:
        """Compute one step from now_s on, or from the next arrival if that is later.

        Only requests that have arrived by then are admitted. Returns None if there is nothing to
        do. The state is then that at the end of the step: the next now_s must be at least `end_s`.
        """
        if not self._running:
            arrival_s = self._queue.next_arrival_s()
            if arrival_s is None:
                return None
            now_s = max(now_s, arrival_s)
        batch = self.batch
        prompts: list[Request] = []
        finished: list[Request] = []
        decoding = context = padding = 0
        prefill = _NO_PREFILL
        if self._takes_turns:
            prefill = self._turn_for_prompts(now_s, prompts)
        advanced = prefill[0] == 0
        if advanced:
            needed = batch.blocks_needed()
            if needed:
                self._allocate(self._make_room(needed))
            decoding = batch.size
            padding = self._padding
            finished = batch.advance()
            context = batch.context
            if not self._takes_turns and (self._partial is not None or self._queue):
                prefill = self._prefill(now_s, decoding * batch.width, prompts)
        tokens, prompt_kv_tokens, pairs, load_s = prefill
        sequences = decoding + padding
        end_s = now_s + load_s
        end_s += self._step_seconds(
            sequences + len(prompts) + (self._partial is not None),
            sequences * batch.width + tokens,
            context + prompt_kv_tokens,
            context * batch.width + pairs,
            len(prompts),
        )
        if decoding:
            end_s += self._draft_s
            batch.stamp(end_s)
        number = self.steps
        for request in finished:
            self._complete(request, end_s)
        if prompts:
            self._join(prompts, number, end_s, finished)
        if self.config.static_batching:
            self._padding = self._padding + len(finished) if self._running else 0
        self.steps = number + 1
        return StepResult(number, now_s, end_s, decoding, tokens, prompts, finished, advanced)

    def recipients(self, result: StepResult) -> list[Request]:
        """Return the requests that get a token at the end of the latest step, without aborted ones.

        Under speculative decoding a request is listed once for each of its tokens.
        """
        if not result.decoding:
            return [r for r in result.prompts if not r.aborted]
        partial = self._partial
        running = [r for r in self._running if r is not partial] + result.finished
        if self.batch.width == 1:
            return running
        return [request for request in running for _ in range(self.batch.given(request))]

    def _allocate(self, blocks: int) -> None:
        self.free_blocks -= blocks
        if self._cache is not None and self._cache.idle > self.free_blocks:
            self._cache.evict(self.free_blocks)

    def _make_room(self, needed: int) -> int:
        """Preempt the latest admitted until decoding has its blocks; return how many it needs.

        The KV entries of a preempted request are dropped. It is queued first, and its prompt and
        output so far are computed again.
        """
        while needed > self.free_blocks:
            victim = next(reversed(self._running))
            if victim._join_tick != NOT_JOINED:
                self.batch.interrupt(victim)
            self._release(victim)
            victim.ready_tokens = 0
            victim.preemptions += 1
            self.preemptions += 1
            self._queue.push_front(victim)
            needed = self.batch.blocks_needed()
        return needed

    def _turn_for_prompts(self, now_s: float, prompts: list[Request]) -> _Prefill:
        """Compute prompts, if it is their turn, under a policy that alternates."""
        if self.config.policy == "prefill-priority" and not self.config.static_batching:
            return self._prefill(now_s, 0, prompts)
        if not self._running:
            self._forming = True
            self._batch_start_s = now_s
        if not self._forming:
            return _NO_PREFILL
        prefill = self._prefill(self._batch_start_s, 0, prompts)
        self._forming = prefill[0] > 0
        return prefill

    def _prefill(self, now_s: float, decode_tokens: int, prompts: list[Request]) -> _Prefill:
        """Spend the token budget that decoding leaves; append finished prefills to `prompts`.

        Blocks for the whole prompt are taken at admission, so a request that was preempted in this
        step never fits at once.
        """
        budget = total_budget = self.config.max_num_batched_tokens - decode_tokens
        kv_tokens = 0
        pairs = load_s = 0.0
        if self._partial is not None:
            done = self._partial_done
            kv_tokens = self._continue(self._partial, budget, prompts)
            chunk = kv_tokens - done
            budget -= chunk
            pairs = chunk * (done + 0.5 * (chunk + 1))
        queue = self._queue
        running = self._running
        max_num_seqs = self.config.max_num_seqs - self._padding
        adapters = self.adapters
        passed_over: list[Request] = []
        while budget > 0 and len(running) < max_num_seqs:
            request = queue.head(now_s)
            if request is None:
                break
            adapter = request.adapter
            if adapter is not None and not adapters.admits(adapter):
                queue.pop()
                passed_over.append(request)
                continue
            length = request.prompt_tokens + request.generated_tokens
            start = self._admit(request, length)
            if start is None:
                break
            queue.pop()
            running[request] = None
            if adapter is not None:
                load_s += adapters.acquire(adapter)
            chunk = length - start
            if chunk > budget:
                chunk = budget
                self._partial_done = start + chunk
                self._partial = request
            else:
                prompts.append(request)
            budget -= chunk
            kv_tokens += start + chunk
            pairs += chunk * (start + 0.5 * (chunk + 1))
            if self._cache is not None:
                self._cache.register(request, start + chunk)
        for request in reversed(passed_over):
            queue.push_front(request)
        return total_budget - budget, kv_tokens, pairs, load_s

    def _continue(self, partial: Request, budget: int, prompts: list[Request]) -> int:
        """Compute the next chunk of a prompt; return its tokens computed by now."""
        length = partial.prompt_tokens + partial.generated_tokens
        computed = min(length, self._partial_done + budget)
        if computed == length:
            prompts.append(partial)
            self._partial = None
        else:
            self._partial_done = computed
        if self._cache is not None:
            self._cache.register(partial, computed)
        return computed

    def _admit(self, request: Request, length: int) -> int | None:
        """Take the blocks of a prompt; return its cached tokens, or None if it does not fit."""
        blocks = -(-length // self.config.block_tokens)
        cache = self._cache
        start = 0
        if cache is None:
            if blocks > self.free_blocks:
                return None
            self.free_blocks -= blocks
        else:
            found, idle = cache.match(request.block_hashes, length)
            if blocks - found + idle > self.free_blocks:
                return None
            cache.take(request, found)
            self._allocate(blocks - found + idle)
            start = found * self.config.block_tokens
            self.prefix_queries += length
            self.prefix_hits += start
            if not request.preemptions:
                request.cached_tokens = start
        if request.ready_tokens > start:
            return min(request.ready_tokens, length - 1)
        return start

    def _complete(self, request: Request, end_s: float) -> None:
        if request.segments is not None:
            request.segments.append((request._join_s, request._join_tick, self.batch.tick - 1))
        request.finish_s = end_s
        request.last_tick = self.batch.tick - 1
        self._release(request)
        request.generated_tokens = request.output_tokens

    def _join(
        self, prompts: list[Request], number: int, end_s: float, finished: list[Request]
    ) -> None:
        """Give each finished prefill its first token; it decodes from the next step on."""
        batch = self.batch
        for request in prompts:
            kv_tokens = request.prompt_tokens + request.generated_tokens
            request.generated_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = end_s
                request.first_step = number
                request.first_tick = batch.tick - 1
            left = request.output_tokens - request.generated_tokens
            batch.join(request, kv_tokens, left, end_s)
            if not left:
                self._complete(request, end_s)
                finished.append(request)

    def _release(self, request: Request) -> None:
        """Free the blocks and the adapter of a running request."""
        del self._running[request]
        if request._join_tick == NOT_JOINED:
            # still in prefill: the partial request, or one admitted in this step
            kv_tokens = request.prompt_tokens + request.generated_tokens
            computed = 0
            if request is self._partial:
                self._partial = None
        else:
            kv_tokens = computed = self.batch.leave(request)
        blocks = -(-kv_tokens // self.config.block_tokens)
        cache = self._cache
        if cache is None:
            self.free_blocks += blocks
        else:
            cache.register(request, computed)
            named, released = cache.release(request)
            self.free_blocks += blocks - named + released
        if request.adapter is not None:
            self.adapters.release(request.adapter)
