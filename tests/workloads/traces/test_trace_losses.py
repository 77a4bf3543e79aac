"""Nothing of a trace is dropped, joined or changed in silence: each case by hand, with relatives of
its kind.
"""

import csv
import gzip
import json
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
from tests.support.traces import HEADER, lines

Row = dict[str, Any]


def written(folder: Path, *rows: Any, name: str = "t.jsonl") -> Path:
    return lines(folder / name, *rows)


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
        json.loads(r"""{"gen_ai.prompt.0.role": "assistant", "gen_ai.prompt.0.content": "",
            "gen_ai.prompt.0.tool_calls.0.name": "f",
            "gen_ai.prompt.0.tool_calls.0.arguments": "{\"city\": \"Par"}"""),
    ],
)
def test_messages_that_are_cut_off_are_none_and_counts_are_used(tmp_path: Path, held: Row) -> None:
    whole = span(1, **{"gen_ai.input.messages": WHOLE})
    found = played(written(tmp_path, span(0, **held), whole))
    assert counts(found) == [(900, 20)] * 2
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
    assert found.schedule.entry.tolist() == [-1, 0]
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
    assert [json.loads(bytes(m)) for m in found.recorded.turn(0)] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert not [note for note in found.notes if "not used" in note]


def test_a_text_that_begins_with_a_bracket_is_a_prompt(tmp_path: Path) -> None:
    texts = json.loads(r"""["[INST] Hi [/INST]", "{name} is who?",
        "{\"a\": 1,} is this JSON?", "[1] See the first note", "{\"city\": \"Paris\"}",
        "[1, 2, 3]", "{'a': 5}", "12345"]""")
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
    expected = "1 bad rows of 2 are left out: 1 for column messages"
    assert said(traced(path, skip_bad_rows=True), "bad rows") == expected


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
    expected = "1 entries have counts of tokens beside a list of requests: they are taken for their sum, and not played"
    assert said(found, "beside a list") == expected


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
    assert sorted(found.client.tolist()) == [0, 0, 1, 1]


def test_entries_with_the_same_id_are_joined_and_that_is_said(tmp_path: Path) -> None:
    found = traced(written(tmp_path, *({"id": "a", "requests": CALLS} for _ in range(3))))
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
    third = int(np.flatnonzero(s.entry == 1)[0])
    assert s.entry[s.continues[third]] == 0
    assert s.input_tokens[third] == 5 + 3 + 5  # the first text, its answer, and its own
    assert said(found, "no text") == (
        "1 of 3 requests have no text of a prompt, where others have one (line 2): made-up text of their length is "
        "sent; the turns behind them go on without them"
    )


def test_recorded_prompts_that_are_sent_again_are_said(tmp_path: Path) -> None:
    """Made-up text is new in each round; a recorded one is not."""
    made_up = {"timestamp": 0, "input_tokens": 9, "output_tokens": 3}
    path = written(tmp_path, made_up, made_up | {"messages": [{"role": "user", "content": "hi"}]})
    assert said(played(path, loops=2, as_written=True), "played 2 times") == (
        "played 2 times, 0 s each; from the second on a prefix cache holds the 1 recorded prompts"
    )
    path = written(tmp_path, made_up)
    assert said(played(path, loops=2), "played 2 times") == "played 2 times, 1 s each"


def test_a_turn_with_neither_text_nor_count_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "text_input": text, "output_length": 3}
        for text in ("One city.", "", "Another?")
    ]
    path = written(tmp_path, *rows)
    with pytest.raises(WorkloadError, match=r"t\.jsonl:2: column text_input: the value is missing"):
        traced(path)
    found = replayed(traced(path, skip_bad_rows=True), Replay(), 1)
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
    path.write_text(HEADER + f"1,5,7\n{row}\n2,5,7\n")
    with pytest.raises(WorkloadError, match=r"t\.csv:3: this is no CSV"):
        traced(path, skip_bad_rows=True)


def test_a_long_prompt_in_a_csv_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"timestamp,prompt,output_tokens\n1,{'x' * 200_000},7\n")
    assert counts(traced(path)) == [(50_000, 7)]


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
