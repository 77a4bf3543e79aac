"""The requests that decode: their progress, their ends and the KV blocks that they need next.

A tick is a step in which requests decode. `LockstepBatch` gives each request one token a tick. Its
work per tick does not grow with the batch, as a request's last tick, its next KV block and the
size of the context follow from the number of the tick. `SpeculativeBatch` draws the tokens of each
request, at a cost per request.
"""

import math
from collections import defaultdict

from ampacity.simulator.engine.options import Speculation
from ampacity.simulator.engine.request import NOT_JOINED, Request


class LockstepBatch:
    """One token a tick for each request."""

    width = 1  # tokens computed for each request in a tick
    drafted = accepted = 0  # tokens, by speculative decoding

    def __init__(self, block_tokens: int) -> None:
        self.size = 0
        self.context = 0  # KV entries of all requests
        self.tick = 0  # of the next step
        self._block_tokens = block_tokens
        # Count by (KV tokens - tick) mod block size: all requests of a class need a block together.
        self._phases = [0] * block_tokens
        # By last tick; a request whose count of preemptions has changed since is no longer due.
        self._finishing: defaultdict[int, list[tuple[Request, int]]] = defaultdict(list)

    def blocks_needed(self) -> int:
        """Return the number of new blocks for the tokens of the next tick."""
        return self._phases[(1 - self.tick) % self._block_tokens]

    def advance(self) -> list[Request]:
        """Decode one tick; return the requests that got their last token, still in the batch."""
        tick = self.tick
        self.tick = tick + 1
        self.context += self.size
        due = self._finishing.pop(tick, None)
        if due is None:
            return []
        return [r for r, preemptions in due if r.preemptions == preemptions and not r.aborted]

    def join(self, request: Request, kv_tokens: int, left: int, now_s: float) -> None:
        """Add a request with KV entries and a token at now_s; it still gets `left` tokens."""
        tick = self.tick - 1
        request._join_tick = tick
        request._join_kv_tokens = kv_tokens
        request._join_s = now_s
        request.last_tick = tick + left
        self._phases[(kv_tokens - tick) % self._block_tokens] += 1
        self.context += kv_tokens
        self.size += 1
        if left:
            self._finishing[tick + left].append((request, request.preemptions))

    def leave(self, request: Request) -> int:
        """Remove a request; return the number of its KV entries."""
        tick = self.tick - 1
        kv_tokens = request._join_kv_tokens + tick - request._join_tick
        self._phases[(request._join_kv_tokens - request._join_tick) % self._block_tokens] -= 1
        self.context -= kv_tokens
        self.size -= 1
        request._join_tick = NOT_JOINED
        return kv_tokens

    def interrupt(self, request: Request) -> None:
        """Record the tokens since it joined, before a preemption. Call before `leave`."""
        if request.segments is None:
            request.segments = []
        request.segments.append((request._join_s, request._join_tick, self.tick - 1))
        request.generated_tokens += self.tick - 1 - request._join_tick

    def given(self, request: Request) -> int:
        """Return the tokens that the latest step gave to a request of the batch."""
        return 1

    def stamp(self, end_s: float) -> None:
        """Record the time of the tick's tokens, if it does not follow from the ticks."""


class SpeculativeBatch(LockstepBatch):
    """For each request the accepted drafts and one more token a tick."""

    def __init__(self, block_tokens: int, speculation: Speculation, seed: int) -> None:
        import numpy as np  # a server without speculation starts faster

        super().__init__(block_tokens)
        self.width = speculation.tokens + 1
        self._speculation = speculation
        self._random = np.random.default_rng(seed)
        self._kv_tokens: dict[Request, int] = {}
        self._left: dict[Request, int] = {}
        self._drawn: dict[Request, int] | None = None  # tokens of each in the coming tick
        self._latest: dict[Request, int] = {}

    def _draw(self) -> dict[Request, int]:
        import numpy as np

        drafts, acceptance = self._speculation.tokens, self._speculation.acceptance
        # uniform is in (0, 1], and at most a^j with probability a^j: then j drafts are accepted
        uniform = 1.0 - self._random.random(self.size)
        accepted = [drafts if acceptance else 0] * self.size
        if 0 < acceptance < 1:
            lengths = np.minimum(np.log(uniform) / math.log(acceptance), drafts)
            accepted = lengths.astype(int).tolist()
        self.drafted += drafts * self.size
        self.accepted += sum(accepted)
        left = self._left
        return {r: min(n + 1, left[r]) for r, n in zip(left, accepted, strict=True)}

    def blocks_needed(self) -> int:
        if self._drawn is None:
            self._drawn = self._draw()
        block, held = self._block_tokens, self._kv_tokens
        return sum(-(-(held[r] + n) // block) + (-held[r] // block) for r, n in self._drawn.items())

    def advance(self) -> list[Request]:
        drawn = self._draw() if self._drawn is None else self._drawn
        self._drawn = None
        self._latest = drawn
        self.tick += 1
        finished = []
        for request, tokens in drawn.items():
            self._kv_tokens[request] += tokens
            self._left[request] -= tokens
            if not self._left[request]:
                finished.append(request)
        self.context += sum(drawn.values())
        return finished

    def join(self, request: Request, kv_tokens: int, left: int, now_s: float) -> None:
        request._join_tick = self.tick - 1
        request._join_kv_tokens = kv_tokens
        if request.token_s is None:
            request.token_s = []
        request.token_s.append(now_s)
        self._kv_tokens[request] = kv_tokens
        self._left[request] = left
        self.context += kv_tokens
        self.size += 1

    def leave(self, request: Request) -> int:
        kv_tokens = self._kv_tokens.pop(request)
        del self._left[request]
        if self._drawn is not None:
            self._drawn.pop(request, None)
        self.context -= kv_tokens
        self.size -= 1
        request._join_tick = NOT_JOINED
        return kv_tokens

    def interrupt(self, request: Request) -> None:
        request.generated_tokens += self._kv_tokens[request] - request._join_kv_tokens

    def given(self, request: Request) -> int:
        return self._latest.get(request, 1)

    def stamp(self, end_s: float) -> None:
        for request, tokens in self._latest.items():
            if request.token_s is not None:
                request.token_s.extend([end_s] * tokens)
