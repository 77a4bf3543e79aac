"""Answers with tool calls: the next prompt repeats them with results of the planned length."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.send.history import AnswerContent, Call
from ampacity.loadgen.send.protocols import Api
from tests.loadgen.drive.test_sessions import CHAT, Prepared, session
from tests.streams.playing import END, HEAD, http_chunk, json_response, new_exchange
from tests.support.servers.http_server import model_server, stream

Json = dict[str, Any]


def heard(
    api: Api, *events: Json, body: Json | None = None, reasoning: bool = False
) -> AnswerContent:
    """What is told again of an answer in these events, or in this body."""
    ends: list[Exchange] = []
    exchange = new_exchange(api, ends.append, keep=True)
    if body is not None:
        exchange.feed(1, json_response(json.dumps(body).encode()))
    else:
        exchange.feed(1, HEAD)
        for event in events:
            exchange.feed(2, http_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        exchange.feed(3, END)
    assert ends == [exchange]
    assert (exchange.record.status, exchange.record.error) == ("ok", None)
    assert exchange.record.first_token_ns is not None
    return exchange.content(reasoning)


def delta(finish: str | None = None, **said: Any) -> Json:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def called(index: int, **call: Any) -> Json:
    function = {k: v for k, v in call.items() if k != "id"}
    return delta(tool_calls=[{"index": index, "id": call.get("id"), "function": function}])


def block_delta(index: int, **delta: Any) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


CITY = '{"city": "Ulm"}'
WEATHER = Call("a", "weather", CITY)
TOOL_USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ulm"}}
FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": CITY}
STREAMS: dict[str, tuple[Api, tuple[Json, ...], AnswerContent]] = {
    "one call, its arguments in pieces": (
        "chat",
        (
            called(0, id="a", name="weather", arguments=""),
            called(0, arguments='{"city": '),
            called(0, arguments='"Ulm"}'),
            delta("tool_calls"),
        ),
        AnswerContent("", (WEATHER,)),
    ),
    "text, then two calls at once": (
        "chat",
        (
            delta(content="Let me see."),
            called(0, id="a", name="weather", arguments=CITY),
            called(1, id="b", name="clock", arguments="{}"),
            delta("tool_calls"),
        ),
        AnswerContent("Let me see.", (WEATHER, Call("b", "clock", "{}"))),
    ),
    "Gemini: every call whole, and all are number 0": (
        "chat",
        (
            called(0, id="a", name="weather", arguments=CITY),
            called(0, id="b", name="clock", arguments=""),
            delta("tool_calls"),
        ),
        AnswerContent("", (WEATHER, Call("b", "clock", "{}"))),
    ),
    "two calls whose arguments come by turns": (
        "chat",
        (
            called(0, id="a", name="weather", arguments=""),
            called(1, id="b", name="clock", arguments=""),
            called(0, arguments='{"city": '),
            called(1, arguments="{"),
            called(0, arguments='"Ulm"}'),
            called(1, arguments="}"),
            delta("tool_calls"),
        ),
        AnswerContent("", (WEATHER, Call("b", "clock", "{}"))),
    ),
    "two whole calls without number and id": (
        "chat",
        (
            delta(tool_calls=[{"function": {"name": "weather", "arguments": CITY}}]),
            delta(tool_calls=[{"function": {"name": "clock", "arguments": "{}"}}]),
            delta("tool_calls"),
        ),
        AnswerContent("", (Call("call_0", "weather", CITY), Call("call_1", "clock", "{}"))),
    ),
    "a name in every piece": (
        "chat",
        (
            called(0, id="a", name="weather", arguments='{"city": '),
            called(0, id="a", name="weather", arguments='"Ulm"}'),
            delta("tool_calls"),
        ),
        AnswerContent("", (WEATHER,)),
    ),
    "cut off in the arguments": (
        "chat",
        (called(0, id="a", name="weather", arguments='{"city": "U'), delta("length")),
        AnswerContent("", (Call("a", "weather", '{"arguments": "{\\"city\\": \\"U"}'),)),
    ),
    "a function of before there were tools": (
        "chat",
        (
            delta(function_call={"name": "weather", "arguments": '{"city"'}),
            delta(function_call={"arguments": ': "Ulm"}'}),
            delta("function_call"),
        ),
        AnswerContent("", (Call("call_0", "weather", '{"city": "Ulm"}'),)),
    ),
    "a character in two pieces of the arguments": (
        "chat",
        (
            called(0, id="a", name="weather", arguments='{"city": "\ud83d'),
            called(0, arguments='\ude00"}'),
            delta("tool_calls"),
        ),
        AnswerContent("", (Call("a", "weather", '{"city": "\U0001f600"}'),)),
    ),
    "half of a character, escaped in the arguments and bare in the name": (
        "chat",
        (called(0, id="a", name="wea\ud83d", arguments='{"city": "\\ud83d"}'), delta("tool_calls")),
        AnswerContent("", (Call("a", "wea\ufffd", '{"city": "\\ufffd"}'),)),
    ),
    "refusal": (
        "chat",
        (delta(refusal="I will "), delta(refusal="not."), delta("stop")),
        AnswerContent("I will not."),
    ),
    "thinking alone": (
        "chat",
        (delta(reasoning_content="hm "), delta(reasoning_content="so"), delta("length")),
        AnswerContent("hm so"),
    ),
    "inline thinking alone": (
        "chat",
        (delta(content="<think>"), delta(content="hm"), delta("length")),
        AnswerContent("<think>hm"),
    ),
    "thinking and an answer": (
        "chat",
        (delta(reasoning="hm "), delta(content="Yes"), delta("stop")),
        AnswerContent("Yes"),
    ),
    "messages": (
        "messages",
        (
            block_delta(0, type="text_delta", text="Let me see."),
            {"type": "content_block_start", "index": 1, "content_block": TOOL_USE | {"input": {}}},
            block_delta(1, type="input_json_delta", partial_json='{"city": '),
            block_delta(1, type="input_json_delta", partial_json='"Ulm"}'),
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        ),
        AnswerContent("Let me see.", (WEATHER,)),
    ),
    "responses": (
        "responses",
        (
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": FUNCTION_CALL | {"id": "fc", "arguments": ""},
            },
            {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": CITY},
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
        AnswerContent("", (WEATHER,)),
    ),
}

for kind, item in (("custom_tool_call_input", "custom_tool_call"), ("mcp_call_arguments", None)):
    STREAMS[f"responses, {kind}"] = (
        "responses",
        (
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": {"type": item, "call_id": "a", "name": "weather"},
            },
            {"type": f"response.{kind}.delta", "output_index": 0, "delta": CITY},
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
        AnswerContent("", (WEATHER if item else Call("call_0", "tool", CITY),)),
    )


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_told_again_of_an_answer(name: str) -> None:
    api, events, expected = STREAMS[name]
    assert heard(api, *events) == expected


CHAT_CALL = {"id": "a", "function": {"name": "weather", "arguments": CITY}}
MESSAGE = {"content": "x", "tool_calls": [CHAT_CALL]}
BODIES: dict[Api, Json] = {
    "chat": {"choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}]},
    "messages": {
        "type": "message",
        "content": [{"type": "text", "text": "x"}, TOOL_USE],
        "stop_reason": "tool_use",
        "usage": {"output_tokens": 9},
    },
    "responses": {
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "message", "content": [{"type": "output_text", "text": "x"}]},
            FUNCTION_CALL,
        ],
        "usage": {"output_tokens": 9},
    },
}


@pytest.mark.parametrize("api", BODIES)
def test_a_body_that_is_no_stream_tells_the_same(api: Api) -> None:
    assert heard(api, body=BODIES[api]) == AnswerContent("x", (WEATHER,))


def prompts_after(api: Api, told: AnswerContent, turns: int = 3) -> list[Json]:
    """The turns' bodies if every answer is ``told``; 30 tokens first, then 5 new ones each."""
    prepared, bodies = Prepared(session(*CHAT), api), []
    for index in range(turns):
        bodies.append(prepared.body(index))
        prepared.requests.answered(index, told)
    return bodies


TWO = AnswerContent("Let me see.", (WEATHER, Call("b", "clock", "{}")))


def test_a_chat_tells_the_calls_and_a_result_for_each_id_of_the_planned_length() -> None:
    first, second, third = (body["messages"] for body in prompts_after("chat", TWO))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assistant, *results = second[len(first) :]
    assert (assistant["role"], assistant["content"]) == ("assistant", "Let me see.")
    assert [c["id"] for c in assistant["tool_calls"]] == ["a", "b"]
    assert assistant["tool_calls"][0]["function"] == CHAT_CALL["function"]
    assert [(m["role"], m["tool_call_id"]) for m in results] == [("tool", "a"), ("tool", "b")]
    assert [len(m["content"].split()) for m in results] == [2, 3]  # of 5 new tokens


def test_messages_and_responses_tell_them_in_their_own_way() -> None:
    *_, assistant, user = prompts_after("messages", TWO, 2)[1]["messages"]
    assert [b["type"] for b in assistant["content"]] == ["text", "tool_use", "tool_use"]
    assert assistant["content"][1] == TOOL_USE
    results = [(b["type"], b["tool_use_id"]) for b in user["content"]]
    assert results == [("tool_result", "a"), ("tool_result", "b")]
    assert sum(len(b["content"].split()) for b in user["content"]) == 5
    items = prompts_after("responses", TWO, 2)[1]["input"][1:]
    kinds = ["assistant", *["function_call"] * 2, *["function_call_output"] * 2]
    assert [i.get("type", i.get("role")) for i in items] == kinds
    assert [i["call_id"] for i in items[1:]] == ["a", "b", "a", "b"]


def test_halves_of_characters_are_in_no_history() -> None:
    name = "half of a character, escaped in the arguments and bare in the name"
    for api in ("chat", "messages", "responses"):
        text = json.dumps(
            prompts_after(api, heard("chat", *STREAMS[name][1]), 2)[1], ensure_ascii=False
        )
        assert "wea\ufffd" in text
        text.encode()


def test_more_calls_than_new_tokens_have_a_result_each() -> None:
    many = AnswerContent("", tuple(Call(str(k), "f", "{}") for k in range(9)))
    results = prompts_after("chat", many, 2)[1]["messages"][2:]
    assert [m["tool_call_id"] for m in results] == [str(k) for k in range(9)]
    assert all(m["content"] for m in results)


def test_a_helper_that_called_a_tool_is_told_as_text() -> None:
    assert TWO.as_text == 'Let me see.\nweather({"city": "Ulm"})\nclock({})'
    assert AnswerContent().as_text == "(no answer)"


# -- on a socket -----------------------------------------------------------------------------------


def call(text: str) -> Json:
    return called(0, id="a", name="search", arguments=json.dumps({"query": text}))


def answering(
    say: Callable[[str], Json], words: int
) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """Every answer is an event of so many words; prompts are counted in words of all messages."""

    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        messages = json.loads(handler.body)["messages"]
        counted = sum(
            len(str(m["content"] or "").split())
            + sum(len(c["function"]["arguments"].split()) for c in m.get("tool_calls") or ())
            for m in messages
        )
        usage = {"prompt_tokens": counted, "completion_tokens": words}
        events = (say(" ".join(["x"] * words)), delta("stop"), {"choices": [], "usage": usage})
        stream(handler, *(json.dumps(event).encode() for event in events))

    return answer


ONLY: dict[str, Callable[[str], Json]] = {
    # its arguments have a word more, the key
    "tool call": lambda text: call(text.removeprefix("x ")),
    "refusal": lambda text: delta(refusal=text),
    "reasoning": lambda text: delta(reasoning_content=text),
}


@pytest.mark.parametrize("words", [198, 6])
@pytest.mark.parametrize("only", ONLY)
def test_prompts_grow_as_planned_and_a_run_says_where_they_do_not(
    only: str, words: int, tmp_path: Path, ampacity: Any
) -> None:
    """Planned are 50 tokens, and each turn 198 of an answer and 30 new ones. Answers of 6 words
    make it 36 more a turn, which is far less, and is said."""
    profile = tmp_path / "agent.yaml"
    profile.write_text(
        "name: agent\nsource: test\ninput_tokens: 50\noutput_tokens: 198\n"
        "sessions: {turns: 4, user_tokens: 30, message_tokens: 0}\n"
    )
    with model_server(answering(ONLY[only], words)) as url:
        load = ("--rates", "12", "--duration", "2s", "--out", tmp_path / "run")
        assert ampacity("run", url, "--workload", profile, *load) in (0, 3)
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    lengths = {(r["turn"], r["input_tokens_planned"], r["input_tokens"]) for r in rows}
    planned = 50, 278, 506, 734
    counted = planned if words == 198 else (50, 86, 122, 158)
    assert sorted(lengths) == list(zip(range(4), planned, counted, strict=True))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    said = " ".join(w["text"] for w in summary["warnings"] if w["code"] == "inputs_off")
    assert ("shorter than planned" in said, bool(said)) == (words == 6, words == 6)
