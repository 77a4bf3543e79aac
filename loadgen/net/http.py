"""Send exchanges over a keep-alive pool without a limit; one exchange per connection at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from array import array
from collections import deque
from typing import Literal

from ampacity.loadgen.net import asyncio_reads, kernel_connect, kernel_stamps
from ampacity.loadgen.net.interfaces import Exchange, Receiver, Wire
from ampacity.loadgen.net.proxy import connect_request
from ampacity.loadgen.net.tls import TlsWire
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, Proxy
from ampacity.sleeper import Sleeper

IDLE_MAX_S = 4.0  # servers close idle connections after 5 s: do not race them
CONNECT_TIMEOUT_S = 10.0
ADDRESS_TIMEOUT_S = 2.0  # for an address that is not the host's last
ANSWER_TIMEOUT_S = 120.0  # a first request may compile or load things
CLOSED_SHARE = 0.8  # of CLOSED_MIN or more answers: a server that closes these keeps none alive
CLOSED_MIN = 3
SPARES_MAX = 64  # connections that are opened before their requests are due

OWN_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)

Stamps = Literal["read", "kernel"]
Reuse = Literal["pool", "new"]


class Connection:
    """One connection, which carries one exchange after the other."""

    __slots__ = ("_client", "_left", "_wire", "exchange", "idle_since_ns", "lost", "waited")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wire: Wire | None = None
        self.exchange: Exchange | None = None
        self.idle_since_ns = 0
        self.waited = False  # idle before: the peer may have closed it
        self.lost = False
        self._left = False  # by us

    def attach(self, wire: Wire) -> None:
        """Start to use ``wire``."""
        self._wire = wire
        self._client.connections_opened += 1
        self._client.open.add(self)

    def send(self, exchange: Exchange) -> None:
        """Write the request to the socket."""
        assert self._wire is not None
        self.exchange = exchange
        record = exchange.record
        record.started_ns = time.monotonic_ns()
        self._wire.write(exchange.request)
        # on one machine the server may answer before write() returns: no clock is read after it
        if self._wire.get_write_buffer_size() == 0:
            record.sent_ns = record.started_ns

    def resume_writing(self) -> None:
        """Note that the rest of a large request is written."""
        if self.exchange is not None and self.exchange.record.sent_ns is None:
            self.exchange.record.sent_ns = time.monotonic_ns()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a close by the peer, an error or this client."""
        at_ns = time.monotonic_ns()
        self.lost, self._wire = True, None  # breaks the reference cycle
        self._client.open.discard(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            self._client.closed_unsaid += not self._left
        elif self._idle_race(exchange):
            self._client.closed_unsaid += 1
            self._client.resent += 1
            exchange.restart()
            self._client.connect_and_send(exchange)
        else:
            if exchange.record.headers_ns is not None:  # a body that the close ends
                self._client.answers += 1
                self._client.closed_said += 1
            exchange.eof(at_ns, None if exc is None else str(exc) or type(exc).__name__)

    def _idle_race(self, exchange: Exchange) -> bool:
        """Return whether a reused connection was closed without a byte, as when idle too long.

        The server may have read the request and dropped it: so it is resent once, and counted.
        """
        return self.waited and not (exchange.last_read_ns or exchange.retried or exchange.ended)

    def over(self, exchange: Exchange) -> None:
        """End an exchange: keep the connection for the next one, or close it."""
        self.exchange = None
        self._client.answers += 1
        if exchange.close_after or self.lost or not self._client.reuse:
            self._client.closed_said += exchange.close_after
            self.close()
        else:
            self.wait()

    def wait(self) -> None:
        """Wait for the next exchange."""
        self.waited, self.idle_since_ns = True, time.monotonic_ns()
        self._client.idle.append(self)

    def usable(self, oldest_ns: int) -> bool:
        """Tell whether it has been idle since ``oldest_ns`` at most, with nothing to read."""
        if self._wire is not None and not self.lost:
            self._wire.read_waiting()
        return not self.lost and self.idle_since_ns >= oldest_ns

    def unsolicited(self) -> None:
        """Close after bytes that answer no request: the next would get an answer to another."""
        self._client.unsolicited += 1
        self.lost = True
        if self._wire is not None:
            self._wire.abort()

    def close(self) -> None:
        """Close the socket at once."""
        self.exchange, self._left = None, True
        if self._wire is not None:
            self._wire.abort()


class Client:
    """Sends exchanges to one endpoint; never waits for a connection slot."""

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: list[str],
        context: ssl.SSLContext | None,
        *,
        stamps: Stamps = "read",
        reuse: Reuse = "pool",
        proxy: Proxy | None = None,
    ) -> None:
        """``stamps="kernel"`` uses kernel time stamps where available (Linux)."""
        self._endpoint = endpoint
        self.secrets = endpoint.secrets
        self._addresses = [] if proxy else addresses  # a proxy's are looked up
        self._port = proxy.port if proxy else endpoint.port
        self._sources = deque(endpoint.sources)
        self._context = context
        self._session: ssl.SSLSession | None = None
        self._tunnel = connect_request(proxy, endpoint) if proxy and context else b""
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[Exchange, asyncio.Task[None]] = {}
        self._carrying: dict[Exchange, Connection] = {}
        self._proxy = proxy
        self._dispatched = 0
        self._spares = 0  # idle connections that are kept open for requests to come
        self._opening: set[asyncio.Task[None]] = set()  # spare ones
        self._reader: kernel_stamps.KernelReader | None = None
        self._patient = False
        self._pacer: Sleeper | None = None
        self.stamps: Stamps = stamps if kernel_stamps.AVAILABLE else "read"
        self.reuse = reuse == "pool"
        self.open: set[Connection] = set()
        self.idle: deque[Connection] = deque()
        self.connections_opened = 0
        self.shortages = 0  # connections that failed for lack of local resources
        self.resent = 0  # requests whose reused connection was closed
        self.unsolicited = 0  # reads of idle connections that answer no request
        self.answers = 0  # complete answers
        self.closed_said = self.closed_unsaid = 0  # connections that the server closed after one
        # read time − kernel time of a sample
        self.receive_delays_s: array[float] = array("d")
        # of the requests outside of a stage
        self.asked: list[RequestRecord] = []
        self.asked_failed: list[str] = []  # "status: error"
        self.asked_bodies = 0  # good answers in one JSON body, where others may be streams
        self.patience_s = ANSWER_TIMEOUT_S

    def dispatch(self, exchange: Exchange) -> None:
        """Send now on a kept-alive connection, or open a new one; returns at once."""
        self._dispatched += 1
        connection = self._take_idle()
        if connection is None:
            self.connect_and_send(exchange)
        else:
            self._carry(exchange, connection)
        if self._spares and self._patient and self.reuse:
            self._open_spares()

    def connect_and_send(self, exchange: Exchange) -> None:
        """Open a connection for this exchange; at once if the server is on this machine."""
        begun = None
        if kernel_stamps.AVAILABLE and self._context is None and self._addresses:
            address, connection = (self._addresses[0], self._port), Connection(self)
            try:
                begun = kernel_connect.connect_at_once(
                    self._kernel_reader(), address, connection, self._sources
                )
            except OSError:
                pass  # fails again below, which reports it
            else:
                if begun is None:
                    self._carry(exchange, connection)
                    return
        task = self._loop.create_task(self._connect(exchange, begun))
        if begun is not None:  # a task that is cancelled before its first step closes nothing
            task.add_done_callback(lambda task: begun.close() if task.cancelled() else None)
        self._connecting[exchange] = task

    def forget(self, exchange: Exchange) -> None:
        """Stop all work for an exchange that has ended."""
        task = self._connecting.pop(exchange, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        connection = self._carrying.pop(exchange, None)
        if connection is not None and connection.exchange is exchange and exchange.close_after:
            connection.close()

    async def close(self) -> None:
        """Close every connection."""
        for task in [*self._connecting.values(), *self._opening]:
            task.cancel()
        for connection in list(self.open):
            connection.close()
        self.idle.clear()
        for _ in range(1000):  # connection_lost removes each within two turns of the loop
            if not self.open:
                break
            await asyncio.sleep(0.001)
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def be_patient(self, patient: bool) -> None:
        """Set whether reads may be delayed by some ms, as no request depends on them."""
        self._patient = patient
        if self._reader is not None:
            self._reader.patient = patient

    @property
    def keeps_alive(self) -> bool | None:
        """Return whether the server keeps connections alive; None: not known."""
        if self.answers < CLOSED_MIN or not self.reuse:
            return None
        return self.closed_said + self.closed_unsaid < CLOSED_SHARE * self.answers

    @property
    def behind(self) -> bool:
        """Return whether there was more to read than fits into one turn."""
        return self._reader is not None and self._reader.behind

    async def catch_up(self) -> None:
        """Read what has arrived, before a request is timed out."""
        if self._reader is not None:
            self._reader.catch_up()
        for _ in range(2):  # by asyncio, in a turn of the loop: the rest of this one, and the next
            await asyncio.sleep(0)

    def make_way(self, pacer: Sleeper) -> None:
        """Read less when ``pacer`` is about to send."""
        self._pacer = pacer
        if self._reader is not None:
            self._reader.pacer = pacer

    def _note_delay(self, delay_s: float) -> None:
        self.receive_delays_s.append(delay_s)  # each stage has its own

    def _kernel_reader(self) -> kernel_stamps.KernelReader:
        if self._reader is None:
            self._reader = kernel_stamps.KernelReader(
                date_by_kernel=self.stamps == "kernel", on_delay=self._note_delay
            )
            self._reader.patient, self._reader.pacer = self._patient, self._pacer
        return self._reader

    def _take_idle(self) -> Connection | None:
        oldest_ns = time.monotonic_ns() - int(IDLE_MAX_S * 1e9)
        while self.idle:
            connection = self.idle.pop()  # the one used last is the least likely to be closed
            if connection.usable(oldest_ns):
                return connection
            connection.close()
        return None

    def _open_spares(self) -> None:
        """Open connections before they are due: twice as many as were due while one was opened."""
        idle, wanted = self.idle, self._spares - len(self._opening)
        oldest_ns = time.monotonic_ns() - int(IDLE_MAX_S * 1e9)
        while wanted > 0 and (len(idle) < wanted or idle[-wanted].idle_since_ns < oldest_ns):
            wanted -= 1
            task = self._loop.create_task(self._open_spare())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open_spare(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                (await self._open()).wait()
        except OSError:  # TimeoutError is one; the request that needs it reports the error
            self._spares = 0

    async def _connect(self, exchange: Exchange, begun: socket.socket | None) -> None:
        before = self._dispatched
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._open(begun)
        except TimeoutError:
            why = f"no connection within {CONNECT_TIMEOUT_S:g} s"
            exchange.fail("connect_error", why, time.monotonic_ns())
            return
        except OSError as error:  # ssl.SSLError is one
            if error.errno in OWN_SHORTAGE:
                self.shortages += 1
            proxy = self._proxy
            through = f"through the proxy {proxy.host}:{proxy.port}: " if proxy else ""
            exchange.fail("connect_error", through + _why(error), time.monotonic_ns())
            error.__traceback__ = None  # holds the frame that holds it
            return
        finally:
            self._connecting.pop(exchange, None)
        self._spares = min(max(self._spares, 2 * (self._dispatched - before)), SPARES_MAX)
        if exchange.ended:
            connection.close()
            return
        if connection.lost:  # accepted and closed at once
            why = "connection closed before the response headers"
            exchange.fail("reset", why, time.monotonic_ns())
            return
        self._carry(exchange, connection)

    def _carry(self, exchange: Exchange, connection: Connection) -> None:
        """Send on a new connection."""
        exchange.record.connected_ns = time.monotonic_ns()
        self._carrying[exchange] = connection
        connection.send(exchange)

    async def _open(self, begun: socket.socket | None = None) -> Connection:
        """Connect to the endpoint; ``begun``: a socket that is connecting to its first address."""
        if self._proxy is not None and not self._addresses:
            found = await self._loop.getaddrinfo(
                self._proxy.host, self._port, type=socket.SOCK_STREAM
            )
            self._addresses = list(dict.fromkeys(str(where[0]) for *_, where in found))
        addresses = self._addresses
        last: OSError | None = None
        for address in list(addresses):
            first, begun = begun, None
            try:
                async with asyncio.timeout(None if address == addresses[-1] else ADDRESS_TIMEOUT_S):
                    connection = await self._open_at(address, first)
                if addresses[0] != address:  # the one that answers comes first
                    addresses.remove(address)
                    addresses.insert(0, address)
                return connection
            except OSError as error:
                # a shortage is the cause; a certificate says more than a refusal elsewhere
                if last is None or not (
                    isinstance(last, ssl.SSLError) or last.errno in OWN_SHORTAGE
                ):
                    last = error
        raise last or OSError("no address")

    async def _open_at(self, address: str, begun: socket.socket | None) -> Connection:
        connection = Connection(self)
        receiver: Receiver = connection
        if self._context is not None:
            receiver = TlsWire(
                connection,
                self._context,
                self._endpoint.host,
                session=self._session,
                on_session=self._note_session,
                tunnel=self._tunnel,
            )
        if kernel_stamps.AVAILABLE:
            where = address, self._port
            await kernel_connect.connect(
                self._kernel_reader(), where, receiver, self._sources, begun
            )
        else:
            await asyncio_reads.connect((address, self._port), receiver)
        if isinstance(receiver, TlsWire):
            await receiver.secured()
        return connection

    def _note_session(self, session: ssl.SSLSession) -> None:
        self._session = session


def _why(error: OSError) -> str:
    """Return the message of the system, of OpenSSL or of the resolver."""
    if isinstance(error, ssl.SSLError | socket.gaierror) or not error.errno:
        return str(error) or f"{type(error).__name__} while connecting"
    return os.strerror(error.errno)
