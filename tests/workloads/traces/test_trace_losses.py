"""Nothing of a trace is dropped, joined or changed in silence: each case by hand, with relatives of
its kind.
"""

import csv
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.schedule_file import read_schedule
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces import formats, json_rows
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Trace

Row = dict[str, Any]


def written(folder: Path, *rows: Any, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return path


def traced(path: Path, **options: Any) -> Trace:
    return read_trace(path, timed=False, keep_texts=True, **options)


def played(path: Path, rate: float | None = None, **how: Any) -> Replayed:
    return replayed(traced(path), Replay(**how), 1, rate)


def said(found: Trace | Replayed, words: str) -> str:
    """The one note with these words, without the file's name."""
    (note,) = [note for note in found.notes if words in note]
    return note.partition(": ")[2]


def counts(found: Trace | Replayed) -> list[tuple[int, int]]:
    of = found.schedule if isinstance(found, Replayed) else found
    return list(zip(of.input_tokens.tolist(), of.output_tokens.tolist(), strict=True))


# --- messages that were cut off ---

WHOLE = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "tell me " * 600}]}])


def span(
    k: int = 0, *, op: str | None = "chat", usage: tuple[int, int] | None = (900, 20), **held: Any
) -> Row:
    attributes = {} if op is None else {"gen_ai.operation.name": op}
    if usage is not None:
        # type: ignore[dict-item]
        attributes |= {
            "gen_ai.usage.input_tokens": usage[0],
            "gen_ai.usage.output_tokens": usage[1],
        }
    return {
        "trace_id": held.pop("trace", "t"),
        "span_id": f"s{k}",
        "parent_span_id": held.pop("parent", None),
        "start_time": f"2026-02-25T10:00:{k:02d}Z",
        "end_time": f"2026-02-25T10:00:{k:02d}.5Z",
        "attributes": attributes | held,
    }


@pytest.mark.parametrize(
    "held",
    [
        {"gen_ai.input.messages": WHOLE[:4096]},
        {"gen_ai.input.messages": WHOLE[:200] + "..."},
        {"gen_ai.input.messages": '[{"ro'},
        {"input.value": WHOLE[:4096]},
        {"input.value": '{"messages": [{"role": "user", "content": "tell me'},
        {
            "gen_ai.input.messages": WHOLE,
            "gen_ai.system_instructions": '[{"type": "text", "content": "Be br',
        },
        {"gen_ai.input.messages": WHOLE, "gen_ai.tool.definitions": '[{"type": "function", "na'},
        {
            "gen_ai.prompt.0.role": "assistant",
            "gen_ai.prompt.0.content": "",
            "gen_ai.prompt.0.tool_calls.0.name": "f",
            "gen_ai.prompt.0.tool_calls.0.arguments": '{"city": "Par',
        },
    ],
)
def test_messages_that_are_cut_off_are_none_and_counts_are_used(tmp_path: Path, held: Row) -> None:
    whole = span(1, **{"gen_ai.input.messages": WHOLE})
    found = played(written(tmp_path, span(0, **held), whole))
    assert counts(found) == [(900, 20)] * 2
    assert found.schedule.entry is not None
    assert found.schedule.entry.tolist() == [-1, 0]
    assert said(found, "cannot be read").startswith("1 rows have prompts that cannot be read (")
    assert "cut off or damaged" in said(found, "cannot be read")


@pytest.mark.parametrize("column", ["messages", "prompt", "tools"])
def test_columns_whose_json_is_cut_off_are_no_prompt(tmp_path: Path, column: str) -> None:
    row = {"timestamp": 0, "input_tokens": 9, "output_tokens": 3}
    text = '[{"role": "user", "content": "tell m'
    cut = {**row, column: text} | (
        {"messages": [{"role": "user", "content": "hi"}]} if column == "tools" else {}
    )
    whole = {**row, "timestamp": 1, "messages": [{"role": "user", "content": "hi"}]}
    found = played(written(tmp_path, whole, cut))
    assert found.schedule.entry is not None
    assert found.schedule.entry.tolist() == [-1, 0]
    assert "cut off" in said(found, "cannot be read")


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ({"messages": "oops"}, "a text where a list of messages is due"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "a message has the unknown role 'robot'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "a content that is no list of parts",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "a content that is no list of parts"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty messages only"),
        ({"messages": [{"role": "user", "content": []}]}, "empty messages only"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": "oops"},
            "tools that are no list of objects",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [5]},
            "tools that are no list of objects",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "system": 5},
            "the role system has no content",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "system": [5]},
            "a content that is no list of parts",
        ),
    ],
)
def test_messages_of_another_shape_are_none(tmp_path: Path, held: Row, reason: str) -> None:
    row = {"timestamp": 0, "input_tokens": 9, "output_tokens": 3}
    whole = {**row, "messages": [{"from": "bard", "value": "hi"}, {"role": "ai", "content": "ho"}]}
    found = played(written(tmp_path, {**row, **held}, whole))
    assert reason in said(found, "cannot be read")
    assert found.schedule.entry is not None
    assert found.schedule.entry.tolist() == [-1, 0]
    assert found.recorded is not None
    assert [json.loads(bytes(m))["role"] for m in found.recorded.turn(0)] == [
        "assistant",
        "assistant",
    ]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_numbered_messages_of_which_one_is_missing_are_none(tmp_path: Path, missing: int) -> None:
    """As where the number of attributes is limited. Of the last one only its text is there."""
    held = {
        f"gen_ai.prompt.{k}.{name}": value
        for k in range(3)
        for name, value in (("role", "user"), ("content", "a"))
        if k != missing or (k == 2 and name == "content")
    }
    whole = {name: value for name, value in held.items() if ".0." in name}
    found = played(
        written(tmp_path, span(0, **held), span(1, **(whole or {"gen_ai.input.messages": WHOLE})))
    )
    assert said(found, "cannot be read").startswith(
        "1 rows have prompts that cannot be read (some of the numbered"
    )


@pytest.mark.parametrize("name", ["system", "instructions"])  # OpenAI's Responses have the latter
def test_what_the_system_says_is_sent_before_a_text(tmp_path: Path, name: str) -> None:
    row = {"timestamp": 0, "output_tokens": 3, name: "Be brief.", "prompt": "Hi"}
    found = played(written(tmp_path, row))
    assert found.recorded is not None
    assert [json.loads(bytes(m)) for m in found.recorded.turn(0)] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert not [note for note in found.notes if "not used" in note]


def test_a_text_that_begins_with_a_bracket_is_a_prompt(tmp_path: Path) -> None:
    texts = [
        "[INST] Hi [/INST]",
        "{name} is who?",
        '{"a": 1,} is this JSON?',
        "[1] See the first note",
        '{"city": "Paris"}',
        "[1, 2, 3]",
        "{'a': 5}",
        "12345",
    ]
    rows = [{"timestamp": k, "output_tokens": 3, "prompt": text} for k, text in enumerate(texts)]
    found = played(written(tmp_path, *rows))
    assert found.prompts == "messages as recorded (8 of 8 requests)"
    assert found.recorded is not None
    assert [json.loads(bytes(found.recorded.turn(k)[0]))["content"] for k in range(8)] == texts


def test_messages_as_python_prints_them_are_read(tmp_path: Path) -> None:
    """As pandas writes a column of lists into a CSV file."""
    made = [{"role": "system", "content": None}, {"role": "user", "content": 'It\'s "so"\n'}]
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["timestamp", "input_tokens", "output_tokens", "messages"])
        out.writerow([0, 9, 3, made[1:]])
        out.writerow([1, 9, 3, str(made[1:])[:20]])
    found = played(path)
    assert found.recorded is not None
    assert [json.loads(bytes(m)) for m in found.recorded.turn(0)] == made[1:]
    assert "cut off or damaged" in said(found, "cannot be read")


def test_of_two_columns_with_prompts_the_first_is_said_to_count(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_tokens": 9, "output_tokens": 3, "prompt": "b"}
    rows = [row | {"messages": [{"role": "user", "content": "a"}]}, row]
    found = played(written(tmp_path, *rows))
    assert found.recorded is not None
    assert [json.loads(bytes(found.recorded.turn(k)[0]))["content"] for k in (0, 1)] == ["a", "b"]
    assert said(found, "is taken for") == (
        "column messages is taken for the messages, and prompt only in rows where it has no value"
    )


def test_turns_whose_messages_begin_anew_are_counted(tmp_path: Path) -> None:
    """The third of session a has an edited history; session b has the messages of each turn."""
    a, b, c = ({"role": "user", "content": name} for name in "abc")
    rows = [
        {"session_id": s, "timestamp": k, "input_tokens": 9, "output_tokens": 3, "messages": m}
        for k, (s, m) in enumerate(
            [("a", [a]), ("a", [a, b]), ("a", [b, c]), ("b", [a]), ("b", [b])]
        )
    ]
    assert said(played(written(tmp_path, *rows)), "begin with those").startswith(
        "2 later turns have messages that do not begin with those of the turn before"
    )
    assert not [n for n in played(written(tmp_path, *rows[:2])).notes if "begin with those" in n]


def test_cut_off_messages_without_a_count_are_a_bad_row_of_their_column(tmp_path: Path) -> None:
    rows = [
        {"timestamp": k, "output_tokens": 3, "messages": text}
        for k, text in ((0, WHOLE), (1, WHOLE[:99]))
    ]
    path = written(tmp_path, *rows)
    with pytest.raises(
        WorkloadError, match=r"t\.jsonl:2: column messages: JSON that is cut off or damaged"
    ):
        traced(path)
    assert said(traced(path, skip_bad_rows=True), "bad rows") == (
        "1 bad rows of 2 are left out: 1 for column messages"
    )


def test_an_answer_that_is_cut_off_has_no_length(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_tokens": 9, "answer": WHOLE[:99]}
    assert counts(traced(written(tmp_path, {**row, "max_tokens": 50}))) == [(9, 50)]
    with pytest.raises(WorkloadError, match="column answer: the value is missing"):
        traced(written(tmp_path, row))


# --- what stands beside nested requests ---

CALLS = [{"t": k, "in": 10 * k, "out": k} for k in (1, 2)]


def test_an_entrys_own_counts_beside_its_requests_are_counted(tmp_path: Path) -> None:
    found = traced(written(tmp_path, {"id": "a", "in": 30, "out": 3, "requests": CALLS}))
    assert counts(found) == [(10, 1), (20, 2)]
    assert said(found, "beside a list") == (
        "1 entries have counts of tokens beside a list of requests: they are taken for their sum, and not played"
    )


def test_a_second_nested_list_is_counted_and_named(tmp_path: Path) -> None:
    found = traced(written(tmp_path, {"id": "a", "requests": CALLS, "retries": [*CALLS, *CALLS]}))
    assert counts(found) == [(10, 1), (20, 2)]
    assert said(found, "retries") == "4 entries of the list retries beside requests are not played"


def test_a_helpers_own_counts_and_the_fields_of_sessions_are_told(tmp_path: Path) -> None:
    helper = {"agent_id": "h", "t": 5, "in": 7, "out": 7, "mood": "x", "requests": CALLS[:1]}
    found = traced(written(tmp_path, {"id": "a", "model": "m", "requests": [*CALLS, helper]}))
    assert sorted(counts(found)) == [(10, 1), (10, 1), (20, 2)]
    assert said(found, "beside a list").startswith("1 entries have counts")
    unused = said(found, "columns that are not used")
    assert "mood beside requests (of 1 rows)" in unused
    assert "model beside requests (of 1 rows)" in unused


def test_a_sessions_client_is_that_of_its_requests(tmp_path: Path) -> None:
    found = traced(
        written(
            tmp_path,
            *({"id": n, "user": u, "requests": CALLS} for n, u in (("a", "x"), ("b", "y"))),
        )
    )
    assert found.client is not None
    assert sorted(found.client.tolist()) == [0, 0, 1, 1]


def test_entries_with_the_same_id_are_joined_and_that_is_said(tmp_path: Path) -> None:
    found = traced(written(tmp_path, *({"id": "a", "requests": CALLS} for _ in range(3))))
    assert found.session is not None
    assert set(found.session.tolist()) == {0}
    assert said(found, "one session").startswith(
        "2 entries have the session id of an earlier entry"
    )


def test_a_list_in_an_object_without_an_id_is_read_entry_by_entry(tmp_path: Path) -> None:
    """As an API gives it by pages."""
    found = traced(
        written(tmp_path, {"object": "list", "data": timed({"timestamp": 1}, {"timestamp": 2})})
    )
    assert counts(found) == [(9, 3)] * 2
    assert found.session is None
    assert said(found, "not used") == "columns that are not used: object beside data (of 1 rows)"
    page = {
        "data": [{"id": "a", "requests": CALLS}, {"id": "b", "requests": CALLS}],
        "meta": {"page": 1},
    }
    found = traced(written(tmp_path, page))
    assert found.session is not None
    assert sorted(found.session.tolist()) == [0, 0, 1, 1]
    assert "meta.page beside data" in said(found, "not used")


# --- turns without a text ---


@pytest.mark.parametrize(
    "lacks", [{}, {"text_input": ""}, {"text_input": None}, {"text_input": " "}, {"messages": []}]
)
def test_one_turn_without_a_text_leaves_the_others_their_history(
    tmp_path: Path, lacks: Row
) -> None:
    texts: list[Row] = [{"text_input": "Name a city."}, lacks, {"text_input": "And another?"}]
    rows = [
        {"session_id": "a", "input_length": 5, "output_length": 3, "delay": 10, **text}
        for text in texts
    ]
    found = played(written(tmp_path, *rows))
    s = found.schedule
    assert s.continues is not None
    assert s.entry is not None
    third = int(np.flatnonzero(s.entry == 1)[0])
    assert s.entry[s.continues[third]] == 0
    assert s.input_tokens[third] == 5 + 3 + 5  # the first text, its answer, and its own
    assert said(found, "no text") == (
        "1 of 3 requests have no text of a prompt, where others have one (line 2): made-up text of their length is "
        "sent; the turns behind them go on without them"
    )


def test_a_turn_with_neither_text_nor_count_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "text_input": text, "output_length": 3}
        for text in ("One city.", "", "Another?")
    ]
    path = written(tmp_path, *rows)
    with pytest.raises(WorkloadError, match=r"t\.jsonl:2: column text_input: the value is missing"):
        traced(path)
    found = replayed(traced(path, skip_bad_rows=True), Replay(), 1)
    assert found.schedule.continues is not None
    assert found.schedule.continues.tolist() == [-1, 0]


def test_a_lone_row_without_messages_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_tokens": 9, "output_tokens": 3}
    full = {**row, "messages": [{"role": "user", "content": "hi"}]}
    found = played(written(tmp_path, full, row, full))
    assert said(found, "no text").startswith(
        "1 of 3 requests have no text of a prompt, where others have one (line 2)"
    )
    assert not [note for note in played(written(tmp_path, row, row)).notes if "no text" in note]


# --- lines and documents without an end ---


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.csv", "t.csv.gz", "t.log"])
def test_a_line_without_an_end_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(formats, "LINE_MAX", 1000)
    data = b"timestamp,input_tokens,output_tokens\n" if "csv" in name else b'{"timestamp": 1}\n'
    data += b"x" * 5000
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(WorkloadError, match=rf"{name}:2: this line has more than 1,000 characters"):
        traced(tmp_path / name, skip_bad_rows=True)


def test_a_line_as_long_as_may_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.dumps({"timestamp": 1, "input_tokens": 5, "output_tokens": 7}) + "\n"
    monkeypatch.setattr(formats, "LINE_MAX", len(row))
    path = tmp_path / "t.jsonl"
    path.write_text(row + row)
    assert len(traced(path)) == 2


def test_a_document_that_is_too_large_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "DOCUMENT_MAX", 50)
    rows = [{"timestamp": 1, "input_tokens": 5, "output_tokens": 7}] * 5
    path = tmp_path / "t.json"
    path.write_text(json.dumps(rows, indent=1))
    with pytest.raises(
        WorkloadError, match=r"t\.json: this JSON document has 50 characters or more: write it as"
    ):
        traced(path)


def test_what_does_not_fit_into_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(json_rows, "_flat", full)
    with pytest.raises(WorkloadError, match="does not fit into this machine's memory"):
        traced(written(tmp_path, {"timestamp": 1, "input_tokens": 5, "output_tokens": 7}))


@pytest.mark.parametrize("row", ['1,"5,7', '1,"5"x,7'])
def test_a_quote_without_an_end_is_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"timestamp,input_tokens,output_tokens\n1,5,7\n{row}\n2,5,7\n")
    with pytest.raises(WorkloadError, match=r"t\.csv:3: this is no CSV"):
        traced(path, skip_bad_rows=True)


def test_a_long_prompt_in_a_csv_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"timestamp,prompt,output_tokens\n1,{'x' * 200_000},7\n")
    assert counts(traced(path)) == [(50_000, 7)]


# --- spans with the usage of those below ---

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
    there.
    """
    found = traced(
        written(
            tmp_path,
            span(0, usage=(500, 9)),
            span(1, parent="s0"),
            span(2, op="invoke_agent", usage=(7, 8)),
        )
    )
    assert counts(found) == [(500, 9), (900, 20), (7, 8)]
    assert (
        said(found, "no call below")
        == "1 rows of agents have counts, and no call below them: each is played as one request"
    )


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
    assert said(found, "no calls of a model").startswith("1 entries")


def test_many_other_spans_before_the_first_call(tmp_path: Path) -> None:
    others = [span(k, op=None, usage=None) for k in range(50)]
    assert counts(traced(written(tmp_path, *others, span(51)))) == [(900, 20)]


def test_spans_without_a_conversation_go_with_their_trace_and_are_counted(tmp_path: Path) -> None:
    named = [span(k, **{"gen_ai.conversation.id": name}) for k, name in ((0, "c"), (1, "None"))]
    found = traced(written(tmp_path, *named, span(2)))
    assert found.session is not None
    assert found.session.tolist() == [0, 1, 1]
    assert said(found, "conversation") == (
        "2 spans have no conversation id: their trace is taken for their session"
    )
    lost = [span(k, parent="s9") for k in range(2)]
    lost[0]["span_id"] = "0" * 16
    assert (
        "column span_id has no value in 1 of 2 rows" in traced(written(tmp_path, *lost)).notes[-1]
    )


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
    assert said(traced(written(tmp_path, row)), "not used") == (
        f"columns that are not used: {column}"
    )
    both = traced(written(tmp_path, row | {needed: [1] if needed == "hash_ids" else 2}))
    assert not [note for note in both.notes if "not used" in note]


def test_attributes_of_spans_that_are_not_used_are_named(tmp_path: Path) -> None:
    found = traced(written(tmp_path, span(0, **{"gen_ai.request.model": "m"}), span(1)))
    assert (
        said(found, "not used")
        == "columns that are not used: attributes.gen_ai.request.model (of 1 rows)"
    )
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
    assert found.blocks is not None
    assert (found.blocks.ids.tolist(), found.blocks.start.tolist()) == ([2, 3], [0, 1, 2])


def test_a_session_without_requests_is_counted(tmp_path: Path) -> None:
    found = traced(written(tmp_path, {"id": "z", "requests": []}, {"id": "a", "requests": CALLS}))
    assert counts(found) == [(10, 1), (20, 2)]
    assert said(found, "empty").startswith("1 entries have a list of requests that is empty")


RECEIVED = "INFO 05-10 00:00:{:02d} x: Received request {}: params: SamplingParams(max_tokens={}), prompt_token_ids: [1, 2]\n"


def test_requests_of_a_vllm_log_are_played_or_counted(tmp_path: Path) -> None:
    """An id that comes again, as after a restart; a line of another form; an answer from before the
    log began.
    """
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


# --- schedules ---


def scheduled(**more: Any) -> Row:
    return {"scheduled_s": 0.0, "input_tokens": 5, "output_tokens": 3, **more}


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (
            [scheduled(scheduled_s=1.0), scheduled(scheduled_s=0.5)],
            "not in the order of their times",
        ),
        ([scheduled(scheduled_s=-1.0)], "scheduled at -1 s, before the stage begins"),
        ([scheduled(continues=5)], "waits for one that stands behind it"),
        ([scheduled(shared=[[1, 3], [2, 3]])], "shares more tokens than its prompt has"),
    ],
)
def test_a_schedule_that_cannot_be_played_as_written_is_refused(
    tmp_path: Path, rows: list[Row], complaint: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"t\.jsonl: .*{complaint}"):
        read_schedule(written(tmp_path, *rows))


def test_columns_of_a_schedule_that_are_not_used_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, scheduled(), scheduled(scheduled_s=1.0, session_id="a", messages=[]))
    assert read_schedule(path, time_scale=2.0).notes == (
        "t.jsonl: columns that are not used: session_id (of 1 rows), messages (of 1 rows)",
        "t.jsonl: arrivals are played 2 times as fast as written (--time-scale): those over 1 s come within 0.5 s",
    )


# --- notes ---


def timed(*rows: Row) -> list[Row]:
    return [{"input_tokens": 9, "output_tokens": 3, **row} for row in rows]


def test_sessions_out_of_order_are_sorted_and_that_is_said(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"session_id": s, "timestamp": t}
            for s, t in (("a", 2), ("b", 1), ("a", 1), ("b", 5), ("a", 3))
        )
    )
    found = traced(written(tmp_path, *rows))
    assert said(found, "sorted") == (
        "the rows of their session are not in the order of time (1 come before the row above them); they are sorted"
    )
    grouped = timed(
        *({"session_id": s, "timestamp": t} for s, t in (("a", 2), ("a", 3), ("b", 1), ("b", 5)))
    )
    assert not [note for note in traced(written(tmp_path, *grouped)).notes if "sorted" in note]


@pytest.mark.parametrize(
    ("odd", "words", "same"),
    [
        ("x7", "members that are texts", True),
        (-4, "members that are negative numbers", True),
        (7.0, "members that are no whole numbers", True),
        (7.5, "members that are no whole numbers", False),
        (float("nan"), "members that are no whole numbers", False),
        (float("inf"), "members that are no whole numbers", False),
        (None, "members that are none", False),
        ([7], "members that are none", False),
        ({"id": 7}, "members that are none", False),
        (True, "members that are none", False),
        ("", "members that are none", False),
    ],
)
def test_odd_members_of_hash_ids_are_told(tmp_path: Path, odd: Any, words: str, same: bool) -> None:
    rows = timed(*({"timestamp": t, "hash_ids": [1, odd, 3]} for t in (1, 2)))
    found = traced(written(tmp_path, *rows))
    note = said(found, words)
    assert note.startswith("2 rows have hash_ids with")
    assert "(first line 1: " in note
    assert found.blocks is not None
    first, second = found.blocks.ids.reshape(2, 3).tolist()
    assert (first[0], first[2]) == (second[0], second[2]) == (1, 3)
    assert (first[1] == second[1]) is same
    if odd == 7.0:
        assert first[1] == 7


def test_ids_in_a_csv_file_are_read_as_in_json(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'timestamp,input_tokens,output_tokens,hash_ids\n1,5,7,"[1, -2]"\n2,5,7,"[1, 2"\n'
    )
    found = traced(path)
    assert found.blocks is not None
    assert found.blocks.start.tolist() == [0, 2, 2]
    assert said(found, "negative").startswith("1 rows")
    assert said(found, "no list").startswith("1 rows")


def test_more_cached_tokens_than_tokens_and_ids_that_are_lists_are_told(tmp_path: Path) -> None:
    found = traced(
        written(tmp_path, *timed({"timestamp": 1, "cached_tokens": 10, "session_id": ["a"]}))
    )
    assert said(found, "cached").startswith("1 rows have more cached_tokens than tokens")
    assert said(found, "which is none").startswith("1 rows have the session_id ['a']")


def test_a_chat_id_that_comes_again_is_told(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"timestamp": k, "chat_id": c, "parent_chat_id": p}
            for k, (c, p) in enumerate([(1, -1), (2, 1), (2, 1)])
        )
    )
    found = traced(written(tmp_path, *rows))
    assert said(found, "one conversation").startswith("1 rows have the id of an earlier chat")
    assert not [
        note for note in traced(written(tmp_path, *rows[:2])).notes if "one conversation" in note
    ]


def test_block_sizes_that_differ_and_callers_that_lack_are_told(tmp_path: Path) -> None:
    rows = timed(
        *(
            {"timestamp": k, "hash_ids": [1], "block_size": size}
            for k, size in enumerate((16, 16, 32))
        )
    )
    assert said(traced(written(tmp_path, *rows)), "several values") == (
        "column block_size has several values (16 (2 rows), 32 (1 rows)): the first is taken for all"
    )
    rows = timed(
        *(
            {"timestamp": k, "session_id": s, "parent_session": p}
            for k, (s, p) in enumerate([("a", ""), ("b", "z"), ("c", "a")])
        )
    )
    assert (
        said(traced(written(tmp_path, *rows)), "no row before")
        == "1 rows name a parent_session that no row before them has"
    )


def test_pauses_of_lone_requests_and_lengths_of_answers_are_told(tmp_path: Path) -> None:
    rows = timed(*({"timestamp": k, "delay": 5} for k in (1, 2)))
    assert said(played(written(tmp_path, *rows)), "a pause") == (
        "2 requests without a session have a pause before them, which is not played"
    )
    found = traced(written(tmp_path, {"timestamp": 1, "input_tokens": 5, "response": "a" * 40}))
    assert counts(found) == [(5, 10)]
    assert said(found, "recorded answer").startswith(
        "1 rows have no count of output tokens: of the recorded answer a token"
    )


def test_ids_of_hashes_and_numbers_in_texts_are_ids(tmp_path: Path) -> None:
    found = traced(
        written(
            tmp_path,
            *timed(
                {"timestamp": 1, "hash_ids": [5, 2**63]}, {"timestamp": 2, "hash_ids": ["5", 2**63]}
            ),
        )
    )
    assert found.blocks is not None
    assert found.blocks.ids[:2].tolist() == found.blocks.ids[2:].tolist()
    assert said(found, "texts").startswith("1 rows")


@pytest.mark.parametrize(
    "column",
    [
        "cached_tokens",
        "duration_s",
        "latency_ms",
        "end_time",
        "think_time_s",
        "max_tokens",
        "delay",
    ],
)
def test_a_bad_value_names_its_column(tmp_path: Path, column: str) -> None:
    row = {"session_id": "a", "timestamp": 1, "input_tokens": 9, "output_tokens": 3, column: "soon"}
    if column == "max_tokens":
        del row["output_tokens"]
    with pytest.raises(WorkloadError, match=rf"t\.jsonl:1: column {column}: 'soon'"):
        traced(written(tmp_path, row))


def test_a_column_without_a_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",timestamp,input_tokens,output_tokens\n0,1,5,7\n")
    assert said(traced(path), "not used") == "columns that are not used: (without a name)"
    found = traced(written(tmp_path, *timed({"timestamp": 1, "": 3, " ": 4})))
    assert (
        said(found, "not used") == "columns that are not used: (without a name), (without a name)"
    )


# --- what is changed ---

SESSION = timed(*({"session_id": "a", "timestamp": t, "latency_s": 1} for t in (0, 5, 30)))


def test_a_change_of_speed_is_said_with_its_size(tmp_path: Path) -> None:
    path = written(tmp_path, *SESSION)  # pauses of 4 s and of 24 s
    assert said(played(path, time_scale=4.0), "--time-scale") == (
        "arrivals, and pauses within sessions, are played 4 times as fast as recorded (--time-scale): arrivals over 30 s "
        "come within 7.5 s"
    )
    both = played(path, time_scale=4.0, think_scale=0.5, max_think_s=10.0)
    assert said(both, "--time-scale").startswith("arrivals are played 4 times as fast as recorded")
    assert said(both, "--think-scale") == (
        "2 pauses within sessions are 0.5 times as long as recorded (--think-scale): 14 s in all, not 28 s"
    )
    assert said(both, "--max-think") == (
        "1 pauses within sessions are cut to 10 s (--max-think): the longest was 12 s, all of them are 2 s shorter"
    )
    assert not [note for note in played(path).notes if "--" in note]


def test_columns_block_sizes_and_rates_that_were_given_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, *timed({"timestamp": 1, "hash_ids": [1], "other": 3}))
    assert (
        said(played(path, block_tokens=16), "--block-size")
        == "hash_ids: blocks of 16 tokens are taken (--block-size)"
    )
    found = traced(path, columns={"output": "other"})
    assert said(found, "--column") == "columns are taken as given: output=other (--column)"
    rows = [{"session_id": "a", "input_tokens": 9, "output_tokens": 3}]
    assert said(played(written(tmp_path, *rows), rate=2.0), "Poisson") == (
        "sessions begin at random (Poisson), at 2 requests/s: the file has no arrivals"
    )


# --- the accounts ---

ODD = [None, "", -1, 0, 1.5, "x", True, [], [5], {}, {"a": 1}, "nan", 10**12, WHOLE[:50], "1,234"]
COUNTED = re.compile(
    r"^t\.jsonl: (\d+) (?:bad rows of|rows with 0 output tokens|entries are no calls|rows have the id of a span|rows \(spans)"
)


def entry(rng: random.Random, k: int) -> tuple[Row, int]:
    """(a row, a span, or a session with its calls; how many requests, or what is no request, stand
    in it).
    """
    kind = rng.choice(["row", "row", "span", "agent", "other", "session"])
    if kind in ("span", "agent", "other"):
        op, usage = (
            {"span": "chat", "agent": "invoke_agent", "other": "execute_tool"}[kind],
            (rng.choice([5, 9]), 3),
        )
        return span(
            k % 60, op=op, usage=None if kind == "other" else usage, parent=f"s{rng.randint(0, 60)}"
        ), 1
    made = [
        {
            "timestamp": f"2026-02-25T10:00:{(k + j) % 60:02d}Z",
            "input_tokens": rng.choice([5, 9]),
            "output_tokens": 3,
            "session_id": rng.choice(["a", "b", "-"]),
            "messages": [{"role": "user", "content": "hi"}],
            "latency_s": 1,
            "cached_tokens": 2,
        }
        for j in range(1 if kind == "row" else rng.randint(1, 3))
    ]
    for row in made:
        for name in rng.sample(list(row), rng.choice([0, 0, 1, 2])):
            if rng.random() < 0.5:
                row[name] = rng.choice(ODD)
            else:
                del row[name]
    return ({"id": f"n{k}", "requests": made} if kind == "session" else made[0]), len(made)


def test_whatever_stands_in_a_file_each_entry_is_played_or_counted(tmp_path: Path) -> None:
    """Three hundred files of rows, spans and sessions, with fields that lack or are odd: the sums
    agree.
    """
    read = 0
    for seed in range(300):
        rng = random.Random(seed)
        made = [entry(rng, k) for k in range(rng.randint(3, 12))]
        path = written(tmp_path, *(row for row, _ in made))
        try:
            found = replayed(traced(path, skip_bad_rows=True), Replay(), 1, 2.0)
        except WorkloadError as error:
            assert re.search(r"no column|no rows|nothing is left|every row", str(error))  # noqa: PT017
            continue
        read += 1
        counted = [int(told[1]) for note in found.notes if (told := COUNTED.match(note))]
        assert len(found.schedule) + sum(counted) == sum(n for _, n in made), seed
    assert read > 150


def said_of(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return " ".join(read_trace(path, keep_texts=True).notes)


@pytest.mark.parametrize(
    ("content", "counted", "far"),
    [
        ("hi", 5_000, True),  # redacted
        ("word " * 2_000 + "(truncated 90000 characters)", 25_000, True),  # 2,500 tokens are left
        ("word " * 2_000, 9, True),
        ("\u5b57" * 4_000, 4_000, False),  # a token a character
        ("word " * 2_000, 2_000, False),
        ("hi", 60, False),  # a template's tokens
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], 5_000, False),
    ],
)
def test_a_text_that_its_count_contradicts_is_said(
    tmp_path: Path, content: Any, counted: int, far: bool
) -> None:
    row = {"timestamp": 1, "input_tokens": counted, "output_tokens": 7}
    notes = said_of(tmp_path, row | {"messages": [{"role": "user", "content": content}]})
    assert ("1 rows have a text that is 5 times shorter or longer than its count" in notes) == far


def test_a_count_that_another_attribute_contradicts_is_said(tmp_path: Path) -> None:
    counts = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 7}
    for more, said in (
        ({"gen_ai.usage.prompt_tokens": 99}, True),
        ({"gen_ai.usage.completion_tokens": 8}, True),
        ({"gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 7}, False),
    ):
        span = {"start_time": "2024-05-10T00:00:00Z", "attributes": counts | more}
        notes = said_of(tmp_path, span | {"span_id": "a", "trace_id": "b"})
        assert (f"not used: attributes.{next(iter(more))}" in notes) == said


@pytest.mark.parametrize(
    ("inputs", "more", "said"),
    [
        ([5, 12, 19], {}, 0),  # each holds the prompt before and its answer of 7
        ([5, 11, 19], {}, 1),
        ([5, 6, 7], {}, 2),  # as of an id that all requests of a client have
        ([50, 9, 60], {}, 0),  # begins anew, which is said by itself
        ([5, 6, 7], {"cached_tokens": 0}, 0),  # the file tells what they share
    ],
)
def test_turns_that_cannot_hold_the_one_before_are_counted(
    tmp_path: Path, inputs: list[int], more: dict[str, Any], said: int
) -> None:
    path = tmp_path / "t.jsonl"
    rows = (
        {"timestamp": i, "input_tokens": n, "output_tokens": 7, "session_id": "a"} | more
        for i, n in enumerate(inputs)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = " ".join(replayed(read_trace(path), Replay(), 1).notes)
    assert (f"{said} later turns are too short to hold" in notes) == bool(said)
    assert ("too short to hold" in notes) == bool(said)


@pytest.mark.parametrize("unit", ["CHARACTERS", "SECONDS", "IMAGES"])
def test_counts_in_another_unit_than_tokens_are_bad_rows(tmp_path: Path, unit: str) -> None:
    row = {"timestamp": 1, "usage": {"input": 500, "output": 70, "unit": "TOKENS"}}
    assert "unit" not in said_of(tmp_path, row)
    with pytest.raises(WorkloadError, match=f"usage.unit: the counts are '{unit}', not tokens"):
        said_of(tmp_path, row | {"usage": row["usage"] | {"unit": unit}})  # type: ignore[operator]
