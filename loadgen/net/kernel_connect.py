"""Connect sockets with kernel time stamps, on one machine within the same turn of the event loop.

A task for each connection would delay its request by three turns.
"""

import asyncio
import errno
import os
import socket

from ampacity.loadgen.net.interfaces import Receiver
from ampacity.loadgen.net.kernel_stamps import KernelReader, KernelWire

_SO_TIMESTAMPNS = 35


def connect_at_once(
    reader: KernelReader, address: tuple[str, int], receiver: Receiver
) -> socket.socket | None:
    """Connect and attach if that needs no waiting, else return the connecting socket.

    Raises OSError.
    """
    begun, connected = begin_connect(address)
    if not connected:
        return begun
    _attach(reader, begun, receiver)
    return None


async def connect(
    reader: KernelReader,
    address: tuple[str, int],
    receiver: Receiver,
    begun: socket.socket | None = None,
) -> None:
    """Connect to (IP, port), or finish ``begun``; attach it to ``receiver``. Raises OSError."""
    connected = False
    if begun is None:
        begun, connected = begin_connect(address)
    try:
        if not connected:
            await asyncio.get_running_loop().sock_connect(begun, address)
    except BaseException:
        begun.close()
        raise
    _attach(reader, begun, receiver)


def begin_connect(address: tuple[str, int]) -> tuple[socket.socket, bool]:
    """Return a socket that connects to (IP, port), and whether it has. Raises OSError."""
    begun = socket.socket(
        socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        begun.setblocking(False)
        begun.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
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
