"""Give up requests: past the client's own limits, when a user leaves, at the end of a stage."""

import asyncio
import time
from collections.abc import Collection, Sequence

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.receive.exchange import Exchange

CHECK_EVERY_S = 0.1
COUNT_EVERY_NS = 10**9
CHUNKS_MAX = 1 << 20  # of an answer


class TimeoutMonitor:
    """Gives up requests in flight: those past their time limits, and those that a stage leaves."""

    def __init__(
        self, limits: Limits, clients: Sequence[Client], in_flight: Collection[Exchange]
    ) -> None:
        self._limits, self._clients, self._in_flight = limits, clients, in_flight
        self._next_count_ns = 0
        self._next_ns = 0.0  # before this no request in flight can reach its limit

    async def check(self) -> None:
        """Fail the requests that are past their limit, and answers without end."""
        if time.monotonic_ns() >= self._next_count_ns:
            self._next_count_ns = time.monotonic_ns() + COUNT_EVERY_NS
            for exchange in [e for e in self._in_flight if e.chunks > CHUNKS_MAX]:
                why = f"more than {CHUNKS_MAX:,} chunks"
                exchange.fail("protocol_error", why, time.monotonic_ns())
        if time.monotonic_ns() < self._next_ns:
            return
        seen_ns = {exchange: exchange.last_read_ns for exchange in self._in_flight}
        for client in self._clients:  # unread bytes are the client's delay, not the server's
            await client.catch_up()
        now_ns = time.monotonic_ns()  # after catching up
        self._next_ns, _ = self._limits.gives_up(now_ns, None)  # of requests sent from now on
        for exchange in list(self._in_flight):
            began_ns = exchange.record.dispatched_ns or exchange.record.scheduled_ns
            last_ns = exchange.last_read_ns
            if last_ns != seen_ns.get(exchange):  # was only just read, and may have waited long
                last_ns = now_ns
            limit_ns, why = self._limits.gives_up(began_ns, last_ns)
            if limit_ns < now_ns:
                exchange.fail("timeout", why, now_ns)
            else:
                self._next_ns = min(self._next_ns, limit_ns)

    def comes(self, within_s: float) -> bool:
        """Return whether any answer sent something within the last ``within_s``."""
        since_ns = time.monotonic_ns() - int(within_s * 1e9)
        return any((exchange.last_read_ns or 0) > since_ns for exchange in self._in_flight)

    def cut_off(self, stopped: str | None, after_s: float, keep: Collection[Exchange] = ()) -> None:
        """Record what is in flight, but for ``keep``, as unfinished; ``stopped``: why so early."""
        why = stopped or f"not answered within {round(after_s, 1):g} s after the stage"
        for exchange in set(self._in_flight).difference(keep):
            exchange.fail("unfinished", why, time.monotonic_ns())


def leave_after(exchange: Exchange, after_s: float) -> None:
    """Cancel a request after this time, unless it has ended."""
    why = f"the user left after {after_s:.3g} s"
    asyncio.get_running_loop().call_later(
        after_s, lambda: exchange.fail("cancelled", why, time.monotonic_ns())
    )
