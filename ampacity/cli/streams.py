"""The standard streams of the command line: none is missing, and a reader that goes away ends nothing."""

from __future__ import annotations

import codecs
import errno
import io
import os
import stat
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


IN_ASCII = {
    "≥": ">=",
    "≤": "<=",
    "×": "x",
    "÷": "/",
    "–": "-",
    "−": "-",
    "…": "...",
    "·": ".",
    "µ": "u",
    "λ": "lambda ",
    "±": "+/-",
    "→": "->",
}
"""What a stream writes for a character that its encoding lacks; superscripts become ``^1``, all others ``?``."""


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """The error handler "in_ascii" of ``codecs``: no text ends a command because the terminal has no such character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    raised = {c: f"^{unicodedata.digit(c)}" for c in lacking if c.isdigit()}
    return "".join({**IN_ASCII, **raised}.get(c, "?") for c in lacking), error.end


def secure_streams() -> None:
    """Let stdout and stderr bear that their descriptor is closed from the start, that its reader goes away, and any text."""
    codecs.register_error("in_ascii", in_ascii)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a descriptor that the caller closed would become a socket of ours
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdout = _outliving(sys.stdout, sys.__stdout__)
    sys.stderr = _outliving(sys.stderr, sys.__stderr__)


class _Outliving(io.FileIO):
    """A descriptor that leads nowhere once its reader is gone: 'ampacity run ... | head' loses no run.

    Below all that prints, since rich and click end the program by themselves at a broken pipe, and the interpreter
    complains of what it cannot flush at its end.
    """

    def write(self, data: ReadableBuffer, /) -> int | Any:
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_lost_its_reader(error):
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(
            nowhere, self.fileno()
        )  # for what is still to come, and for processes yet to be started
        os.close(nowhere)
        return memoryview(data).nbytes

    def _has_lost_its_reader(self, error: OSError) -> bool:
        """EIO is a terminal that is gone, but of a file it is a broken disk."""
        terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return isinstance(error, ConnectionError) or (error.errno == errno.EIO and terminal)


def _outliving(stream: TextIO | None, original: TextIO | None) -> TextIO:
    """``stream`` on a descriptor that outlives its reader; as it is where somebody else put it there."""
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
        errors="in_ascii" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
