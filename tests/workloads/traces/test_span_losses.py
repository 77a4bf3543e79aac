"""Spans: calls that hold calls, spans that are no calls, and what is not used of them."""

from pathlib import Path
from typing import Any

import pytest

from ampacity.workloads.errors import WorkloadError
from tests.workloads.traces.test_trace_losses import (
    CALLS,
    Row,
    counts,
    played,
    said,
    span,
    timed,
    traced,
    written,
)

LEFT_OUT = "rows (spans of agents, or with counts that are the sum of those below) hold calls that are rows too: they are left out"


def family(**agent: Any) -> list[Row]:
    """An agent with a step without counts, two calls (one below the step), and a tool."""
    return [
        span(1, parent="s0"),
        span(2, op="execute_tool", usage=None, parent="s0"),
        span(3, op=None, usage=None, parent="s0"),
        span(4, parent="s3"),
        span(0, **agent),
    ]


@pytest.mark.parametrize(
    "agent",
    [
        {"op": "invoke_agent", "usage": (1800, 40)},
        {"op": "invoke_agent", "usage": (1500, 30)},  # without what was cached, say
        {"op": None, "usage": (1800, 40), "openinference.span.kind": "AGENT"},
        {"op": None, "usage": (1800, 40), "traceloop.span.kind": "workflow"},
        {"op": "chat", "usage": (1800, 40)},  # a wrapper's span
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_parent_with_the_usage_of_its_calls_is_left_out(
    tmp_path: Path, agent: Row, reverse: bool
) -> None:
    rows = family(**agent)
    found = traced(written(tmp_path, *(rows[::-1] if reverse else rows)))
    assert counts(found) == [(900, 20)] * 2
    assert said(found, "hold calls") == f"1 {LEFT_OUT}"
    assert said(found, "no calls of a model").startswith("2 entries")


def test_agents_within_agents_are_left_out(tmp_path: Path) -> None:
    outer = span(9, op="invoke_agent", usage=(2700, 60))
    inner = [
        {**row, "parent_span_id": row["parent_span_id"] or "s9"}
        for row in family(op="invoke_agent", usage=(1800, 40))
    ]
    found = traced(written(tmp_path, *inner, span(8, parent="s9"), outer))
    assert counts(found) == [(900, 20)] * 3
    assert said(found, "hold calls").startswith("2 rows")


@pytest.mark.parametrize("parents", [["s0"], ["s1", "s0"], ["s1", "s2", "s0"], ["s1", "s1"]])
def test_spans_that_go_round_in_a_circle_are_played(tmp_path: Path, parents: list[str]) -> None:
    found = traced(written(tmp_path, *(span(k, parent=parent) for k, parent in enumerate(parents))))
    assert counts(found) == [(900, 20)] * len(parents)


def test_a_call_beside_a_call_is_played(tmp_path: Path) -> None:
    """A call that has another below it, and counts of its own; an agent of which nothing else is
    there."""
    found = traced(
        written(
            tmp_path,
            span(0, usage=(500, 9)),
            span(1, parent="s0"),
            span(2, op="invoke_agent", usage=(7, 8)),
        )
    )
    assert counts(found) == [(500, 9), (900, 20), (7, 8)]
    expected = "1 rows of agents have counts, and no call below them: each is played as one request"
    assert said(found, "no call below") == expected


@pytest.mark.parametrize("kind", ["AGENT", "CHAIN", "SPAN"])
def test_a_langfuse_agent_with_the_sum_of_its_generations_is_left_out(
    tmp_path: Path, kind: str
) -> None:
    def seen(name: str, kind: str, n: int, above: str | None) -> Row:
        return {
            "id": name,
            "traceId": "t",
            "type": kind,
            "startTime": f"2025-03-01T10:00:{n:02d}Z",
            "parentObservationId": above,
            "usageDetails": {"input": n, "output": 1},
        }

    rows = [
        seen("a", kind, 30, None),
        seen("g", "GENERATION", 10, "a"),
        seen("h", "GENERATION", 20, "a"),
    ]
    for path in (
        written(tmp_path, *rows),
        written(tmp_path, {"id": "t", "observations": rows}, name="n.jsonl"),
    ):
        found = traced(path)
        assert counts(found) == [(10, 1), (20, 1)]
        assert said(found, "hold calls") == f"1 {LEFT_OUT}"


def test_a_langsmith_chain_with_the_sum_of_its_calls_is_left_out(tmp_path: Path) -> None:
    """Runs name the one above them ``parent_run_id``; the call's messages are sent."""
    run = {"trace_id": "t", "start_time": "2026-02-25T10:00:00Z", "prompt_tokens": 9}
    chain = {**run, "id": "r0", "parent_run_id": None, "completion_tokens": 3}
    call = {**chain, "id": "r1", "parent_run_id": "r0"}
    call["inputs"] = {"messages": [[{"role": "user", "content": "hi"}]]}
    found = played(written(tmp_path, chain, call))
    assert counts(found) == [(9, 3)]
    assert said(found, "hold calls").startswith("1 rows (spans of agents, or with counts that")
    assert found.prompts == "messages as recorded (1 of 1 requests)"


def test_a_span_that_was_exported_twice_is_played_once(tmp_path: Path) -> None:
    found = traced(written(tmp_path, span(0), span(1), span(0), span(0, trace="u")))
    assert counts(found) == [(900, 20)] * 3
    assert said(found, "the same span").startswith("1 rows have the id of a span that came before")


def test_embeddings_are_no_calls_and_openinferences_counts_are_read(tmp_path: Path) -> None:
    held = {
        "llm.token_count.prompt": 11,
        "llm.token_count.completion": 4,
        "openinference.span.kind": "LLM",
    }
    found = traced(
        written(tmp_path, span(0, op="embeddings"), span(1, op=None, usage=None, **held))
    )
    assert counts(found) == [(11, 4)]
    assert said(found, "write no text").startswith("1 entries")


@pytest.mark.parametrize(
    ("more", "no_text"),
    [
        ({"call_type": "aembedding"}, True),
        ({"call_type": "arerank"}, True),
        ({"call_type": "acompletion"}, False),
        ({"url": "/v1/embeddings"}, True),
        ({"url": "https://h/v1/audio/transcriptions?x=1"}, True),
        ({"url": "https://speech.example/v1/chat/completions"}, False),
    ],
)
@pytest.mark.parametrize("tokens", [0, 7])
def test_what_writes_no_text_is_no_failed_request(
    tmp_path: Path, more: Row, tokens: int, no_text: bool
) -> None:
    row = {"startTime": "2026-01-01T00:00:00Z", "prompt_tokens": 20, "completion_tokens": 7}
    found = traced(written(tmp_path, row, row | more | {"completion_tokens": tokens}))
    assert counts(found) == [(20, 7)] * (2 if tokens and not no_text else 1)
    assert any("1 entries are calls that write no text" in n for n in found.notes) == no_text
    failed = not tokens and not no_text
    assert any("1 rows with 0 output tokens" in note for note in found.notes) == failed


def test_a_file_without_a_call_that_writes_text_is_refused_with_what_it_holds(
    tmp_path: Path,
) -> None:
    row = {"startTime": "2026-01-01T00:00:00Z", "prompt_tokens": 20, "completion_tokens": 0}
    path = written(tmp_path, row | {"call_type": "aembedding"})
    with pytest.raises(WorkloadError, match="1 entries are calls that write no text"):
        traced(path)


def test_an_attribute_that_a_span_has_twice_is_said(tmp_path: Path) -> None:
    """In the span, in its resource, and in a list of pairs within an attribute."""

    def pairs(**held: Any) -> list[Row]:
        return [{"key": k, "value": v} for k, values in held.items() for v in values]

    tokens = {f"gen_ai.usage.{side}_tokens": [{"intValue": 20}] for side in ("input", "output")}
    for key, place in (("gen_ai.usage.input_tokens", "span"), ("x", "resource"), ("x", "list")):
        more: dict[str, Any] = {"span": {}, "resource": {}, "list": {}}
        value: Row = {"intValue": 5}
        more[place] = {key: [*tokens.get(key, [value]), value]}
        attributes = {**tokens, **more["span"]}
        if more["list"]:
            attributes["y"] = [{"kvlistValue": {"values": pairs(**more["list"])}}]
        span = {"startTimeUnixNano": "1767225600000000000", "attributes": pairs(**attributes)}
        resource = {"attributes": pairs(**more["resource"])}
        spans = [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]
        found = traced(written(tmp_path, {"resourceSpans": spans}))
        assert said(found, "stands twice") == (
            f"the key {key} stands twice in an object, 1 times: the last one is taken"
        )
        assert counts(found) == [(5 if place == "span" else 20, 20)]


def test_many_other_spans_before_the_first_call(tmp_path: Path) -> None:
    others = [span(k, op=None, usage=None) for k in range(50)]
    assert counts(traced(written(tmp_path, *others, span(51)))) == [(900, 20)]


def test_spans_without_a_conversation_go_with_their_trace_and_are_counted(tmp_path: Path) -> None:
    named = [span(k, **{"gen_ai.conversation.id": name}) for k, name in ((0, "c"), (1, "None"))]
    found = traced(written(tmp_path, *named, span(2)))
    assert found.session.tolist() == [0, 1, 1]
    expected = "2 spans have no conversation id: their trace is taken for their session"
    assert said(found, "conversation") == expected
    lost = [span(k, parent="s9") for k in range(2)]
    lost[0]["span_id"] = "0" * 16
    expected = "column span_id has no value in 1 of 2 rows"
    assert expected in traced(written(tmp_path, *lost)).notes[-1]


@pytest.mark.parametrize(
    ("column", "needed"),
    [
        ("end_time", "session_id"),
        ("latency_s", "session_id"),
        ("block_size", "hash_ids"),
        ("shared_blocks", "input_blocks"),
        ("input_blocks", "shared_blocks"),
    ],
)
def test_a_column_that_needs_another_one_is_named(tmp_path: Path, column: str, needed: str) -> None:
    row = {"timestamp": 1, "input_tokens": 64, "output_tokens": 3, column: 2}
    expected = f"columns that are not used: {column}"
    assert said(traced(written(tmp_path, row)), "not used") == expected
    both = traced(written(tmp_path, row | {needed: [1] if needed == "hash_ids" else 2}))
    assert not [note for note in both.notes if "not used" in note]


def test_attributes_of_spans_that_are_not_used_are_named(tmp_path: Path) -> None:
    found = traced(written(tmp_path, span(0, **{"gen_ai.request.model": "m"}), span(1)))
    expected = "columns that are not used: attributes.gen_ai.request.model (of 1 rows)"
    assert said(found, "not used") == expected
    found = traced(written(tmp_path, {**span(0), "status": {"code": "ERROR"}, "name": "chat m"}))
    assert said(found, "not used") == "columns that are not used: span.status, span.name"


def test_fields_beside_spans_and_agents_whose_calls_failed_are_told(tmp_path: Path) -> None:
    rows = [span(0, op="invoke_agent"), span(1, usage=(9, 0), parent="s0")]
    found = traced(written(tmp_path, {"trace_id": "t", "meta": {"n": 1}, "spans": rows}))
    assert counts(found) == [(900, 20)]
    assert said(found, "not used") == "columns that are not used: meta.n beside spans (of 1 rows)"
    assert said(found, "0 output tokens").startswith("1 rows")
    assert said(found, "no call below").startswith("1 rows of agents")


def test_times_and_notes_are_of_the_rows_that_are_left(tmp_path: Path) -> None:
    """The agent's span begins a second before its calls, one beside the first of them."""
    rows = [span(0, op="invoke_agent"), span(1, parent="s0"), span(2, parent="s0")]
    beside = {**span(5, op="invoke_agent"), "start_time": rows[1]["start_time"]}
    found = traced(written(tmp_path, rows[0], *rows[1:], beside, span(6, parent="s5")))
    assert found.arrival_s.tolist() == [0, 1, 5]
    assert not [note for note in found.notes if "the very time" in note]
    blocks = timed(
        *(
            {"timestamp": t, "span_id": s, "parent_span_id": p, "hash_ids": [t]}
            for t, s, p in ((1, "a", None), (2, "b", "a"), (3, "c", None))
        )
    )
    found = traced(written(tmp_path, *blocks))
    assert (found.blocks.ids.tolist(), found.blocks.start.tolist()) == ([2, 3], [0, 1, 2])


def test_a_session_without_requests_is_counted(tmp_path: Path) -> None:
    found = traced(written(tmp_path, {"id": "z", "requests": []}, {"id": "a", "requests": CALLS}))
    assert counts(found) == [(10, 1), (20, 2)]
    assert said(found, "empty").startswith("1 entries have a list of requests that is empty")


RECEIVED = "INFO 05-10 00:00:{:02d} x: Received request {}: params: SamplingParams(max_tokens={}), prompt_token_ids: [1, 2]\n"


def test_requests_of_a_vllm_log_are_played_or_counted(tmp_path: Path) -> None:
    """An id that comes again, as after a restart; a line of another form; an answer from before the
    log began."""
    path = tmp_path / "t.log"
    path.write_text(
        RECEIVED.format(0, "a", 5)
        + RECEIVED.format(1, "a", 9)
        + "INFO Received request b: something else\n"
        "INFO Generated response c: output_token_ids: [1]\nINFO other\n"
    )
    with pytest.raises(
        WorkloadError, match=r"t\.log:3: this line of a received request has a form"
    ):
        traced(path)
    found = traced(path, skip_bad_rows=True)
    assert counts(found) == [(2, 5), (2, 9)]
    assert said(found, "the log does not hold").startswith("1 answers are to requests")
