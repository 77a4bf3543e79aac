"""Match chunks that differ from the first one only in their text, without parsing them.

A server writes the chunks of an answer from one template. Only the text differs and, where the
server counts as it goes, the running totals. So a template is learned from a fully parsed chunk,
and compiled code (``_hot_path.c``) takes the chunks that match it. Without it all are parsed.

A template is proved when it is learned: the chunk with another text and a larger total filled in
has to decode to just these. Texts with an escape that may hide a thinking tag are parsed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import msgspec

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.thinking import MARKS, Kind

EVENT_END = b"\n\n\r\n"  # of an event that ends its HTTP chunk
EVENT_MAX_BYTES = 16_384  # longer ones teach nothing
PLACES_MAX = 4  # occurrences of the text in a chunk that are tried
_HEADERS_END = b"\r\n\r\n"
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)  # of JSON
_BEGIN = re.compile(rb"(?:event: ?(?:content_block_delta|response\.[\w.]+\.delta)\n)?data: ?")
_RUNNING = rb'"(?:completion_tokens|total_tokens|sequence_number)": ?([1-9][0-9]{0,8})'
_TOTALS = re.compile(_RUNNING)

ChunkContent = tuple[Kind, str, int | None]
"""One chunk: kind of its text, the text, and the running total (of tokens, of events) or None."""


@dataclass(frozen=True, slots=True)
class ChunkTemplate:
    """An event of text, without its HTTP framing.

    ``fixed`` are the bytes after the text, cut at the totals, which are the running total +
    ``gaps``.
    """

    before: bytes
    fixed: tuple[bytes, ...]
    gaps: tuple[int, ...]
    kind: Kind

    def data_of(self, text: bytes, total: int | None) -> bytes:
        """Return the event data with this text and running total."""
        numbers = [b"%d" % ((total or 0) + gap) for gap in self.gaps]
        behind = b"".join(chain(*zip_longest(self.fixed, numbers, fillvalue=b"")))
        return self.before.partition(b"data:")[2] + text + behind[:-2]

    def read_handler(
        self,
        add_time: Callable[[int], None],
        add_total: Callable[[int], None] | None,
        add_text: Callable[[bytes], None] | None,
        fallback: ReadHandler,
        total: int,
    ) -> ReadHandler:
        """Return a handler that records matching chunks and passes on all others.

        ``total`` is the running total so far.
        """
        how = self.before, self.fixed, self.gaps, MARKS
        return hot_path.read_handler(*how, add_time, add_total, add_text, fallback, total)


def last_chunk(read: bytes) -> bytes:
    """Return the last chunk of a read that ends with one."""
    before = read.rfind(EVENT_END, 0, -1)
    if before < 0:
        before = read.rfind(_HEADERS_END, 0, -1)
    return read if before < 0 else read[before + 4 :]


def learn(read: bytes, decode: Callable[[bytes], ChunkContent | None]) -> ChunkTemplate | None:
    """Return the template of ``read`` if it is one chunk with one one-line event of text.

    ``decode`` decodes an event's data: None where that is anything but text.
    """
    line, _, event = read.partition(b"\r\n")
    found = _BEGIN.match(event)
    if len(event) > EVENT_MAX_BYTES or line.lower() != b"%x" % (len(event) - 2) or found is None:
        return None
    begin = found.end()
    data = event[begin : -len(EVENT_END)]
    if not event.endswith(EVENT_END) or b"\n" in data or b"\r" in data:
        return None
    if (content := decode(data)) is None or not content[1]:
        return None
    kind, text, total = content
    other, more = "~~" if text == "~" else "~", None if total is None else total + 2
    places = (found for found in _STRING.finditer(data) if _decoded(found[1]) == text)
    for found in islice(places, PLACES_MAX):
        fixed, gaps = _without_totals(data[found.end(1) :] + b"\n\n", total)
        template = ChunkTemplate(event[:begin] + data[: found.start(1)], fixed, gaps, kind)
        if decode(template.data_of(other.encode(), more)) == (kind, other, more):
            return template
    return None


def decoded_text(text: bytes) -> str:
    """Return a text as written in JSON, without its quotation marks."""
    return msgspec.json.decode(b'"%b"' % text, type=str) if b"\\" in text else text.decode()


def _decoded(text: bytes) -> str | None:
    try:
        return decoded_text(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _without_totals(behind: bytes, total: int | None) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Cut what follows the text at its totals; return the pieces and each total - ``total``."""
    numbers = [] if total is None else [*_TOTALS.finditer(behind)]
    starts = [0, *(number.end(1) for number in numbers)]
    ends = [*(number.start(1) for number in numbers), len(behind)]
    pieces = tuple(behind[start:end] for start, end in zip(starts, ends, strict=True))
    return pieces, tuple(int(number[1]) - (total or 0) for number in numbers)
