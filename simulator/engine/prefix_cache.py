"""KV blocks that stay after their request and are found again by a hash of their contents."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ampacity.simulator.engine.request import Request


class BlockCache:
    """Blocks by name: used by requests, or idle, least recently used first.

    Idle blocks count as free for the engine. The last block of a request becomes idle first, so
    that a prefix stays longer than what follows it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._users: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def match(self, hashes: Sequence[Hashable], tokens: int) -> tuple[int, int]:
        """Return (cached leading blocks of a prompt, number of idle ones among them).

        At least one token stays to be computed: the first output token comes from it.
        """
        most = min(len(hashes), (tokens - 1) // self._block_tokens)
        found = idle = 0
        for found in range(most):
            if hashes[found] in self._idle:
                idle += 1
            elif hashes[found] not in self._users:
                return found, idle
        return most, idle

    def take(self, request: Request, blocks: int) -> None:
        """Use the leading blocks found by `match`."""
        held = list(request.block_hashes[:blocks])
        for name in held:
            self._users[name] = self._users.get(name, 0) + 1
            self._idle.pop(name, None)
        request._held_blocks = held
        request._registered_blocks = blocks

    def register(self, request: Request, tokens: int) -> None:
        """Add the request's full blocks among its first `tokens` tokens, which are computed."""
        held = request._held_blocks
        if held is None:
            held = request._held_blocks = []
        stop = min(tokens // self._block_tokens, len(request.block_hashes))
        for number in range(request._registered_blocks, stop):
            name = request.block_hashes[number]
            if name not in self._users and name not in self._idle:  # a second copy stays nameless
                self._users[name] = 1
                held.append(name)
        request._registered_blocks = max(stop, request._registered_blocks)

    def release(self, request: Request) -> tuple[int, int]:
        """Free the blocks of a request; return (all, those that no other request uses)."""
        held = request._held_blocks or []
        released = 0
        for name in reversed(held):
            left = self._users[name] - 1
            if left:
                self._users[name] = left
            else:
                del self._users[name]
                self._idle[name] = None
                released += 1
        request._held_blocks = None
        request._registered_blocks = 0
        return len(held), released

    def evict(self, free_blocks: int) -> None:
        """Drop the oldest idle blocks until their number is at most free_blocks."""
        while len(self._idle) > free_blocks:
            self._idle.popitem(last=False)
