"""Inline thinking: the first answer token is the first one after it, however the text is cut."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ampacity.loadgen.probe.diagnosis import diagnose
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.thinking import TAGS, InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import Api, RequestShape
from tests.streams.playing import HEAD, MS, http_chunk, json_response, new_exchange

pytestmark = pytest.mark.usefixtures("hot_path_either_way")
Write = Callable[[str], Any]


def chat(text: str) -> Any:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def counted(text: str, at: list[int]) -> Any:
    at[0] += 1
    usage = {"prompt_tokens": 5, "completion_tokens": at[0], "total_tokens": 5 + at[0]}
    return {**chat(text), "usage": usage}


FORMS: dict[str, tuple[Api, Callable[[], Write], Any]] = {
    "chat": ("chat", lambda: chat, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
    "with running totals": (
        "chat",
        lambda: partial(counted, at=[0]),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ),
    "completions": (
        "completions",
        lambda: lambda t: {"choices": [{"text": t, "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
    ),
    "responses": (
        "responses",
        lambda: lambda t: {"type": "response.output_text.delta", "delta": t},
        {"type": "response.completed", "response": {"status": "completed"}},
    ),
    "messages": (
        "messages",
        lambda: (
            lambda t: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": t}}
        ),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ),
}


def event(value: Any) -> bytes:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return http_chunk(b"data: " + data.encode() + b"\n\n")


def play(
    api: Api,
    events: list[Any],
    end: Any,
    *,
    listen: bool = False,
    watch: bool = False,
    until: str | None = None,
    bytewise: bool = False,
) -> Exchange:
    """An event every millisecond, the first at 1 ms."""
    ends: list[Exchange] = []
    record = RequestRecord(0, 0, 0, "unfinished", started_ns=0)
    answer: Callable[[], Answer] = partial(ANSWERS[api], until)
    exchange = Exchange(record, b"", ends.append, answer)
    if listen:
        exchange.keep_text()
    if watch:
        exchange.watch()
    exchange.feed(0, HEAD)
    for ms, data in enumerate([*map(event, [*events, end]), b"0\r\n\r\n"], 1):
        for part in [data[i : i + 1] for i in range(len(data))] if bytewise else [data]:
            exchange.feed(ms * MS, part)
    assert ends == [exchange]
    assert (record.status, record.error) == ("ok", None)
    return exchange


THOUGHTS: dict[str, tuple[str, int | None, str]] = {
    # name: (texts, separated by "¦" or else "|"; number of the first of the answer; its text)
    "think": ("<think>| hm| so| hm|</think>|\n\n|Yes| of| course", 6, "Yes of course"),
    "Mistral": ("[THINK]|a|b|c|[/THINK]|Yes|!|!", 5, "Yes!!"),
    "no opening tag": ("hm| so| hm| so|</think>|\n\n|Yes| of", 6, "Yes of"),
    "no opening tag, Mistral": ("hm| so| hm|[/THINK]|Yes|.", 4, "Yes."),
    "it never ends": ("<think>| hm| so| hm| so| hm", None, ""),
    "tags in pieces": ("<|th|ink|>|a|b|c|</|think|>|\n|Yes|.", 11, "Yes."),
    "several tokens in a chunk": (
        "<think>\na b| c d| e f</think>\n\nYes| of| course",
        2,
        "\n\nYes of course",
    ),
    "blank before it": ("\n| |<think>|a|b|</think>|Yes|.", 6, "Yes."),
    "a blank behind it": ("<think>|a| |b|</think>| | | |Yes| ", 8, "Yes "),
    "no thinking": ("Yes| of| course|.| >| ]", 0, "Yes of course. > ]"),
    "a sign that opens no tag": ("<|b|>|Yes|</|b|>", 0, "<b>Yes</b>"),
    "an answer about tags": (
        "Write| <think>| and| then| </think>| behind",
        0,
        "Write <think> and then </think> behind",
    ),
    "tags in the answer behind it": ("<think>|a|</think>|Say| </think>|.", 3, "Say </think>."),
    "harmony in pieces": (
        "<|channel|>¦analysis¦<|message|>¦a¦b¦<|end|>¦<|start|>¦assistant"
        "¦<|channel|>¦final¦<|message|>¦Yes¦.",
        11,
        "Yes.",
    ),
    "harmony, cut while it thinks": ("<|channel|>¦analysis¦<|message|>¦a¦b¦<|end|>", None, ""),
    "harmony, opened by the template": (
        "hm¦<|end|><|start|>assistant<|channel|>final<|message|>¦Yes¦.",
        2,
        "Yes.",
    ),
    "Gemma 4 in pieces": ("<|channel>¦thought¦\n¦a¦b¦<channel|>¦\n¦Yes¦.", 7, "Yes."),
    "Granite": ("Here| is| my| thought| process:|a| b|Here is| my response:|Yes|.", 9, "Yes."),
    "an answer that begins as Granite": (
        "Here| is| my| list|: a|. Here is my response:| b",
        0,
        "Here is my list: a. Here is my response: b",
    ),
    "it thinks twice": ("<think>|a|</think>|\n|<think>|b|</think>|Yes|.", 7, "Yes."),
    "twice, tags in pieces": ("<think>|a|</think><|think|>b|</th|ink>|\n|Yes|.", 8, "Yes."),
    "twice, the first opened by the template": (
        "hm| so|</think>|<think>|b|</think>|Yes|.",
        6,
        "Yes.",
    ),
    "it thinks again and never ends": ("<think>|a|</think>|<think>|b", None, ""),
    "OpenThinker": (
        "<|begin_of_thought|>¦a¦<|end_of_thought|>¦\n¦<|begin_of_solution|>¦Yes",
        4,
        "<|begin_of_solution|>Yes",
    ),
    "nothing thought": ("<think>|\n\n|</think>|\n\n|Yes", 4, "Yes"),
    **{opening: (f"{opening}¦a¦b¦c¦{closing}¦Yes", 5, "Yes") for opening, closing in TAGS},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", THOUGHTS)
def test_the_first_answer_token_is_behind_the_thinking(name: str, form: str) -> None:
    joined, first, told = THOUGHTS[name]
    texts = joined.split("¦" if "¦" in joined else "|")
    api, new_writer, end = FORMS[form]
    for how in ({}, {"listen": True}, {"watch": True}, {"listen": True, "bytewise": True}):
        write = new_writer()
        exchange = play(api, [write(text) for text in texts], end, **how)
        record = exchange.record
        assert record.first_token_ns == MS
        assert record.first_answer_ns == (None if first is None else (first + 1) * MS), how
        assert list(record.chunk_at_us) == [1000 * k for k in range(1, len(texts) + 1)]
        if form == "with running totals":
            assert record.output_tokens == len(texts)
            assert record.chunk_tokens == [1] * len(texts)
        if "listen" in how:
            assert exchange.text() == told


@pytest.mark.parametrize("form", FORMS)
def test_a_closing_tag_in_pieces_with_no_opening_one_is_seen_by_the_probe_and_then_by_the_run(
    form: str,
) -> None:
    api, new_writer, end = FORMS[form]
    texts = ["hm", " so", " hm", "</", "think", ">", "\n\n", "Yes", "."]

    def events(texts: list[str]) -> list[Any]:
        write = new_writer()
        return [write(text) for text in texts]

    probed = play(api, events(texts), end, watch=True)
    assert probed.thought == InlineThinking("</think>", opened=False)
    assert probed.record.first_answer_ns == 8 * MS
    assert probed.thought is not None
    for listen in (False, True):
        run = play(api, events(texts), end, until=probed.thought.closing, listen=listen)
        assert run.record.first_answer_ns == 8 * MS
        # an answer that is cut before the tag has no first answer
        cut = play(api, events(texts[:3]), end, until=probed.thought.closing, listen=listen)
        assert (cut.record.first_token_ns, cut.record.first_answer_ns) == (MS, None)
        assert cut.text() == ""


def test_harmony_without_its_special_tokens_is_seen_by_the_probe_and_then_by_the_run() -> None:
    api, new_writer, end = FORMS["chat"]
    events = [
        new_writer()(t) for t in ["analysis", "We", " think", "assistant", "final", "Yes", "."]
    ]
    probed = play(api, events, end, watch=True)
    assert probed.thought == InlineThinking("assistantfinal", opened=False)
    assert probed.record.first_answer_ns == 6 * MS
    assert play(api, events, end, until="assistantfinal").record.first_answer_ns == 6 * MS


def test_thinking_in_a_content_of_parts_is_none_of_the_answer() -> None:
    """As Mistral's own API has it."""

    def parts(*found: Any) -> Any:
        return {"choices": [{"index": 0, "delta": {"content": list(found)}}]}

    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    answer = parts({"type": "text", "text": "Yes"})
    events = [parts(thinking), parts(thinking), answer, chat("."), parts()]
    exchange = play("chat", events, FORMS["chat"][2], listen=True)
    assert exchange.record.first_answer_ns == 3 * MS
    assert (exchange.text(), exchange.text(reasoning=True)) == ("Yes.", "hmhmYes.")
    assert len(exchange.record.chunk_at_us) == 4


def test_a_tool_call_and_a_refusal_end_the_thinking() -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}
    for last in (call, {"choices": [{"delta": {"refusal": "no"}}]}):
        events = [chat("<think>"), chat("a"), chat("b"), chat("</think>"), last]
        assert play("chat", events, FORMS["chat"][2]).record.first_answer_ns == 5 * MS


def test_a_body_that_is_no_stream_is_answered_when_it_is_there() -> None:
    exchange = new_exchange(keep=True)
    choice = {"message": {"content": "<think>hm</think>Yes"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    exchange.feed(MS, json_response(body))
    assert (exchange.record.first_answer_ns, exchange.text()) == (MS, "Yes")


@pytest.mark.parametrize(
    ("opened", "said"), [(True, "ends with </think>;"), (False, "no tag at its")]
)
def test_the_diagnosis_names_it(opened: bool, said: str) -> None:
    events = [chat(text) for text in ("<think>", "a", "</think>", "b")]
    record = play("chat", events, FORMS["chat"][2]).record
    found = diagnose(record, RequestShape("chat", "m"), thinks=InlineThinking("</think>", opened))
    line = next(f for f in found if f.name == "reasoning")
    assert line.verdict == "note"
    assert said in line.found
    assert "the answer after 4 ms" in line.found
