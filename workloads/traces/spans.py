"""Read spans (OpenTelemetry, OpenInference) as rows, and find spans that repeat their children."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.text import counting_pairs
from ampacity.workloads.traces.recorded import Unreadable, span_messages, span_tools
from ampacity.workloads.traces.values import (
    NO_CALL,
    NO_TEXT,
    BadRow,
    NoCall,
    id_text,
    is_placeholder,
    writes_no_text,
)

_NAMES: dict[str, tuple[str, ...]] = {
    key: tuple(names)
    for key, names in json.loads(
        (Path(__file__).parents[1] / "data" / "span_attributes.json").read_text(encoding="utf-8")
    ).items()
}
_CALLS, _ANSWERS = _NAMES["call_operations"], _NAMES["answers"]
_USAGE = (_NAMES["input_tokens"], _NAMES["output_tokens"])
_USED = (*_USAGE[0], *_USAGE[1], *_ANSWERS, *_NAMES["other_used_prefixes"])
_SPAN_FIELDS = frozenset(_NAMES["span_fields"])
STEPS = _NAMES["langfuse_steps"]  # Langfuse's observation types except GENERATION
_CACHED = "gen_ai.usage.cache_read.input_tokens"
_SUMMED = (
    "rows (spans of agents, or with counts that are the sum of those below) "
    "hold calls that are rows too: they are left out"
)
_BY_TRACE = NoCall("spans have no conversation id: their trace is taken for their session")
_ALONE = "rows of agents have counts, and no call below them: each is played as one request"


def read_otlp(resources: list[Any], twice: Counter[str]) -> Iterator[Mapping[str, Any] | BadRow]:
    """Yield the rows of OTLP's ``resourceSpans``; ``twice`` counts repeated attributes."""
    for resource in resources:
        held = resource if isinstance(resource, dict) else {}
        described = held.get("resource")
        about = _attributes(
            described.get("attributes") if isinstance(described, dict) else None, twice
        )
        for scope in as_list(held.get("scopeSpans")):
            for span in as_list(scope.get("spans") if isinstance(scope, dict) else None):
                yield from read_span(span, twice, about)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and [] for anything else."""
    return value if isinstance(value, list) else []


def read_span(
    span: Any, twice: Counter[str], resource: Mapping[str, Any] | None = None
) -> Iterator[Mapping[str, Any] | BadRow]:
    """Yield one row for a span that is a model call, and NoCall for any other."""
    if not isinstance(span, dict):
        yield BadRow("this is no JSON object with one span")
        return
    held = _attributes(span.get("attributes"), twice)
    counts = [next((held[name] for name in names if name in held), None) for names in _USAGE]
    ids = _span_ids(span)
    operation = held.get("gen_ai.operation.name")
    kind = held.get("openinference.span.kind", held.get("traceloop.span.kind"))
    is_call = operation in _CALLS or str(kind).upper() == "LLM"
    no_text = writes_no_text(operation) or writes_no_text(kind)
    if no_text or (counts == [None, None] and not is_call):
        yield NoCall(NO_TEXT if no_text else NO_CALL, (), *ids.values())
        return
    about = {**_attributes(span.get("resource_attributes"), twice), **(resource or {})}
    time = "start_time" if "start_time" in span else "startTimeUnixNano"
    end = "end_time" if time == "start_time" else "endTimeUnixNano"
    named = (held.get(name) for name in ("gen_ai.conversation.id", "session.id"))
    session = next((name for name in named if not is_placeholder(name)), None)
    if session is None and (session := _trace_id(span)) is not None:
        yield _BY_TRACE
    row = {
        time: span.get(time),
        end: span.get(end),
        "gen_ai.usage.input_tokens": counts[0],
        "gen_ai.usage.output_tokens": counts[1],
        "session": session,
        "service.name": about.get("service.name"),
        **ids,
        "is_agent": not is_call and (operation or kind) is not None,
        **{
            f"attributes.{n}": value
            for n, value in held.items()
            if not n.startswith(_USED) or _contradicts(n, value, counts)
        },
        **{f"span.{name}": value for name, value in span.items() if name not in _SPAN_FIELDS},
        **_span_prompt(held),
    }
    if _CACHED in held:
        row[_CACHED] = held[_CACHED]
    yield row


def _contradicts(name: str, value: Any, counts: Sequence[Any]) -> bool:
    """Return whether an attribute counts the tokens too, and otherwise."""
    pairs = zip(_USAGE, counts, strict=True)
    return any(name in names and str(value) != str(taken) for names, taken in pairs)


def _trace_id(span: Mapping[str, Any]) -> Any:
    return span.get("trace_id") or span.get("traceId")


def _span_ids(span: Mapping[str, Any]) -> dict[str, str | None]:
    trace = _trace_id(span)
    own = span.get("span_id") or span.get("spanId")
    parent = span.get("parent_span_id") or span.get("parentSpanId")
    return {
        "span_id": None if is_placeholder(own) else f"{trace}/{own}",
        "parent_span_id": None if is_placeholder(parent) else f"{trace}/{parent}",
    }


def _span_prompt(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the span's recorded prompt, or {} where it has none."""
    messages: Any
    tools = None
    try:
        messages, tools = span_messages(held), span_tools(held.get("gen_ai.tool.definitions"))
    except ValueError as error:  # reported when the row is parsed
        messages = Unreadable(str(error))
    if not messages:
        return {}
    return {
        "messages": messages,
        "max_tokens": held.get("gen_ai.request.max_tokens"),
        "answer": next((held[name] for name in _ANSWERS if name in held), None),
        "tools": tools,
    }


def _attributes(held: Any, twice: Counter[str]) -> dict[str, Any]:
    """Return attributes as a mapping, from one or from OTLP's list of keys and typed values."""
    if isinstance(held, dict):
        return held
    pairs = (a for a in as_list(held) if isinstance(a, dict))
    named = [
        (str(pair.get("key")), _plain(pair["value"], twice))
        for pair in pairs
        if isinstance(pair.get("value"), dict) and pair["value"]
    ]
    return counting_pairs(twice)(named)


def _plain(value: Any, twice: Counter[str]) -> Any:
    """Return an OTLP typed value as a plain one; arrays and lists of pairs are converted too."""
    kind, held = next(iter(value.items())) if isinstance(value, dict) and value else ("", None)
    if kind not in ("arrayValue", "kvlistValue"):
        return held
    values = held.get("values") if isinstance(held, dict) else None
    if kind == "arrayValue":
        return [_plain(v, twice) for v in as_list(values)]
    return _attributes(values, twice)


class SpanTree:
    """The spans of a trace by their ids, including spans without token counts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._parent: dict[int, int] = {}
        self._agents: set[int] = set()  # spans that have counts and are no model call
        self.read: set[int] = set()  # spans that are rows

    def number(self, span: object, parent: object) -> int:
        """Return the number of a span; -1: it has no id."""
        if is_placeholder(span):
            return -1
        numbers = self._numbers
        found = numbers.setdefault(id_text(span), len(numbers))
        if not is_placeholder(parent):
            self._parent[found] = numbers.setdefault(id_text(parent), len(numbers))
        return found

    def add_row(self, span: int, is_agent: bool) -> None:
        """Record that a span is a row."""
        self.read.add(span)
        if is_agent:
            self._agents.add(span)

    def _ancestors(self, span: int) -> list[int]:
        """Return the spans above a span, the nearest first; [] where they form a cycle."""
        found: dict[int, None] = {}
        above = self._parent.get(span, -1)
        while above >= 0:
            if above == span or above in found:
                return []
            found[above] = None
            above = self._parent.get(above, -1)
        return list(found)

    def redundant(
        self, spans: Sequence[int], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], Counter[str]]:
        """Return (bool[n]: rows left out because their calls are rows too, rows by note).

        They are rows of agents, and rows whose counts are the sum of their nearest descendants'.
        ``spans``: the span of each row (-1: none; empty: no row has one); ``counts`` int64[n, 2].
        """
        notes, left_out = Counter[str](), np.zeros(len(counts), dtype=np.bool_)
        if not spans:
            return left_out, notes
        row_of = {span: i for i, span in enumerate(spans) if span >= 0}
        below = np.zeros_like(counts)
        for i, span in enumerate(spans):
            row = next((row_of[above] for above in self._ancestors(span) if above in row_of), None)
            if row is not None:
                below[row] += counts[i]
        agents = np.array([span in self._agents for span in spans])
        has_calls = below.any(axis=1)
        left_out = np.asarray(has_calls & (agents | (counts == below).all(axis=1)), dtype=np.bool_)
        for text, rows in ((_SUMMED, left_out), (_ALONE, agents & ~has_calls)):
            if rows.any():
                notes[text] = int(rows.sum())
        return left_out, notes
