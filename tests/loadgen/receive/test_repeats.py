"""Chunks that match a template are recorded as the parsers record them; no end is overlooked."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.exchange import SEVERAL, Exchange
from ampacity.loadgen.receive.templates import ChunkContent, ChunkTemplate, learn
from ampacity.loadgen.send.protocols import Api
from tests.streams.playing import HEAD, NAMES, http_chunk, in_pieces, new_exchange, raw
from tests.support.repeats import often

pytestmark = pytest.mark.skipif(not hot_path.COMPILED, reason="_hot_path.c was not built")

FINISH = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
END = b"0\r\n\r\n"


def text(content: str = "a", **more: Any) -> bytes:
    value = {"choices": [{"index": 0, "delta": {"content": content}}], **more}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def ascii_text(content: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode()


def counted(total: int) -> bytes:
    return text(usage={"prompt_tokens": 7, "completion_tokens": total})


def event(data: bytes) -> bytes:
    return http_chunk(b"data: " + data + b"\n\n")


def played(
    reads: list[bytes], *, compiled: bool = True, keep: bool = True, api: Api = "chat"
) -> Exchange:
    """Return the exchange after ``reads``, one a millisecond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot_path, "COMPILED", compiled)
        exchange = new_exchange(api, keep=keep)
        for ms, data in enumerate(reads, 1):
            if not exchange.ended:
                exchange.feed(ms * 1_000_000, data)
        exchange.eof(10**9)
    return exchange


def check_alike(reads: list[bytes], api: Api = "chat") -> Exchange:
    """Return the exchange after ``reads``, which must be the same both ways, with text or not."""
    fast, slow = played(reads, api=api), played(reads, compiled=False, api=api)
    assert fast.record == slow.record == played(reads, keep=False, api=api).record
    assert (fast.pieces(), fast.content()) == (slow.pieces(), slow.content())
    return fast


def whole(events: list[bytes]) -> list[bytes]:
    """Return the reads of a response with these events, each read one HTTP chunk."""
    return [HEAD, *map(event, [*events, FINISH, b"[DONE]"]), END]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_streams_are_read_alike_both_ways(name: str) -> None:
    """Reads end where an HTTP chunk or an event does, as they do on a socket."""
    body = raw(name)
    for end in (b"\n\n\r\n", b"\r\n", b"\n\n"):
        pieces = body.split(end)
        check_alike([piece + end for piece in pieces[:-1]] + [pieces[-1]])


@pytest.mark.parametrize("keep", [True, False])
def test_what_stands_behind_a_head_is_no_chunk_without_it(keep: bool) -> None:
    chunks = [event(text(t)) for t in ("a", "b", "b")]
    exchange = played([HEAD, *chunks], keep=keep)
    assert (exchange.record.status, len(exchange.record.chunk_at_us)) == ("truncated", 3)
    rest = chunks[-1].partition(b'"content":"')[2]
    exchange = played([HEAD, *chunks, rest, *chunks], keep=keep)
    assert (exchange.record.status, len(exchange.record.chunk_at_us)) == ("protocol_error", 3)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("size", [100, 255, 1000])
def test_a_chunk_one_byte_longer_than_its_size_is_none(size: int, keep: bool) -> None:
    """256 bytes with a size of 255: no valid chunk makes a read of 262 bytes."""
    more = len(b"data: " + text("") + b"\n\n")
    body = b"data: " + text("x" * max(size + 1 - more, 1)) + b"\n\n"
    wrong = b"%x\r\n%b\r\n" % (len(body) - 1, body)
    record = played([HEAD, event(text()), event(text()), wrong, event(text())], keep=keep).record
    assert (record.status, len(record.chunk_at_us)) == ("protocol_error", 2)


def test_usage_beside_the_text_is_that_of_the_latest_chunk_where_no_total_runs() -> None:
    def sized(content: str, prompt: int) -> bytes:
        return text(content, usage={"prompt_tokens": prompt, "completion_tokens": 0})

    events = [sized("a", 7)] * 3 + [sized("\n", 9)] + [sized("a", 7)] * 3
    assert check_alike(whole(events)).record.input_tokens == 7
    events += [text("b"), sized("\n", 9), text("b"), text("b")]
    assert check_alike(whole(events)).record.input_tokens == 9


def test_the_last_usage_counts_where_totals_run_as_well() -> None:
    """Running totals give a prompt of 7 tokens, the usage at the end 15: found by fuzzing."""
    last = b'{"choices":[],"usage":{"prompt_tokens":15,"completion_tokens":3}}'
    for reads in (whole([*map(counted, (1, 2, 3)), last]), [HEAD + event(counted(1)), event(last)]):
        assert check_alike(reads).record.input_tokens == 15


PLAIN = [text()] * 10
X = b'{"choices":[{"delta":{"content":"x"}}]'
ODD = {
    "a value in two events, then two in one": [X[:22], X[22:] + b"}", text() + text()],
    "split at a comma": [X, b'"usage":null}', text() + b"," + text()],
    "split in a text": [X[:-5], b'"}}]}', text() + text()],
    "split between two objects": [X + b',"y":[{}', b"{}]}", text() + b"," + text()],
    "nothing, then two": [b"", text() + text()],
    "a space, then two": [b" ", text() + text()],
    "two in one": [text() + b" " + text()],
}


@pytest.mark.parametrize("odd", ODD)
def test_values_that_are_no_event_of_their_own_bear_no_tokens(odd: str) -> None:
    record = check_alike(whole(PLAIN + ODD[odd] + PLAIN)).record
    assert (record.status, record.output_tokens) == ("protocol_error", 20)


@pytest.mark.parametrize("keep", [True, False])
def test_long_texts_are_text_too(keep: bool) -> None:
    texts = [f"{k} ".ljust(5000, "x") for k in range(50)]
    exchange = played(whole([text(t) for t in texts]), keep=keep)
    assert (exchange.record.status, exchange.record.output_tokens) == ("ok", 50)


def test_running_totals_in_one_event_are_not_taken_apart() -> None:
    counts = list(map(counted, range(23)))
    record = check_alike(whole([*counts[1:11], b" ", counts[11] + counts[12], *counts[13:]])).record
    assert (record.status, record.output_tokens) == ("protocol_error", 22)
    assert len(record.chunk_at_us) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"choices":[{"delta":{"content":"x"},"message":5}]}',
        b'{"choices":[{"delta":{"content":"x","reasoning":"\xff"}}]}',
        X + b',"detail":1e999}',
        X + b',"usage":{"completion_tokens":3,"prompt_tokens":1e999}}',
    ],
)
def test_what_is_wrong_beside_the_text_is_wrong_behind_its_like_too(wrong: bytes) -> None:
    record = check_alike(whole([*PLAIN, wrong, *PLAIN])).record
    assert (record.status, len(record.chunk_at_us)) == ("protocol_error", 20)


CONTENTS = ["a", "a", "é\u2028", '","x":[{', "}{", "\\", ""]
MORE: list[dict[str, Any]] = [{"usage": None}, {"error": None}, {"error": {"message": "no"}}]
BODIES = st.sampled_from(
    [
        *(text(content) for content in CONTENTS),
        *(text(**more) for more in [*MORE, {"detail": "x"}]),
        *(counted(3), counted(4), FINISH, b"null", b"{}", b""),
        X + b',"y":[{},{"a":"b"}]}',
        b'{"choices":[{"delta":{"content":"a","error":"no"}}]}',
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}',
    ]
)
GLUE = st.sampled_from([b"", b" ", b",", b"{}", b"]", b"}"])


@st.composite
def events_of_any_cut(draw: st.DrawFn) -> list[bytes]:
    """Texts: several in one event, cut at a comma or a quotation mark, or anywhere."""
    found: list[bytes] = []
    for body in draw(st.lists(BODIES, min_size=4, max_size=24)):
        how = draw(st.integers(0, 9))
        if how == 0 and found:
            found[-1] += draw(GLUE) + body
        elif how == 1:
            marks = [i for i, c in enumerate(body) if c in b',"{}'] or [0]
            at = draw(st.sampled_from(marks) | st.integers(0, len(body)))
            found += [body[:at], body[at + draw(st.integers(0, 1)) :]]
        else:
            found.append(body)
    return found


def parsed(reads: list[bytes], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of these reads, behind the head, need the parsers."""
    found: list[bytes] = []
    parse = Exchange._parse
    monkeypatch.setattr(
        Exchange, "_parse", lambda self, at, data: found.append(data) or parse(self, at, data)
    )
    played([HEAD, *reads, event(FINISH), END])
    monkeypatch.undo()
    assert check_alike([HEAD, *reads, event(FINISH), END]).record.status == "ok"
    return len(found) - 3


def reasoning(content: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": {"reasoning_content": content}}]}).encode()


def completion(content: str) -> bytes:
    choice = {"text": content, "finish_reason": None, "logprobs": None}
    return json.dumps({"choices": [choice]}).encode()


def drafted(total: int) -> bytes:
    usage = {"prompt_tokens": 90, "total_tokens": 90 + total, "completion_tokens": total}
    return text(usage=usage | {"note": "50 %d"})


def upper(body: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(body), body)


WORDS = ["a", " word", "é", " 中文", "~", "~~", " 100", "{", ":", "'", "text"]
PIECE = b'{"index":0,"delta":{"content":"a"}}'
TWO_PIECES = b'{"choices":[%b,%b]}' % (PIECE, PIECE)


def entry(word: str, number: float = -0.1234) -> dict[str, Any]:
    return {"token": word, "logprob": number, "bytes": [*word.encode()]}


def with_logprobs(word: str, listed: Any, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": word}, "logprobs": listed, "finish_reason": None}
    return json.dumps({"choices": [choice], **more}, ensure_ascii=False).encode()


def chat_logprobs(word: str, tokens: int = 1, **more: Any) -> bytes:
    top = [entry("~", -1.5e-07), entry('"total_tokens": 5')]
    content = [entry(word) | {"top_logprobs": top} for _ in range(tokens)]
    return with_logprobs(word, {"content": content, "refusal": None}, **more)


def completion_logprobs(number: int, *words: str) -> bytes:
    tops = [{word: -0.5, "~": -2} for word in words]
    listed = {"text_offset": [number], "token_logprobs": [-0.5, 0], "tokens": [*words]}
    choice = {"index": 0, "text": "".join(words), "logprobs": {**listed, "top_logprobs": tops}}
    return json.dumps({"choices": [choice]}, ensure_ascii=False).encode()


def call_piece(arguments: str, index: int = 0, **more: Any) -> bytes:
    call = {"index": index, **more, "function": {"arguments": arguments}}
    return json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}).encode()


def text_of_choice(index: int) -> bytes:
    return json.dumps({"choices": [{"index": index, "delta": {"content": "a"}}]}).encode()


def call_of_choice(index: int) -> bytes:
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]}
    return json.dumps({"choices": [{"index": index, "delta": delta}]}).encode()


CALL = b'{"index":0,"function":{"arguments":"x"}}'
TWO_CALLS = b'{"choices":[{"delta":{"tool_calls":[%b,%b]}}]}' % (CALL, CALL)
STREAMS = {  # the reads, and how many of them are no repetition
    "words": ([event(text(word)) for word in WORDS * 9], 1),
    "words, sizes in capitals": (
        [upper(b"data: " + text(word + "x" * 80) + b"\n\n") for word in WORDS * 9],
        1,
    ),
    "no space behind data:": (
        [http_chunk(b"data:" + text(word) + b"\n\n") for word in WORDS * 9],
        1,
    ),
    "completions": ([event(completion(word)) for word in WORDS * 9 if word.isascii()], 1),
    "reasoning, then an answer": ([event(reasoning("hm"))] * 20 + [event(text("a"))] * 20, 2),
    "running totals": ([event(counted(i)) for i in range(1, 121)], 1),
    "two running totals, a percentage beside them": ([event(drafted(i)) for i in range(1, 121)], 1),
    "several tokens in some chunks": (
        [event(drafted(i)) for i in sorted({*range(1, 90), *range(90, 140, 3)} - {7, 31, 32})],
        1,
    ),
    "texts that are written with escapes": (
        [event(text(word)) for word in ["a", "\n", "b", '"', "c", "\\", "d", "\u0001"] * 10],
        1 + 10,
    ),
    "every text with an escape": ([event(text(word)) for word in ["a\n", '"', "\\"] * 20], 1),
    "texts in ASCII": ([event(ascii_text(word)) for word in ["中", "文字", "🙂", "é"] * 20], 1),
    "two chunks in a read": ([event(text("a"))] + [event(text("b")) * 2] * 30, 1),
    "a chunk cut in two": (
        [event(text("a")), event(text("b"))[:9], event(text("b"))[9:]] + [event(text("c"))] * 30,
        3,
    ),
    "another creation time": ([event(text("a", created=n // 10)) for n in range(100)], 10),
    "every chunk its own": ([event(text("a", obfuscation="x" * n)) for n in range(100)], 100),
    "two pieces of a choice in a chunk": ([event(TWO_PIECES)] * 30, 30),
    "padded sizes": ([b"0" + event(text("a"))] * 30, 30),
    "log-probabilities": ([event(chat_logprobs(word)) for word in WORDS * 9], 1),
    "log-probabilities of completions": (
        [event(completion_logprobs(n, word)) for n, word in enumerate(WORDS * 9)],
        1,
    ),
    "log-probabilities of two tokens in some chunks": (
        [event(chat_logprobs("a", 1 + (n % 20 == 19))) for n in range(100)],
        1,
    ),
    "log-probabilities and a running total": (
        [event(chat_logprobs("a", usage={"completion_tokens": n})) for n in range(1, 100)],
        1,
    ),
    "log-probabilities without tokens": (
        [event(with_logprobs(word, {"content": []})) for word in WORDS * 9],
        1,
    ),
    "a tool call": ([event(call_piece(word)) for word in WORDS * 9], 1),
    "two tool calls": (
        [event(call_piece(word, n // 50)) for n, word in enumerate(WORDS * 9)],
        2,
    ),
    "two tool calls in a chunk": ([event(TWO_CALLS)] * 30, 30),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_only_what_is_no_repetition_is_parsed(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, expected = STREAMS[stream]
    assert parsed(reads, monkeypatch) == expected


def test_tokens_that_logprobs_list_are_counted_of_chunks_that_match_too() -> None:
    sizes = [1] * 20 + [3] * 20 + [1, 2] * 5
    exchange = check_alike(whole([chat_logprobs("a", tokens=size) for size in sizes]))
    assert exchange.record.chunk_tokens == sizes
    assert (exchange.record.output_tokens, exchange.record.token_source) == (95, "logprobs")


def test_arguments_of_calls_that_match_are_kept_for_the_next_turn() -> None:
    pieces = ['{"city', '": "', 'Köln"', ', "n\\n', '": [1, 2', "]}"]
    events = [call_piece("", 0, id="c1", type="function"), *(call_piece(p) for p in pieces)]
    events += [call_piece(p, 1, id="c2") for p in pieces]  # some servers repeat the id
    named = call_piece("{}", 2).replace(b'"arguments"', b'"name": "f", "arguments"')
    events += [named] * 3  # a name without an id, behind a whole call
    events += [text("and"), call_piece("x", 1)]
    exchange = check_alike(whole(events))
    arguments = [call.arguments for call in exchange.content().calls]
    joined = "".join(pieces)
    assert arguments == [joined, json.dumps({"arguments": joined + "x"}), "{}", "{}", "{}"]
    assert exchange.record.output_tokens == len(events)


@pytest.mark.parametrize("write", [text_of_choice, call_of_choice])
def test_a_choice_that_comes_back_is_seen(write: Any) -> None:
    """The chunk between teaches nothing, as its read holds a usage too."""
    usage = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    reads = [HEAD, event(write(0)), event(write(1)) + event(usage), event(write(0))]
    record = check_alike([*reads, event(FINISH), event(b"[DONE]"), END]).record
    assert (record.status, record.error) == ("protocol_error", SEVERAL)


def test_calls_beside_an_empty_list_of_parts_are_tokens() -> None:
    piece = call_piece("{}").replace(b'"tool_calls"', b'"content": [], "tool_calls"')
    exchange = check_alike(whole([piece] * 5))
    assert (exchange.record.status, exchange.record.output_tokens) == ("ok", 5)


def test_an_answer_that_turns_out_to_be_thinking_begins_anew_with_a_call() -> None:
    events = [text("hm"), *map(call_piece, "abc"), text("</think>"), *map(call_piece, "abc")]
    record = check_alike(whole(events)).record
    assert record.first_answer_ns == 7_000_000  # the sixth event, after the head


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
LISTED = st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(st.dictionaries(st.text(max_size=3), VALUES), max_size=3) | VALUES,
        "tokens": st.lists(st.text(max_size=3), max_size=3) | VALUES,
        "more": VALUES,
    },
)


@settings(max_examples=often(100, 1000), deadline=None)
@given(data=st.data())
def test_log_probabilities_of_any_form_say_the_same_as_parsed(data: st.DataObject) -> None:
    """Valid JSON or not: a character of some is replaced, dropped or doubled."""
    events = []
    for listed in data.draw(st.lists(LISTED, min_size=2, max_size=6)):
        body = with_logprobs("a", listed)
        if data.draw(st.integers(0, 3)) == 0:
            at = data.draw(st.integers(body.index(b"logprobs"), len(body) - 1))
            other = data.draw(st.sampled_from([b"", b'"', b"\\", b"0", b"]", b"{", b",", b"\xff"]))
            body = body[:at] + other + body[at + data.draw(st.integers(0, 1)) :]
        events += [chat_logprobs("b"), body, body]
    check_alike(whole(events))


def messages(number: int) -> tuple[str, dict[str, Any]]:
    kind = "thinking" if number < 20 else "text"
    delta = {"type": f"{kind}_delta", kind: f" {number}"}
    return "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}


def responses(number: int) -> tuple[str, dict[str, Any]]:
    name = f"response.{'reasoning' if number < 20 else 'output'}_text.delta"
    return name, {"delta": f"{number}\n", "sequence_number": number + 5, "type": name}


def error(number: int) -> tuple[str, dict[str, Any]]:
    name = "content_block_delta"
    return name, {"type": name, "delta": {"type": "text_delta", "text": "x"}, "error": "no"}


@pytest.mark.parametrize(
    ("api", "write", "expected"), [("messages", messages, 2), ("responses", responses, 2)]
)
def test_events_that_name_their_type_have_templates_too(
    api: Api, write: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(number: int, write: Any = write) -> bytes:
        name, data = write(number)
        return http_chunk(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

    reads = [named(number) for number in range(60)]
    exchange = check_alike([HEAD, *reads], api)
    assert len(exchange.record.chunk_at_us) == 60
    assert [kind for kind, _ in exchange.pieces()] == ["reasoning"] * 20 + ["answer"] * 40
    found: list[bytes] = []
    parse = Exchange._parse
    monkeypatch.setattr(
        Exchange, "_parse", lambda self, at, data: found.append(data) or parse(self, at, data)
    )
    played([HEAD, *reads], api=api)
    assert len(found) == 1 + expected
    monkeypatch.undo()
    assert check_alike([HEAD, *reads, named(0, error), *reads], api).record.status == "stream_error"


def matched(template: ChunkTemplate, data: bytes, total: int = 0) -> bytes | None:
    """Return the text of an event that matches, None of one that does not."""
    texts: list[bytes] = []
    template.read_handler(print, print, texts.append, lambda *_: True, total)(0, event(data))
    return texts[0] if texts else None


def content_of(data: bytes) -> ChunkContent | None:
    value = json.loads(data)
    total = value.get("usage", {}).get("completion_tokens")
    return ChunkContent("answer", value["choices"][0]["delta"]["content"], total)


@pytest.mark.parametrize(
    "data",
    [
        b'{"content":"abc","choices":[{"delta":{"content":"abc"}}]}',  # the text stands there twice
        b'{"choices":[{"delta":{"content":"no","content":"abc"}}],"x":"abc"}',
        b'{"x":"abc","y":"abc","choices":[{"delta":{"content":"abc"}}]}',
    ],
)
def test_the_text_is_found_where_it_counts(data: bytes) -> None:
    template = learn(event(data), content_of)
    assert template is not None
    place = data.replace(b'"content":"abc"}', b'"content":"other"}')
    assert matched(template, place) == b"other"
    assert matched(template, data.replace(b"abc", b"other")) is None


def test_a_total_that_is_not_where_it_seems_teaches_nothing() -> None:
    usage = b'"usage":{"completion_tokens":4,"completion_tokens":5}'
    data = b'{"choices":[{"delta":{"content":"a"}}],%b}' % usage
    template = learn(event(data), content_of)
    assert template is not None
    assert matched(template, data.replace(b":5", b":6")) is None  # both are expected to run
    assert matched(template, data.replace(b":5", b":6").replace(b":4", b":5"), 5) == b"a"
    ahead = b'{"usage":{"completion_tokens":5},"choices":[{"delta":{"content":"a"}}]}'
    assert learn(event(ahead), content_of) is None
    assert learn(event(X + b',"usage":{"completion_tokens" : 5}}'), content_of) is None


@settings(max_examples=often(50, 200), deadline=None)
@given(events=events_of_any_cut())
def test_what_is_known_by_its_form_says_the_same_as_parsed(events: list[bytes]) -> None:
    check_alike(whole(events))


@settings(max_examples=often(37, 150), deadline=None)
@given(data=st.data())
def test_a_response_ends_with_the_read_that_holds_its_end(data: st.DataObject) -> None:
    """However the read is cut and whatever follows: it looks like an event that ends its chunk."""
    last = data.draw(
        st.sampled_from([b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nX-T: 1\r\n\r\n", b"0;ext=1\r\n\r\n"])
    )
    rest = data.draw(
        st.sampled_from([b"", b"junk\n\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n\n\n\r\n", event(text())])
    )
    chunks = [
        http_chunk(b"data: " + text() + b"\n\n" * n)
        for n in data.draw(st.lists(st.integers(1, 2), max_size=12))
    ]
    before = HEAD + event(text()) + b"".join(chunks) + event(FINISH) + event(b"[DONE]")
    edges, at = [], len(HEAD + event(text()))
    for piece in chunks:
        edges.append(at := at + len(piece))
    near = [st.integers(len(before) - 4, len(before) + len(last) - 1)]
    cuts = data.draw(st.lists(st.one_of(st.sampled_from(edges or [1]), *near), max_size=16))
    exchange, read = new_exchange(keep=True), 0
    for ms, piece in enumerate(in_pieces(before + last + rest, set(cuts)), 1):
        assert not exchange.ended
        exchange.feed(ms * 1_000_000, piece)
        read += len(piece)
        if read >= len(before + last):
            break
    assert (exchange.ended, exchange.record.status) == (True, "ok")
    assert exchange.record.output_tokens == len(chunks) + 1
