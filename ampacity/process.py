"""Protect the process itself: no core file, no secret in its command line, a limit of memory."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from ampacity.files import memory_bytes

_SECRET_OPTIONS = ("--header", "--extra-body", "--api-key-command")


def protect() -> None:
    """Apply what the system has of these."""
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        # of 1 byte: 0 does not stop Linux from handing a core to a program
        resource.setrlimit(resource.RLIMIT_CORE, (hard and 1, hard))
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == resource.RLIM_INFINITY and (memory := memory_bytes()):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    if (texts := sorted(_secret_texts(sys.argv), key=len)) and sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            _overwrite([text.encode(errors="surrogateescape") for text in texts])


def _secret_texts(argv: list[str]) -> Iterator[str]:
    """Yield what ``ps`` must not show: values of the options, queries of URLs."""
    for before, word in pairwise(argv):
        option, equals, value = word.partition("=")
        if before in _SECRET_OPTIONS or (equals and option in _SECRET_OPTIONS):
            yield value if option in _SECRET_OPTIONS else word
        elif query := re.search(r"https?://[^?\s]*\?(.+)", word):
            yield query[1]


def _overwrite(texts: list[bytes]) -> None:
    """Overwrite texts in the memory that the kernel shows as this process's command line."""
    import ctypes

    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    start, end = map(int, fields.rpartition(")")[2].split()[45:47])  # arg_start, arg_end
    held = ctypes.string_at(start, end - start)
    for text in texts:
        for found in re.finditer(re.escape(text), held):
            ctypes.memset(start + found.start(), ord("*"), len(text))
