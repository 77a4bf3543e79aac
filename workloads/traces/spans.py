"""Spans of traces: OpenTelemetry's and OpenInference's as rows, and which of them repeat what those below them say."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.traces.fields import NO_CALL, BadRow, NoCall, is_placeholder
from ampacity.workloads.traces.recorded import Unreadable, span_messages, span_tools

_CALLS = (
    "chat",
    "text_completion",
    "generate_content",
)  # OpenTelemetry's names of a call of a model
_USAGE = (  # of a span: OpenTelemetry's attributes and OpenInference's, of the input and of the output
    ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
)
_ANSWERS = (
    "gen_ai.output.messages",
    "gen_ai.output.text",
    "gen_ai.completion.0.content",
    "output.value",
)
_READ = (  # how the attributes begin of which something is taken; the others are said not to be used
    *itertools.chain.from_iterable(_USAGE),
    *_ANSWERS,
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.operation.name",
    "openinference.span.kind",
    "traceloop.span.kind",
    "gen_ai.conversation.id",
    "session.id",
    "gen_ai.input.messages",
    "input.value",
    "gen_ai.system_instructions",
    "gen_ai.prompt.",
    "gen_ai.completion.",
    "llm.input_messages.",
    "llm.output_messages.",
    "gen_ai.tool.definitions",
    "gen_ai.request.max_tokens",
)
_OF_SPAN = frozenset(
    {
        "attributes",
        "resource_attributes",
        "trace_id",
        "traceId",
        "span_id",
        "spanId",
        "parent_span_id",
        "parentSpanId",
        "start_time",
        "startTimeUnixNano",
        "end_time",
        "endTimeUnixNano",
    }
)
STEPS = (  # Langfuse's types of an observation but GENERATION
    "SPAN",
    "EVENT",
    "AGENT",
    "TOOL",
    "CHAIN",
    "RETRIEVER",
    "EVALUATOR",
    "EMBEDDING",
    "GUARDRAIL",
)
_SUMMED = "rows (spans of agents, or with counts that are the sum of those below) hold calls that are rows too: they are left out"
_ALONE = "rows of agents have counts, and no call below them: each is played as one request"


def read_otlp(resources: list[Any]) -> Iterator[Mapping[str, Any] | BadRow]:
    for resource in resources:
        held = resource if isinstance(resource, dict) else {}
        told = held.get("resource")
        about = _attributes(told.get("attributes") if isinstance(told, dict) else None)
        for scope in listed(held.get("scopeSpans")):
            for span in listed(scope.get("spans") if isinstance(scope, dict) else None):
                yield from read_span(span, about)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def read_span(
    span: Any, resource: Mapping[str, Any] | None = None
) -> Iterator[Mapping[str, Any] | BadRow]:
    """One row where the span is a call of a model; agents, tools and all else give none."""
    if not isinstance(span, dict):
        yield BadRow("this is no JSON object with one span")
        return
    held = _attributes(span.get("attributes"))
    counts = [next((held[name] for name in names if name in held), None) for names in _USAGE]
    trace = span.get("trace_id") or span.get("traceId")
    ids = {
        field: f"{trace}/{found}" if (found := span.get(snake) or span.get(camel)) else None
        for field, snake, camel in (
            ("span_id", "span_id", "spanId"),
            ("parent_span_id", "parent_span_id", "parentSpanId"),
        )
    }
    operation = held.get("gen_ai.operation.name")
    kind = held.get("openinference.span.kind", held.get("traceloop.span.kind"))
    is_call = operation in _CALLS or str(kind).upper() == "LLM"
    if (counts == [None, None] and not is_call) or "embedding" in f"{operation} {kind}".lower():
        yield NoCall(NO_CALL, (), *ids.values())
        return
    messages: Any
    tools = None
    try:
        messages, tools = span_messages(held), span_tools(held.get("gen_ai.tool.definitions"))
    except ValueError as error:  # said when the row is read
        messages = Unreadable(str(error))
    about = {**_attributes(span.get("resource_attributes")), **(resource or {})}
    time = "start_time" if "start_time" in span else "startTimeUnixNano"
    end = "end_time" if "end_time" in span else "endTimeUnixNano"
    named = (held.get(name) for name in ("gen_ai.conversation.id", "session.id"))
    row = {
        time: span.get(time),
        end: span.get(end),
        "gen_ai.usage.input_tokens": counts[0],
        "gen_ai.usage.output_tokens": counts[1],
        "session": next((name for name in named if not is_placeholder(name)), trace),
        "service.name": about.get("service.name"),
        **ids,
        "is_agent": not is_call and (operation or kind) is not None,
        **{
            f"attributes.{name}": value
            for name, value in held.items()
            if not name.startswith(_READ)
        },
        **{f"span.{name}": value for name, value in span.items() if name not in _OF_SPAN},
    }
    if messages:
        row |= {"messages": messages, "max_tokens": held.get("gen_ai.request.max_tokens")}
        row["answer"] = next((held[name] for name in _ANSWERS if name in held), None)
        row["tools"] = tools
    if "gen_ai.usage.cache_read.input_tokens" in held:
        row["gen_ai.usage.cache_read.input_tokens"] = held["gen_ai.usage.cache_read.input_tokens"]
    yield row


def _attributes(held: Any) -> dict[str, Any]:
    """Attributes as a mapping, from a mapping or from OTLP's list of keys and typed values."""
    if isinstance(held, dict):
        return held
    pairs = [
        a
        for a in listed(held)
        if isinstance(a, dict) and isinstance(a.get("value"), dict) and a["value"]
    ]
    return {str(a.get("key")): _plain(a["value"]) for a in pairs}


def _plain(value: Any) -> Any:
    """One typed value of OTLP, arrays and lists of pairs included."""
    kind, held = next(iter(value.items())) if isinstance(value, dict) and value else ("", None)
    if kind == "arrayValue":
        return [
            _plain(item) for item in listed(held.get("values") if isinstance(held, dict) else None)
        ]
    if kind == "kvlistValue":
        return _attributes(held.get("values") if isinstance(held, dict) else None)
    return held


class SpanTree:
    """The spans of a trace, with and without counts, by their ids."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._above: dict[int, int] = {}  # the span that each span is part of
        self.agents: set[int] = set()  # spans that have counts and are none of a call
        self.read: set[int] = set()  # spans that are rows

    def number(self, span: object, above: object) -> int:
        """The number of a span; -1: it has no id."""
        if is_placeholder(span):
            return -1
        numbers = self._numbers
        found = numbers.setdefault(str(span), len(numbers))
        if not is_placeholder(above):
            self._above[found] = numbers.setdefault(str(above), len(numbers))
        return found

    def _ancestors(self, span: int) -> list[int]:
        """The spans above a span, the nearest first; none where they go round in a circle."""
        found: dict[int, None] = {}
        above = self._above.get(span, -1)
        while above >= 0:
            if above == span or above in found:
                return []
            found[above] = None
            above = self._above.get(above, -1)
        return list(found)

    def parents(
        self, held: Sequence[int], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], Counter[str]]:
        """(which rows are left out because calls that are part of them are rows too, what is said of how many rows).

        They are those of agents, and those whose counts are the sum of the nearest such rows'. ``held`` has the
        number of each row's span (-1: none; empty: no row has one), ``counts`` int64[n, 2] its tokens.
        """
        told, left_out = Counter[str](), np.zeros(len(counts), dtype=np.bool_)
        if not held:
            return left_out, told
        row_of = {span: i for i, span in enumerate(held) if span >= 0}
        below = np.zeros_like(counts)
        for i, span in enumerate(held):
            row = next((row_of[above] for above in self._ancestors(span) if above in row_of), None)
            if row is not None:
                below[row] += counts[i]
        agents = np.array([span in self.agents for span in held])
        has_calls = below.any(axis=1)
        left_out = np.asarray(has_calls & (agents | (counts == below).all(axis=1)), dtype=np.bool_)
        for text, rows in ((_SUMMED, left_out), (_ALONE, agents & ~has_calls)):
            if rows.any():
                told[text] = int(rows.sum())
        return left_out, told
