"""Match chunks that differ from the first one only in their text, without parsing them.

A server writes the chunks of an answer from one template. Only the text differs (or the piece of a
tool call's arguments) and, where they are sent, running totals and log-probabilities. So a
template is learned from a fully parsed chunk, and compiled code (``_hot_path.c``) takes the chunks
that match it. Without it all are parsed.

A template is proved when it is learned: the chunk with another text, a larger total and one more
token in its log-probabilities filled in has to decode to just these. Texts with an escape that
may hide a thinking tag are parsed.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

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
_LOGPROBS = re.compile(rb'"logprobs": ?(?=\{)')


class ChunkContent(NamedTuple):
    """The content of one chunk."""

    kind: Kind
    text: str  # or a piece of the arguments of ``call``
    total: int | None = None  # running total, of tokens or of events
    listed: int | None = None  # number of tokens in its log-probabilities
    call: tuple[Any, Any, Any] | None = None  # key, id and name of a tool call


@dataclass(frozen=True, slots=True)
class ChunkTemplate:
    """An event of text, without its HTTP framing.

    ``fixed`` are the bytes after the text, cut at the totals, which are the running total +
    ``gaps``, and at the log-probabilities, where the gap is None. ``content`` is that of the chunk
    that it was learned from.
    """

    before: bytes
    fixed: tuple[bytes, ...]
    gaps: tuple[int | None, ...]
    content: ChunkContent

    def data_of(self, content: ChunkContent) -> bytes:
        """Return the event data with this text, running total and number of listed tokens."""
        logprobs = b'{"content":[%b]}' % b",".join([b"{}"] * (content.listed or 0))
        filled = [
            logprobs if gap is None else b"%d" % ((content.total or 0) + gap) for gap in self.gaps
        ]
        behind = b"".join(chain(*zip_longest(self.fixed, filled, fillvalue=b"")))
        return self.before.partition(b"data:")[2] + content.text.encode() + behind[:-2]

    def read_handler(
        self,
        add_time: Callable[[int], None],
        add_count: Callable[[int], None] | None,
        add_text: Callable[[bytes], None] | None,
        fallback: ReadHandler,
        total: int,
    ) -> ReadHandler:
        """Return a handler that records matching chunks and passes on all others.

        ``add_count`` gets the running total, or else the number of tokens in the log-probabilities;
        ``total`` is the running total so far.
        """
        how = self.before, self.fixed, self.gaps, MARKS
        return hot_path.read_handler(*how, add_time, add_count, add_text, fallback, total)


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
    if (content := decode(data)) is None or not content.text:
        return None
    total, listed = content.total, content.listed
    other = content._replace(
        text="~~" if content.text == "~" else "~",
        total=None if total is None else total + 2,
        listed=None if listed is None else listed + 1,
    )
    places = (found for found in _STRING.finditer(data) if _decoded(found[1]) == content.text)
    for found in islice(places, PLACES_MAX):
        fixed, gaps = _cut(data[found.end(1) :] + b"\n\n", content)
        template = ChunkTemplate(event[:begin] + data[: found.start(1)], fixed, gaps, content)
        if decode(template.data_of(other)) == other:
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


def _cut(behind: bytes, content: ChunkContent) -> tuple[tuple[bytes, ...], tuple[int | None, ...]]:
    """Cut what follows the text at its totals and log-probabilities.

    Return the pieces, and of each cut its total - the running total, None at log-probabilities.
    """
    total = content.total
    start, end = (0, 0) if content.listed is None else _logprobs(behind)
    cuts: list[tuple[int, int, int | None]] = [(start, end, None)] if end else []
    if total is not None:
        numbers = [n for n in _TOTALS.finditer(behind) if not start < n.start() < end]
        cuts += [(*number.span(1), int(number[1]) - total) for number in numbers]
    cuts.sort(key=lambda cut: cut[0])
    starts = [0, *(end for _, end, _ in cuts)]
    ends = [*(start for start, _, _ in cuts), len(behind)]
    pieces = tuple(behind[start:end] for start, end in zip(starts, ends, strict=True))
    return pieces, tuple(gap for _, _, gap in cuts)


def _logprobs(behind: bytes) -> tuple[int, int]:
    """Return where the log-probabilities begin and end; (0, 0) where there are none."""
    if (found := _LOGPROBS.search(behind)) is None:
        return 0, 0
    start = found.end()
    try:
        text = behind[start:].decode()
        _, length = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return 0, 0
    return start, start + len(text[:length].encode())
