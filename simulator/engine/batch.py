"""The requests that decode: how they advance, when they end, and which blocks they need next.

A tick is a step in which they advance. `LockstepBatch` gives each one token a tick, so that its work per tick
does not grow with the batch: a request's last tick, its next KV block and the resident context follow from the
tick's number. `SpeculativeBatch` draws how many tokens each gets, and pays for that per request.
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
        # Requests by (KV tokens - tick) mod block size: the class that needs a block is known.
        self._phases = [0] * block_tokens
        # By the last tick; with the count of preemptions, as one that was preempted is no longer due.
        self._finishing: defaultdict[int, list[tuple[Request, int]]] = defaultdict(list)

    def blocks_needed(self) -> int:
        """New blocks that the next tick's tokens need."""
        return self._phases[(1 - self.tick) % self._block_tokens]

    def advance(self) -> list[Request]:
        """Let the tick happen; returns the requests that got their last token, still in the batch."""
        tick = self.tick
        self.tick = tick + 1
        self.context += self.size
        due = self._finishing.pop(tick, None)
        if due is None:
            return []
        return [r for r, preemptions in due if r.preemptions == preemptions and not r.aborted]

    def join(self, request: Request, kv_tokens: int, left: int, now_s: float) -> None:
        """Take in a request with so many KV entries that has got a token at now_s; `left` tokens to go."""
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
        """Take a request out; returns its KV entries."""
        tick = self.tick - 1
        kv_tokens = request._join_kv_tokens + tick - request._join_tick
        self._phases[(request._join_kv_tokens - request._join_tick) % self._block_tokens] -= 1
        self.context -= kv_tokens
        self.size -= 1
        request._join_tick = NOT_JOINED
        return kv_tokens

    def interrupt(self, request: Request) -> None:
        """Note the stretch of tokens that a preemption ends. Call before `leave`."""
        if request.segments is None:
            request.segments = []
        request.segments.append((request._join_s, request._join_tick, self.tick - 1))
        request.generated_tokens += self.tick - 1 - request._join_tick

    def given(self, request: Request) -> int:
        """Tokens that the latest step gave to a request of the batch."""
        return 1

    def stamp(self, end_s: float) -> None:
        """Note the time of the tick's tokens, where that cannot be told from the ticks."""


class SpeculativeBatch(LockstepBatch):
    """As many tokens a tick as drafts are accepted, and one."""

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
        uniform = 1.0 - self._random.random(
            self.size
        )  # in (0, 1]; P[u <= a^j] = a^j: j drafts accepted
        if 0 < acceptance < 1:
            accepted = (
                np.minimum(np.log(uniform) / math.log(acceptance), drafts).astype(int).tolist()
            )
        else:
            accepted = [drafts if acceptance else 0] * self.size
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
