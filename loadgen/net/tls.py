"""TLS between a socket and the connection above it, without asyncio's.

The reads below keep their times: what a read completes has the time of that read, so kernel time
stamps hold for TLS as they do for plain TCP. kTLS would do the same in the kernel; it needs Python
3.12 and the kernel's ``tls`` module.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from ampacity.loadgen.net.interfaces import Receiver, Wire
from ampacity.loadgen.receive import hot_path

PROXY_ANSWER_MAX_BYTES = 16_384
CLOSED_EARLY = "connection closed during the TLS handshake"
CLOSED_BY_PROXY = "the proxy closed the connection"
UNSAID = "connection closed without TLS's close_notify"  # which a cut connection is, too


class TlsWire:
    """The receiver of a socket's reads, and the wire of the ``receiver`` above it."""

    def __init__(
        self,
        receiver: Receiver,
        context: ssl.SSLContext,
        host: str,
        *,
        session: ssl.SSLSession | None,
        on_session: Callable[[ssl.SSLSession], None],
        tunnel: bytes,
    ) -> None:
        """Prepare TLS to ``host``; ``session`` is resumed, ``on_session`` gets the next one.

        ``tunnel`` is the CONNECT request that a proxy gets first, or empty.
        """
        self._receiver = receiver
        self._wire: Wire | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=host, session=session
        )
        # _sslobj is private and holds the same read without a Python frame for each record; an
        # interpreter without it takes the slower way
        self._read: Callable[[int], bytes] = getattr(self._tls, "_sslobj", self._tls).read
        self._on_session: Callable[[ssl.SSLSession], None] | None = on_session
        self._tunnel, self._proxy_answer = tunnel, b""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secured = False  # the handshake is done
        self._closed = False  # by the peer's close_notify
        self._error: Exception | None = None
        self._unsent = b""  # plain text
        self.exchange: TlsWire | None = None
        self.feed: Callable[[int, Any], bool] = _after_the_end
        self._compiled: Callable[[int, Any], bool] = self.feed  # for reads of whole records

    async def secured(self) -> None:
        """Wait for the end of the handshake. Raises OSError."""
        try:
            await self._ready
        except BaseException:
            self.abort()
            raise

    # -- the receiver of the socket --------------------------------------------------------------

    def attach(self, wire: Wire) -> None:
        """Start to use a connected socket."""
        self._wire, self.exchange = wire, self  # every read comes here
        self.feed = self._compiled = self._feed
        if hot_path.COMPILED:
            self._compiled = hot_path.tls_handler(
                self._incoming.write, self._read, self._receiver, self._feed
            )
        if self._tunnel:
            wire.write(self._tunnel)
        else:
            self._shake_hands()

    def _feed(self, at_ns: int, data: bytes | tuple[bytes, bytes | Exception]) -> bool:
        """Decrypt a read and hand on what it completes; the exchanges above end by themselves.

        Compiled code has decrypted a tuple already, as ``_decrypted`` does.
        """
        if self._tunnel:
            data = self._after_tunnel(cast("bytes", data))
            if self._tunnel:
                return False
        if isinstance(data, tuple):
            plain, last = data
        else:
            self._incoming.write(data)
            if not (self._secured or self._shake_hands()):
                return False
            plain, last = self._decrypted(len(data))
        whole = isinstance(last, bytes)
        if plain:
            self._hand_on(at_ns, plain)
        if not last:
            self._closed = True
            self.abort()
        elif not isinstance(last, bytes | ssl.SSLWantReadError):
            self._fail(last)
        if self._on_session is not None:
            self._note_session(self._on_session, last=whole)
        if self._outgoing.pending or self._unsent:
            self._send()
            if not self.get_write_buffer_size():
                self._receiver.resume_writing()
        self.feed = self._compiled if whole else self._feed
        return False

    def _decrypted(self, most: int) -> tuple[bytes, bytes | Exception]:
        """Return the plain text of all whole records, and its last piece: empty if TLS is closed.

        An error takes the place of the last piece; half a record, or one without data, is one.
        """
        pieces: list[bytes] = []
        try:
            while piece := self._read(most):
                pieces.append(piece)
                if len(piece) != most and not self._incoming.pending:
                    break
        except ssl.SSLError as error:
            return b"".join(pieces), error
        return b"".join(pieces), piece

    def _hand_on(self, at_ns: int, plain: bytes) -> None:
        receiver = self._receiver
        exchange = receiver.exchange
        if exchange is None:
            receiver.unsolicited()
        elif exchange.feed(at_ns, plain):
            receiver.over(exchange)

    def over(self, exchange: TlsWire) -> None:
        """Do nothing: ``feed`` always returns False."""

    def resume_writing(self) -> None:
        """Note that the socket took everything."""
        if not self._unsent:
            self._receiver.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on the end of the connection; without close_notify it may be an early one."""
        self.exchange = self._wire = None
        self.feed = self._compiled = _after_the_end  # breaks reference cycles
        early = CLOSED_BY_PROXY if self._tunnel else CLOSED_EARLY
        if self._secured:
            error = self._error or exc or (None if self._closed else OSError(UNSAID))
            self._receiver.connection_lost(error)
        elif not self._ready.done():
            self._ready.set_exception(self._error or exc or OSError(early))

    # -- the wire of the connection above --------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Encrypt ``data`` and write it to the socket."""
        self._unsent += data
        self._send()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the socket did not take yet."""
        below = 0 if self._wire is None else self._wire.get_write_buffer_size()
        return len(self._unsent) + below

    def abort(self) -> None:
        """Close at once."""
        if self._wire is not None:
            self._wire.abort()

    unsolicited = abort

    def read_waiting(self) -> None:
        """Read once, if there is anything, as a session ticket."""
        if self._wire is not None:
            self._wire.read_waiting()

    # -- TLS -----------------------------------------------------------------------------------

    def _send(self) -> None:
        """Encrypt and write what can be; a renegotiation goes first."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._tls.write(self._unsent) :]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
        if self._wire is not None and self._outgoing.pending:
            self._wire.write(self._outgoing.read())

    def _shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is done."""
        try:
            self._tls.do_handshake()
            self._secured = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
        self._send()
        if self._secured:
            if self._tls.session_reused:  # again: to copy the next one takes 0.1 to 0.3 ms
                self._on_session = None
            self._receiver.attach(self)
            if not self._ready.done():
                self._ready.set_result(None)
        return self._secured

    def _note_session(self, on_session: Callable[[ssl.SSLSession], None], last: bool) -> None:
        """Hand out the session, once; tickets of TLS 1.3 arrive before the first data."""
        session = self._tls.session
        if session is not None and session.has_ticket:
            on_session(session)
            last = True
        if last:
            self._on_session = None

    def _after_tunnel(self, data: bytes) -> bytes:
        """Return what follows the proxy's answer, once it is there and grants the tunnel."""
        self._proxy_answer += data
        head, end, rest = self._proxy_answer.partition(b"\r\n\r\n")
        if not end and len(head) <= PROXY_ANSWER_MAX_BYTES:
            return b""
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        if status.split(" ")[1:2] != ["200"]:
            self._fail(OSError(f"the proxy refused the tunnel: {status[:100]}"))
            return b""
        self._tunnel = b""
        return rest

    def _fail(self, error: Exception) -> None:
        """Close because of an error; the peer gets the alert, if there is one."""
        self._error = error
        error.__traceback__ = None  # holds the frame that holds it
        if self._wire is not None:
            if self._outgoing.pending:
                self._wire.write(self._outgoing.read())
            self._wire.abort()


def _after_the_end(at_ns: int, data: object) -> bool:
    return False
