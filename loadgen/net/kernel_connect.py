"""Connect sockets with kernel time stamps, on one machine within the same turn of the event loop.

A task for each connection would delay its request by three turns. Local addresses that are given
(``sources``) take turns: each has ports of its own.
"""

import asyncio
import errno
import os
import socket
from collections import deque

from ampacity.loadgen.net.interfaces import Receiver
from ampacity.loadgen.net.kernel_stamps import KernelReader, KernelWire

_SO_TIMESTAMPNS = 35
_IP_BIND_ADDRESS_NO_PORT = 24  # else bind() takes a port for all endpoints at once


def connect_at_once(
    reader: KernelReader, address: tuple[str, int], receiver: Receiver, sources: deque[str]
) -> socket.socket | None:
    """Connect and attach if that needs no waiting, else return the connecting socket.

    Raises OSError.
    """
    begun, connected = begin_connect(address, sources)
    if not connected:
        return begun
    _attach(reader, begun, receiver)
    return None


async def connect(
    reader: KernelReader,
    address: tuple[str, int],
    receiver: Receiver,
    sources: deque[str],
    begun: socket.socket | None = None,
) -> None:
    """Connect to (IP, port), or finish ``begun``; attach it to ``receiver``. Raises OSError."""
    connected = False
    if begun is None:
        begun, connected = begin_connect(address, sources)
    try:
        if not connected:
            await asyncio.get_running_loop().sock_connect(begun, address)
    except BaseException:
        begun.close()
        raise
    _attach(reader, begun, receiver)


def begin_connect(address: tuple[str, int], sources: deque[str]) -> tuple[socket.socket, bool]:
    """Return a socket that connects to (IP, port), and whether it has. Raises OSError.

    A source without a free port is passed over.
    """
    for left in reversed(range(len(sources))):
        source = sources[0]
        sources.rotate(-1)
        try:
            return _begin_from(address, source)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not left:
                raise
    return _begin_from(address, "")


def _begin_from(address: tuple[str, int], source: str) -> tuple[socket.socket, bool]:
    begun = socket.socket(
        socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        begun.setblocking(False)
        begun.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        if source:
            begun.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            begun.bind((source, 0))
        error = begun.connect_ex(address)
        if error == errno.EINPROGRESS:  # a second call tells whether it has succeeded
            error = begun.connect_ex(address)
        if error not in (0, errno.EALREADY, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        begun.close()
        raise
    return begun, error == 0


def _attach(reader: KernelReader, connected: socket.socket, receiver: Receiver) -> None:
    try:
        receiver.attach(KernelWire(reader, connected, receiver))
    except BaseException:
        connected.close()
        raise
