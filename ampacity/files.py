"""Read files that someone else may have made: regular ones only, up to a size. The one place
that opens them."""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import stat
from functools import partial
from pathlib import Path
from typing import BinaryIO

MIB, GIB = 1 << 20, 1 << 30
MOST_BYTES = 64 * MIB  # of a file that is read as a whole
_LIMITS = {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n"}
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def open_file(
    path: str | Path, most_bytes: int | None = None, *, private: bool = False
) -> BinaryIO:
    """Open a regular file for reading, without waiting for the other end of a pipe.

    ``private``: refuse a file that others than its owner may access. Raises OSError with a
    ``strerror`` for people.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        held = os.fstat(number)
        if stat.S_ISDIR(held.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(held.st_mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(held.st_mode)), "a device")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
        if most_bytes is not None and held.st_size > most_bytes:
            raise _too_large(most_bytes)
        if private and os.name == "posix" and held.st_mode & 0o077:
            mode = f"{held.st_mode & 0o777:04o}"
            raise OSError(errno.EACCES, f"others may read it (mode {mode}): chmod 600 it")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES, *, private: bool = False) -> bytes:
    """Return the content of a file, decompressed where it is gzip. Raises OSError.

    ``most_bytes`` is the limit before and after decompression. Broken gzip raises EOFError or
    zlib.error.
    """
    with open_file(path, most_bytes, private=private) as file:
        data = file.read(most_bytes + 1)
    if data[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            data = packed.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise _too_large(most_bytes)
    return data


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Raises OSError.

    UnicodeDecodeError where it is no UTF-8.
    """
    return read_bytes(path, most_bytes).decode("utf-8-sig")


def digest(*paths: str | Path) -> str:
    """Return 16 hexadecimal digits that tell the contents of files from others. Raises OSError."""
    whole = hashlib.sha256()
    for path in paths:
        with open_file(path) as file:
            for part in iter(partial(file.read, MIB), b""):
                whole.update(part)
    return whole.hexdigest()[:16]


def why(error: Exception) -> str:
    """Return the reason of an error in words, with the limit to raise."""
    number = getattr(error, "errno", None)
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    if number and "[errno" in text:  # of Arrow, which says it twice
        text = os.strerror(number)
    limit = _LIMITS.get(number) if number and text == os.strerror(number) else None
    return f"{text} (raise the limit: {limit})" if limit else text


def memory_bytes() -> int | None:
    """Return the memory of this machine; None where it is not known."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _too_large(most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most_bytes / MIB:,.0f} MiB")
