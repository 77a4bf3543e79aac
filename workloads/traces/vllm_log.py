"""Read requests from vLLM's own log (--enable-log-requests, better with --enable-log-outputs)."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ampacity.workloads.traces.records import Records, Row
from ampacity.workloads.traces.values import BadRow, NoCall

_RECEIVED = re.compile(
    r"(\d\d)-(\d\d) (\d\d:\d\d:\d\d)\S*.*?Received request ([^\s:]+):"
    r".*params: .*?max_tokens=(\d+|None).*?prompt_token_ids: (\[[\d, ]*\]|None)"
)
_GENERATED = re.compile(r"Generated response ([^\s:]+).*output_token_ids: (\[[\d, ]*\]|None)")
_UNKNOWN_ANSWER = NoCall("answers are to requests that the log does not hold: they are not played")


def log_records(lines: Iterable[str], read_share: Callable[[], float]) -> Records:
    """Return the requests of the log, which has no year."""
    names = ["timestamp", "input_tokens", "output_tokens", "max_tokens"]
    return Records(names, 1, _rows(lines), ":", read_share)


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the requests; of streams the log has no output tokens."""
    waiting: dict[str, tuple[int, dict[str, Any]]] = {}
    for line, content in enumerate(lines, start=1):
        if received := _RECEIVED.search(content):
            month, day, clock, request, limit, ids = received.groups()
            row = {
                "timestamp": f"2000-{month}-{day} {clock}",
                "input_tokens": _count(ids),
                "max_tokens": limit,
            }
            if request in waiting:  # as after a restart
                yield waiting.pop(request)
            waiting[request] = line, row
        elif "Received request " in content:
            yield line, BadRow("this line of a received request has a form that is not known")
        elif answered := _GENERATED.search(content):
            if answered[1] in waiting:
                at, row = waiting.pop(answered[1])
                yield at, {**row, "output_tokens": _count(answered[2]) or None}
            else:
                yield line, _UNKNOWN_ANSWER
    yield from waiting.values()


def _count(ids: str) -> int | None:
    return None if ids == "None" else ids.count(",") + 1 if ids != "[]" else 0
