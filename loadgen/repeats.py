"""Chunks that repeat the one before them but for their text, known by their bytes alone.

A server writes the chunks of an answer from one form. What differs is the text and, where it counts as it goes, the
running totals. So a chunk that was read by all of the parsers teaches the form, and what fits it needs none of them.

That this reads the same is shown when the form is learned: the chunk with another text and the next totals in their
places is decoded and says just these. A string of JSON that has no quotation mark, backslash or control character and
is UTF-8 stands for itself, and so does a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

EVENT_END = b"\n\n\r\n"  # of an event that ends its HTTP chunk
PLAIN = bytes(c for c in range(0x20, 0x7F) if c not in b'"\\')  # in a text these stand for themselves
READ_MAX_BYTES = 2048  # longer reads are parsed
PLACES_MAX = 4  # where the text may stand, tried until one is it
_LINE_ENDS = re.compile(rb"[\r\n]")
_TOTALS = re.compile(rb'"(?:completion|total)_tokens": ?([1-9][0-9]{0,8})')

Kind = Literal["answer", "reasoning"]
Said = tuple[Kind, str, int | None]
"""What one chunk says: of which kind its text is, the text, and the tokens of the answer up to it."""


@cache
def _size_lines(size: bytes) -> list[bytes]:
    """The first line of a chunk that makes a read so long, by its length; its size written as ``%x`` or ``%X``."""
    lines = []
    for read_bytes in range(READ_MAX_BYTES):
        digits = next(d for d in range(1, 9) if read_bytes - d - 4 < 16**d)
        lines.append(size % max(read_bytes - digits - 4, 0) + b"\r\n")
    return lines


_known: set[bytes] = set()  # texts that stand for themselves: the words of a language come again and again
KNOWN_MAX = 20_000


def _stands_for_itself(text: bytes) -> bool:
    odd = text.translate(None, PLAIN)
    if not text or (odd and (min(odd) < 0x80 or not _is_utf8(text))):
        return False
    if len(_known) >= KNOWN_MAX:
        _known.clear()
    _known.add(text)
    return True


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class Form:
    """One HTTP chunk with one event of text; where totals run, the chunk that is due next."""

    __slots__ = ("_before", "_behind", "_gaps", "_heads", "_lines", "_parts", "kind", "total")

    def __init__(
        self, size: bytes, before: bytes, behind: list[bytes], kind: Kind, total: int | None, gaps: list[int]
    ) -> None:
        """``behind``: what stands behind the text, cut where there are totals, each so far from ``total`` as ``gaps`` says."""
        self._lines = _size_lines(size)
        self._before, self._gaps = before, [gap + 1 for gap in gaps]
        self._behind = b"".join(behind)
        self._parts = [part for fixed in behind for part in (fixed, b"")]
        self._heads: dict[int, bytes] = {}  # all before the text, by the length of the read
        self.kind = kind
        self.total: int | None = None
        if total is not None:
            self.counted(total)

    def counted(self, total: int) -> None:
        """So many tokens have come: the next chunk has one more."""
        self.total = total
        parts, place = self._parts, 1
        for gap in self._gaps:
            parts[place] = b"%d" % (total + gap)
            place += 2
        self._behind = b"".join(parts)

    def data_of(self, text: bytes) -> bytes:
        """The event's data in the next chunk, if it says ``text``."""
        return self._before.partition(b":")[2] + text + self._behind[: -len(EVENT_END)]

    def take(self, read: bytes) -> bytes | None:
        """The text of ``read``, which is the next chunk; None if it does not repeat the form. The hot path: few steps."""
        length, behind = len(read), self._behind
        try:
            head = self._heads[length]
        except KeyError:
            if length >= READ_MAX_BYTES:
                return None
            head = self._heads[length] = self._lines[length] + self._before
        text = read.removeprefix(head).removesuffix(behind)
        if length - len(text) != len(head) + len(behind) or (
            text not in _known and not _stands_for_itself(text)
        ):
            return None
        if self.total is not None:
            self.counted(self.total + 1)
        return text


def learn(read: bytes, said: Callable[[bytes], Said | None]) -> Form | None:
    """The form of ``read``, if it is one chunk with one event of one line, and that is text that stands for itself.

    ``said`` decodes an event's data: None where that is anything but text.
    """
    event = read.partition(b"\r\n")[2]
    begin = 6 if event.startswith(b"data: ") else 5
    data = event[begin:-4]
    if len(read) >= READ_MAX_BYTES or not event.startswith(b"data:") or not event.endswith(EVENT_END):
        return None
    size = next((s for s in (b"%x", b"%X") if read.startswith(_size_lines(s)[len(read)])), None)
    found = None if size is None or _LINE_ENDS.search(data) else said(data)
    if size is None or found is None or not found[1]:
        return None
    kind, text, total = found
    string, at = b'"%b"' % text.encode(), -1
    for _ in range(PLACES_MAX):
        at = data.find(string, at + 1)
        if at < 0:
            return None
        behind, gaps = _without_totals(data[at + len(string) - 1 :] + EVENT_END, total)
        form = Form(size, event[:begin] + data[: at + 1], behind, kind, total, gaps)
        other = text + "~"
        if said(form.data_of(other.encode())) == (kind, other, None if total is None else total + 1):
            return form
    return None


def _without_totals(behind: bytes, total: int | None) -> tuple[list[bytes], list[int]]:
    """What stands behind the text, cut where there are totals; and how far each of them is from ``total``."""
    pieces: list[bytes] = []
    gaps: list[int] = []
    cut = 0
    if total is not None:
        for number in _TOTALS.finditer(behind):
            pieces.append(behind[cut : number.start(1)])
            gaps.append(int(number[1]) - total)
            cut = number.end(1)
    return [*pieces, behind[cut:]], gaps
