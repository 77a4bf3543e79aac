"""Connects the sockets that the kernel dates. On one machine that takes no time: the request leaves in the same turn of the loop.

A task for each connection would let the request wait for three turns, which are the longer the more there is to read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from ampacity.loadgen.net.kernel_stamps import KernelReader, KernelWire, Receiver

_SO_TIMESTAMPNS = 35


def connect_at_once(
    reader: KernelReader, address: tuple[str, int], receiver: Receiver
) -> socket.socket | None:
    """As ``connect``, where it takes no time, as mostly on one machine; else the socket that is not connected yet.

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
    """Connect to (IP address, port), where it is not ``begun``, and attach the wire to ``receiver``. Raises OSError."""
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
    """A socket that connects to (IP address, port), and whether it has. Raises OSError."""
    begun = socket.socket(
        socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        begun.setblocking(False)
        begun.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        error = begun.connect_ex(address)
        if error == errno.EINPROGRESS:  # an answer that came at once is looked at on the way out
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
