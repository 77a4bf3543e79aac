"""A server that speaks TLS by hand, so that a test chooses what each segment holds."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

Script = Callable[["Peer"], None]


class Peer:
    """One connection of the server, after its handshake and the client's first request."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self.socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(10)

    def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.send(self._outgoing.read())
                self._receive()
        self.send(self._outgoing.read())  # tickets

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionAbortedError
        self._incoming.write(data)

    def request(self) -> bytes:
        """Read one request without a body, or with one in the same record."""
        got = b""
        while b"\r\n\r\n" not in got:
            try:
                got += self.tls.read(65536)
            except ssl.SSLWantReadError:
                self._receive()
        return got

    def encrypt(self, data: bytes) -> bytes:
        """Return ``data`` as one record, up to 16 KiB."""
        self.tls.write(data)
        return self._outgoing.read()

    def say_goodbye(self) -> bytes:
        """Return a close_notify."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self._outgoing.read()

    def send(self, *pieces: bytes, gap_s: float = 0.0) -> None:
        """Send each piece as a segment of its own, if there is a gap."""
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(gap_s)  # the pace of the server
            self.socket.sendall(piece)

    def wait_for_close(self) -> None:
        while self.socket.recv(65536):
            pass

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class TlsServer:
    """Plays ``script`` on each connection, in a thread of its own; ``peers`` are those so far."""

    def __init__(
        self, certificate: Path, script: Script, *, pause_s: float = 0.0, tls12: bool = False
    ) -> None:
        """``pause_s``: before each handshake."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._context.set_alpn_protocols(["h2", "http/1.1"])
        if tls12:
            self._context.maximum_version = ssl.TLSVersion.TLSv1_2
        self._script, self._pause_s = script, pause_s
        self.peers: list[Peer] = []

    def _serve(self, connection: socket.socket) -> None:
        time.sleep(self._pause_s)  # a server whose handshake is slow
        peer = Peer(connection, self._context)
        self.peers.append(peer)
        with contextlib.suppress(OSError), connection:
            peer.shake_hands()
            self._script(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def __enter__(self) -> TlsServer:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"https://127.0.0.1:{self._listening.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
