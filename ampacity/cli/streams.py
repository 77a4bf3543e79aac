"""Make the standard streams robust: none is missing, and losing a reader ends nothing."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ampacity.reports.render import plain as plain  # registers "in_ascii"

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def secure_streams() -> None:
    """Let stdout and stderr survive closed descriptors, lost readers, any text and environment."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else a socket would get the closed descriptor
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    if not os.environ.get("COLUMNS", "").strip("0 "):  # of no width nothing can be drawn
        os.environ.pop("COLUMNS", None)
    if not os.environ.get("SOURCE_DATE_EPOCH", "0").isdecimal():  # what NumPy cannot read
        del os.environ["SOURCE_DATE_EPOCH"]
    sys.stdout = _outliving(sys.stdout, sys.__stdout__)
    sys.stderr = _outliving(sys.stderr, sys.__stderr__)


class _Outliving(io.FileIO):
    """A descriptor that discards output once its reader is gone: 'ampacity run ... | head' goes on.

    It works below rich and click, which end the program at a broken pipe, and below the
    interpreter, which complains about what it cannot flush.
    """

    def write(self, data: ReadableBuffer, /) -> int | Any:
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_lost_its_reader(error):
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # for what is still to come, and for processes yet to be started
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes

    def _has_lost_its_reader(self, error: OSError) -> bool:
        """EIO is a terminal that is gone, but of a file it is a broken disk."""
        terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return isinstance(error, ConnectionError) or (error.errno == errno.EIO and terminal)


def _outliving(stream: TextIO | None, original: TextIO | None) -> TextIO:
    """Return ``stream`` on a descriptor that outlives its reader; unchanged if it was replaced."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO:  # a console of Windows
        return stream
    stream.flush()
    ours = _Outliving(raw.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        ours if stream.write_through else io.BufferedWriter(ours),  # python -u buffers nothing
        encoding=stream.encoding,
        errors="in_ascii",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
