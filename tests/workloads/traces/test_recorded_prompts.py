"""What is sent of a recording: prompts by counts, messages as they stand, answers of this run."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.loadgen.send.history import AnswerContent
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import requests_to
from tests.workloads.traces.test_recorded_sessions import drive, played, turns, written


def test_counts_alone_make_prompts_that_begin_with_the_one_before(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": "a",
            "timestamp": float(k),
            "latency_s": 0.5,
            "input_tokens": n,
            "output_tokens": 3,
        }
        for k, n in enumerate((30, 50, 20, 64))
    ]
    found = played(written(tmp_path, rows), think_scale=0.01)
    assert found.prompts == "made-up text of the recorded lengths, each turn behind the one before"
    assert any(
        "1 later turns are shorter than every turn before them" in note for note in found.notes
    )
    with FaultServer() as server:
        drive(server.url, found)
        texts = [r.body["messages"] for r in server.requests]
    said = [[m["content"].split() for m in messages] for messages in texts]
    assert [[len(words) for words in messages] for messages in said] == [[30], [50], [20], [64]]
    assert said[1][0][:30] == said[0][0]
    assert said[3][0][:50] == said[1][0]  # the longest that is no longer
    assert said[2][0][:4] != said[0][0][:4]
    assert {m["role"] for messages in texts for m in messages} == {"user"}


def test_reported_cached_tokens_are_what_is_shared(tmp_path: Path) -> None:
    """64 of the first prompt's tokens are known from elsewhere, 96 of the second's 160 are the
    first's."""
    rows = [
        {
            "session_id": s,
            "timestamp": at,
            "latency_s": 0.1,
            "input_tokens": n,
            "output_tokens": 3,
            "cached_tokens": c,
        }
        for s, at, n, c in (
            ("b", 0.0, 128, 64),
            ("a", 1.0, 128, 64),
            ("a", 2.0, 160, 96),
            ("b", 3.0, 128, 0),
        )
    ]
    s = played(written(tmp_path, rows)).schedule
    assert s.planned_cached_tokens().tolist() == [0, 64, 96, 0]


@pytest.mark.parametrize("sessions", ["none", "one each", "some"])
def test_lone_requests_share_their_reported_cached_tokens(tmp_path: Path, sessions: str) -> None:
    """The first one's come from before the log; each later one finds its own, or all before it."""
    rows = [
        {"timestamp": at, "input_tokens": 160, "output_tokens": 3, "cached_tokens": cached}
        for at, cached in enumerate((128, 64, 0, 144, 96))
    ]
    for k, row in enumerate(rows):
        if sessions == "one each" or (sessions == "some" and k == 2):
            row["session_id"] = k
    found = played(written(tmp_path, rows))
    assert found.schedule.planned_cached_tokens().tolist() == [0, 64, 0, 128, 96]
    if sessions == "none":
        assert found.prompts == "made-up text that shares as many tokens as were cached"


def test_of_two_accounts_of_what_is_shared_the_one_taken_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_tokens": 64, "output_tokens": 3, "cached_tokens": 9}
    said = "what prompts share is that of their"
    for more, first in (
        ({"hash_ids": [1, 2], "block_size": 32}, "hash_ids; counts of cached tokens are used only"),
        ({"prompt": "Hi"}, "recorded messages; counts of cached tokens are used only"),
        ({"prompt": "Hi", "hash_ids": [1]}, "recorded messages; hash_ids and counts of cached"),
    ):
        notes = " ".join(played(written(tmp_path, [row | more])).notes)
        assert f"{said} {first}" in notes
    assert said not in " ".join(played(written(tmp_path, [row])).notes)


MESSAGES = json.loads(r"""[{"role": "system", "content": "Be brief."}, {"role": "user",
    "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url",
    "image_url": {"url": "data:image/png;base64,AAAA"}}]}, {"role": "assistant",
    "content": null, "tool_calls": [{"id": "c1", "type": "function",
    "function": {"name": "look", "arguments": "{\"n\": 1.5}"}}]}, {"role": "tool",
    "tool_call_id": "c1", "content": "a cat"}]""")


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def sent(path: Path, api: Any = "chat", **how: Any) -> tuple[Replayed, list[dict[str, Any]]]:
    found = played(path, **how)
    with FaultServer() as server:
        driven = drive(server.url, found, api)
        assert [r.status for r in driven.records] == ["ok"] * len(driven.records)
        return found, [r.body for r in server.requests]


def test_an_openai_batch_is_sent_as_it_stands(tmp_path: Path) -> None:
    body = {
        "model": "gpt",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 7,
        "temperature": 0.2,
    }
    path = written(
        tmp_path,
        [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}],
    )
    found, (got,) = sent(path)
    assert (got["messages"], got["tools"], got["tool_choice"], got["max_tokens"]) == (
        MESSAGES,
        TOOLS,
        "auto",
        7,
    )
    assert got["model"] == "m"  # the run's own
    assert "temperature" not in got
    assert not found.says_arrivals
    assert found.prompts == "messages as recorded (1 of 1 requests)"
    assert any(
        "columns that are not used" in n and "body.temperature" in n and "body.model" in n
        for n in found.notes
    )
    assert any("1 rows have no count of input tokens" in n for n in found.notes)
    assert any(
        "1 rows have no count of output tokens: the request's own limit" in n for n in found.notes
    )


def test_a_litellm_log_with_its_messages_is_played_as_a_session(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "Hello"}]
    more = [*first, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Bye"}]
    rows = [
        {
            "request_id": "x",
            "session_id": "s",
            "startTime": f"2025-03-01T10:00:0{a}Z",
            "endTime": f"2025-03-01T10:00:0{b}Z",
            "prompt_tokens": n,
            "completion_tokens": 2,
            "messages": json.dumps(said),
            "response": "{}",
        }
        for a, b, n, said in ((0, 1, 8, first), (3, 4, 16, more))
    ]
    found, bodies = sent(written(tmp_path, rows), think_scale=0.05)
    assert [b["messages"] for b in bodies] == [first, more]
    assert [t[2:4] for t in turns(found)] == [([], 0.0), ([0], 0.1)]  # 2 s, a twentieth of it
    assert found.schedule.input_tokens.tolist() == [8, 16]


def test_a_langfuse_export_plays_its_generations_alone(tmp_path: Path) -> None:
    generation = {
        "id": "g1",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2025-03-01T10:00:00.000Z",
        "endTime": "2025-03-01T10:00:01.000Z",
        "input": {"messages": MESSAGES[:2]},
        "output": {"role": "assistant", "content": "A cat."},
        "usageDetails": {"input": 20, "output": 4, "total": 24},
        "modelParameters": {"max_tokens": 100},
    }
    later = {
        **generation,
        "id": "g2",
        "startTime": "2025-03-01T10:00:01.100Z",
        "endTime": "2025-03-01T10:00:02Z",
        "input": MESSAGES,
    }
    span = json.loads("""{"id": "x", "traceId": "t", "type": "SPAN", "name": "tool",
        "startTime": "2025-03-01T10:00:01.000Z"}""")
    for path in (
        written(
            tmp_path,
            [{"id": "t", "sessionId": "s", "observations": [generation, span, later]}],
            "whole.jsonl",
        ),
        written(tmp_path, [generation, span, later], "rows.jsonl"),
    ):
        found, bodies = sent(path)
        assert [b["messages"] for b in bodies] == [MESSAGES[:2], MESSAGES]
        assert [t[1:4] for t in turns(found)] == [(0, [], 0.0), (0, [0], 0.1)]
        assert found.schedule.output_tokens.tolist() == [4, 4]
        assert any("1 entries are no calls of a model" in note for note in found.notes)


def test_spans_in_each_convention_are_sent_as_openai_messages(tmp_path: Path) -> None:
    """OpenTelemetry's parts, and the numbered attributes of OpenLLMetry."""
    parts = json.loads("""[{"role": "user", "parts": [{"type": "text",
        "content": "What is this?"}]}, {"role": "assistant", "parts": [{"type": "tool_call",
        "id": "c1", "name": "look", "arguments": {"n": 1}}]}, {"role": "tool",
        "parts": [{"type": "tool_call_response", "id": "c1", "response": "a cat"}]}]""")
    wanted = json.loads(r"""[{"role": "system", "content": "Be brief."}, {"role": "user",
        "content": "What is this?"}, {"role": "assistant", "content": null,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look",
        "arguments": "{\"n\":1}"}}]}, {"role": "tool", "tool_call_id": "c1",
        "content": "a cat"}]""")
    held = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.input.messages": json.dumps(parts),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.tool.definitions": json.dumps(
            [{"type": "function", "name": "look", "parameters": {}}]
        ),
    }
    numbered = json.loads("""{"gen_ai.usage.prompt_tokens": 9,
        "gen_ai.usage.completion_tokens": 3, "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.", "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "What is this?"}""")
    spans = [
        {
            "trace_id": f"t{k}",
            "start_time": f"2026-02-25T10:00:0{k}Z",
            "end_time": f"2026-02-25T10:00:0{k}.5Z",
            "attributes": a,
        }
        for k, a in enumerate((held, numbered))
    ]
    _, bodies = sent(written(tmp_path, spans), time_scale=20.0)
    assert bodies[0]["messages"] == wanted
    expected = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert bodies[0]["tools"] == expected
    assert bodies[1]["messages"] == wanted[:2]
    assert "tools" not in bodies[1]


def test_texts_of_turns_go_on_with_the_answers_of_this_run(tmp_path: Path) -> None:
    """aiperf's text_input: what each turn adds. A text that holds the one before is sent alone."""
    rows = [
        {"session_id": s, "text_input": text, "output_length": 3, "delay": 10}
        for s, text in (
            ("a", "Name a city."),
            ("a", "And another?"),
            ("b", "One."),
            ("b", "One. Two."),
        )
    ]
    found, bodies = sent(written(tmp_path, rows), rate=50.0)
    said = sorted([m["content"] for m in b["messages"]] for b in bodies)
    assert said == json.loads("""[["Name a city."], ["Name a city.", "t0 t1 t2 ",
        "And another?"], ["One."], ["One. Two."]]""")
    s = found.schedule
    # 12 characters are 3 tokens; the second prompt has 3 + 3 of the answer + 3
    by_turn = {(int(e)): int(n) for e, n in zip(s.entry, s.input_tokens, strict=True)}
    assert by_turn == {0: 3, 1: 9, 2: 1, 3: 3}
    expected = "messages as recorded (4 of 4 requests); histories with the answers of this run"
    assert found.prompts == expected


def test_texts_that_go_on_with_an_answer_wait_for_it_even_where_calls_overlapped(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "session_id": "a",
            "start_time": at,
            "end_time": end,
            "text_input": text,
            "output_length": 3,
        }
        for at, end, text in ((0.0, 2.0, "One."), (0.5, 1.5, "Two."), (2.5, 3.0, "Three."))
    ]
    found, bodies = sent(written(tmp_path, rows), think_scale=0.1)
    assert [t[2] for t in turns(found)] == [[], [0], [1]]
    assert [m["content"] for m in bodies[2]["messages"]] == json.loads("""["One.", "t0 t1 t2 ",
        "Two.", "t0 t1 t2 ", "Three."]""")


def test_rows_whose_messages_cannot_be_read_are_made_up_and_counted(tmp_path: Path) -> None:
    rows = [
        {"timestamp": float(k), "input_tokens": 12, "output_tokens": 3, "messages": said}
        for k, said in enumerate(
            (
                [*MESSAGES[:1], {"role": "user", "content": "Hi"}],
                [{"content": "who?"}],
                [1, 2],
                None,
            )
        )
    ]
    found, bodies = sent(written(tmp_path, rows), time_scale=100.0)
    assert [len(b["messages"]) for b in bodies] == [2, 1, 1, 1]
    assert all(len(b["messages"][0]["content"].split()) == 12 for b in bodies[1:])
    expected = "messages as recorded (1 of 4 requests); made-up text of the recorded lengths"
    assert found.prompts == expected
    told = [note for note in found.notes if "cannot be read" in note]
    assert len(told) == 2
    assert all(note.startswith("t.jsonl: 1 rows have prompts that cannot be read") for note in told)


def test_half_a_character_in_a_recorded_prompt_is_mended_and_counted(tmp_path: Path) -> None:
    rows = [
        '{"timestamp": 0.0, "output_tokens": 3, "messages": [{"role": "user", "content": "a\\ud83d"}]}',
        '{"timestamp": 0.1, "output_tokens": 3, "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}',
    ]
    found, bodies = sent(written(tmp_path, rows))
    assert [b["messages"][0]["content"] for b in bodies] == ["a\ufffd", "\U0001f600"]
    assert (
        "t.jsonl: 1 prompts hold half of a character (a lone surrogate): U+FFFD is sent for it"
        in found.notes
    )


def test_messages_in_a_parquet_file_are_sent_as_they_are(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": "Hi"}], MESSAGES[2:]]
    table = pa.table(
        {
            "timestamp": [0.0, 0.1],
            "output_tokens": [3, 3],
            "session_id": ["a", None],
            "messages": [
                [{"name": None, "tool_calls": None, "tool_call_id": None, **m} for m in messages]
                for messages in said
            ],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    _, bodies = sent(tmp_path / "t.parquet")
    assert [b["messages"] for b in bodies] == said


def test_recorded_messages_are_text_for_an_api_without_messages(tmp_path: Path) -> None:
    rows = [{"timestamp": 0.0, "output_tokens": 3, "prompt": "Once upon a time"}]
    _, (body,) = sent(written(tmp_path, rows), "completions")
    assert body["prompt"] == "Once upon a time"


def test_what_the_system_says_stands_apart_where_the_api_has_it_so(tmp_path: Path) -> None:
    """Anthropic's bodies have ``system`` beside the messages; each is sent in the form of the run's
    API."""
    anthropic = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    openai = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    }
    rows = [
        {"timestamp": float(k), "output_tokens": 3, "body": body}
        for k, body in enumerate((anthropic, openai))
    ]
    found = played(written(tmp_path, rows))
    for api in ("chat", "messages"):
        requests = requests_to(api=api, file=found.recorded)
        requests.prepare(found.schedule)
        bodies = [json.loads(requests.make(i).split(b"\r\n\r\n", 1)[1]) for i in range(2)]
        wanted = anthropic if api == "messages" else openai
        assert [
            {k: v for k, v in body.items() if k in ("system", "messages")} for body in bodies
        ] == [wanted] * 2


def test_the_whole_recording_travels_to_worker_processes(tmp_path: Path) -> None:
    import pickle

    rows = [
        {
            "session_id": "a",
            "timestamp": float(k),
            "output_tokens": 3,
            "messages": MESSAGES[: k + 2],
        }
        for k in range(3)
    ]
    found = played(written(tmp_path, rows))
    assert found.recorded is not None
    again = pickle.loads(pickle.dumps(found.recorded))
    assert [json.loads(bytes(m)) for m in again.turn(2)] == MESSAGES
    assert len(again.messages) == 4  # each once, however many histories it stands in


ODD: list[Any] = [
    0,
    5,
    1000,
    -3,
    10**20,
    2.5,
    1e300,
    True,
    None,
    "a",
    "nan",
    "-",
    "",
    "Hello",
    "2026-02-25T10:00:00Z",
    "[1,2]",
    "{}",
    "\ud83d x",
    "SPAN",
    "local",
    [],
    [1],
    {},
    {"a": 1},
    [{"role": "user", "content": "x"}],
    [{"role": "user", "parts": [{"type": "text"}]}],
    {"messages": [{"content": 5}]},
    [{"input_tokens": 5, "output_tokens": 2}],
]


FIELDS: dict[str, list[Any]] = {
    "end_time": [1, 4, 10],
    "delay": [0, 100],
    "think_time": [0, 1.5],
    "latency_ms": [0, 3000],
    "hash_ids": [[], [1], [1, 2, 3]],
    "messages": [[{"role": "user", "content": "x" * n}] for n in (1, 30)],
    "text_input": ["word", "word word"],
    "cached_tokens": [0, 16, 90],
    "block_size": [16],
    "max_tokens": [4],
    "parent_session": ["a", "b"],
    "parent_chat_id": ["a"],
    "chat_id": ["a", "b"],
    "requests": [[{"t": 1, "in": 5, "out": 2}]],
    "spans": [[{"attributes": {}}]],
    "tools": [TOOLS],
    "system": ["Be brief."],
    "type": ["TOOL"],
    "hash_id_scope": ["local"],
    "body": [{"messages": MESSAGES}],
    "timing_events": [[{"timestamp": 1}, {"timestamp": 2}]],
    "attributes": [{"gen_ai.usage.input_tokens": 5}],
    "class": ["a"],
    "input_blocks64": [1],
    "blocks_shared_with_prev_turn": [0, 1],
    "scheduled_s": [0.5],
    "after": [[0]],
}


def test_whatever_stands_in_a_file_is_played_or_refused_in_one_line(tmp_path: Path) -> None:
    """Four hundred files with up to five further fields, a third of whose values are odd, and
    columns that lack."""
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        fields, lacks = (
            rng.sample(list(FIELDS), rng.randint(0, 5)),
            rng.choice(["", "timestamp", "session_id", "input_tokens"]),
        )
        rows = []
        for _ in range(rng.randint(1, 12)):
            row = {
                "session_id": rng.choice("abc"),
                "timestamp": rng.choice([0.5, 1, 2, 3.5, 9]),
                "input_tokens": rng.randint(1, 90),
                "output_tokens": rng.randint(1, 9),
            }
            row |= {
                name: rng.choice(ODD if rng.random() < 0.3 else FIELDS[name])
                for name in fields
                if rng.random() < 0.8
            }
            row.pop(lacks, None)
            rows.append(row)
        try:
            trace = read_trace(
                written(tmp_path, rows), timed=False, keep_texts=True, skip_bad_rows=seed % 4 > 0
            )
            for how in (Replay(), Replay(loops=2, keep=0.7, max_think_s=1.0)):
                found = replayed(trace, how, seed, 2.0)
                assert (
                    found.schedule.shared is None
                    or (found.schedule.shared.totals() <= found.schedule.input_tokens).all()
                )
                requests = requests_to(file=found.recorded)
                requests.prepare(found.schedule)
                for i in range(len(found.schedule)):
                    assert json.loads(requests.make(i).split(b"\r\n\r\n", 1)[1])["messages"]
                    requests.answered(i, AnswerContent())
        except WorkloadError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the file
    assert 20 < refused < 350
