"""Match chunks that differ from the previous one only in their text, without parsing them.

A server writes the chunks of an answer from one template. Only the text differs and, where the
server counts as it goes, the running totals. So a template is learned from a fully parsed chunk,
and chunks that match it need no parser. Without the compiled hot path every chunk is parsed.

A template is proved when it is learned: the chunk with another text and the next totals filled in
has to decode to just these. A UTF-8 string without quotation mark, backslash or control character
is written in JSON as it is, and so is a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.thinking import MARKS, Kind

EVENT_END = b"\n\n\r\n"  # of an event that ends its HTTP chunk
PLAIN = bytes(c for c in range(0x20, 0x7F) if c not in b'"\\')  # unescaped in JSON
READ_MAX_BYTES = 2047  # longer reads are parsed; as in _hot_path.c
PLACES_MAX = 4  # occurrences of the text in a chunk that are tried
KNOWN_MAX = 20_000
KNOWN_BYTES_MAX = 512  # longer texts are checked each time
_HEADERS_END = b"\r\n\r\n"
_TOTALS = re.compile(rb'"(?:completion|total)_tokens": ?([1-9][0-9]{0,8})')
_known: set[bytes] = set()  # texts that need no escape: the words of a language come again

ChunkContent = tuple[Kind, str, int | None]
"""One chunk: kind of its text, the text, and the running total of tokens or None."""


def _needs_no_escape(text: bytes) -> bool:
    """Tell whether the text is written in JSON as it is; remember it if so."""
    odd = text.translate(None, PLAIN)
    if not text or (odd and (min(odd) < 0x80 or not _is_utf8(text))) or MARKS.search(text):
        return False  # a thinking tag changes the kind of the text around it
    if len(text) <= KNOWN_BYTES_MAX:
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


@dataclass(slots=True)
class ChunkTemplate:
    """An HTTP chunk with one event of text; where totals run, the next chunk in sequence.

    ``fixed`` are the bytes after the text, cut at the totals, which are ``total`` + 1 + ``gaps``.
    """

    size: bytes  # format of the chunk size: ``%x`` or ``%X``
    before: bytes  # between the size line and the text
    fixed: tuple[bytes, ...]
    gaps: tuple[int, ...]
    kind: Kind
    total: int | None  # tokens so far: the next chunk has one more

    def _behind(self) -> bytes:
        """Return what follows the text of the next chunk."""
        if self.total is None:
            return self.fixed[0]
        numbers = [b"%d" % (self.total + 1 + gap) for gap in self.gaps]
        return b"".join(chain(*zip_longest(self.fixed, numbers, fillvalue=b"")))

    def data_of(self, text: bytes) -> bytes:
        """Return the event data of the next chunk with this text."""
        return self.before.partition(b":")[2] + text + self._behind()[: -len(EVENT_END)]

    def text_of(self, read: bytes) -> bytes | None:
        """Return the text of the next chunk; None where ``read`` does not match the template."""
        length, behind = len(read), self._behind()
        if length > READ_MAX_BYTES:
            return None
        head = self.size % (length - read.find(b"\n") - 3) + b"\r\n" + self.before
        text = read.removeprefix(head).removesuffix(behind)
        if len(head) + len(text) + len(behind) != length:
            return None
        if text not in _known and not _needs_no_escape(text):
            return None
        if self.total is not None:
            self.total += 1
        return text

    def read_handler(
        self,
        add_time: Callable[[int], None],
        add_text: Callable[[bytes], None] | None,
        fallback: ReadHandler,
    ) -> ReadHandler:
        """Return a handler that records time and text of matching chunks and passes on all others.

        Reads with several chunks and new texts are matched here, all others by compiled code.
        """

        def handle(at_ns: int, read: bytes) -> bool:
            while (end := read.find(EVENT_END) + len(EVENT_END)) >= len(EVENT_END):
                if (text := self.text_of(read[:end])) is None:
                    break
                add_time(at_ns)
                if add_text is not None:
                    add_text(text)
                read = read[end:]
                if not read:
                    return False
            return fallback(at_ns, read)

        known, upper = _known, self.size == b"%X"
        return hot_path.read_handler(
            self, upper, self.before, self.fixed, self.gaps, known, add_time, add_text, handle
        )


def last_chunk(read: bytes) -> bytes:
    """Return the last chunk of a read that ends with one."""
    before = read.rfind(EVENT_END, 0, -1)
    if before < 0:
        before = read.rfind(_HEADERS_END, 0, -1)
    return read if before < 0 else read[before + 4 :]


def learn(read: bytes, decode: Callable[[bytes], ChunkContent | None]) -> ChunkTemplate | None:
    """Return the template of ``read`` if it is one chunk with one one-line event of plain text.

    ``decode`` decodes an event's data: None where that is anything but text.
    """
    line, _, event = read.partition(b"\r\n")
    begin = 6 if event[5:6] == b" " else 5
    data = event[begin : -len(EVENT_END)]
    size = next((s for s in (b"%x", b"%X") if line == s % (len(event) - 2)), None)
    if size is None or len(read) > READ_MAX_BYTES or b"\n" in data or b"\r" in data:
        return None
    if not (event.startswith(b"data:") and event.endswith(EVENT_END)):
        return None
    content = decode(data)
    if content is None or not content[1]:
        return None
    kind, text, total = content
    string, at = b'"' + text.encode() + b'"', -1
    for _ in range(PLACES_MAX):
        at = data.find(string, at + 1)
        if at < 0:
            return None
        fixed, gaps = _without_totals(data[at + len(string) - 1 :] + EVENT_END, total)
        template = ChunkTemplate(size, event[:begin] + data[: at + 1], fixed, gaps, kind, total)
        other, next_total = text + "~", None if total is None else total + 1
        if decode(template.data_of(other.encode())) == (kind, other, next_total):
            return template
    return None


def _without_totals(behind: bytes, total: int | None) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Cut what follows the text at its totals; return the pieces and each total - ``total``."""
    numbers = [] if total is None else [*_TOTALS.finditer(behind)]
    starts = [0, *(number.end(1) for number in numbers)]
    ends = [*(number.start(1) for number in numbers), len(behind)]
    pieces = tuple(behind[start:end] for start, end in zip(starts, ends, strict=True))
    return pieces, tuple(int(number[1]) - (total or 0) for number in numbers)
