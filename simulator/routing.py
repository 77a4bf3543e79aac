"""Which replica a request goes to."""

import zlib
from collections.abc import Hashable, Sequence

from simulator.engine import Engine
from simulator.request import Request


class Router:
    """round-robin: in turn. least-request: fewest running and waiting, in turn among equals.

    prefix-hash: by a hash of the name of the prompt's first block,
    session-sticky: by a hash of the session; both in turn for requests that have none.
    """

    def __init__(self, routing: str, replicas: int) -> None:
        self._routing = routing
        self._replicas = replicas
        self._turn = -1

    def choose(self, request: Request, engines: Sequence[Engine]) -> int:
        """The number of the replica."""
        if self._routing == "prefix-hash" and request.block_hashes:
            return self._hashed(request.block_hashes[0])
        if self._routing == "session-sticky" and request.session is not None:
            return self._hashed(request.session)
        self._turn = (self._turn + 1) % self._replicas
        if self._routing != "least-request":
            return self._turn
        order = [(self._turn + n) % self._replicas for n in range(self._replicas)]
        return min(order, key=lambda n: engines[n].running + engines[n].waiting)

    def _hashed(self, key: Hashable) -> int:
        return zlib.crc32(repr(key).encode()) % self._replicas
