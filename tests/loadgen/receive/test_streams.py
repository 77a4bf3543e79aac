"""What real engines send, and how it must be read.

``tests/streams`` holds small streams of the shapes that were captured from real engines. The
expected values were worked out by reading each stream: text-bearing events counted by eye, tokens
from its usage where it has one.
"""

import re
from typing import NamedTuple

import pytest

from ampacity.loadgen.rundir.records import STATUSES, TOKEN_SOURCES, RequestRecord
from tests.streams.playing import NAMES, in_pieces, play, raw
from tests.support.repeats import often


class Expect(NamedTuple):
    status: str
    tokens: int | None = None
    source: str | None = None
    chunks: int = 0
    chunk_tokens: list[int] | None = None
    finish: str | None = None
    input: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    error: str | None = None  # must stand in the error; None: no error at all
    http: int = 200


L, S = "length", "stop"
CUT = "closed in the middle"
NO_TOKEN = "no token"
SEVERAL = "several choices came"  # nobody can tell their latencies apart
TABLE = {
    # vLLM: role chunk with empty text, finish reason in the last text chunk, then usage
    "vllm-chat-stream-usage": Expect("ok", 3, "usage", 3, None, L, 15),
    "vllm-chat-contusage": Expect("ok", 3, "usage_per_chunk", 3, [1, 1, 1], L, 15),
    "vllm-chat-contusage-held-back": Expect("ok", 6, "usage_per_chunk", 2, [2, 3], L, 15),
    "vllm-chat-contusage-eos-first": Expect("ok", 1, "usage", 0, None, S, 15),
    "vllm-chat-contusage-no-text": Expect("ok", 3, "usage", 0, None, L, 15),
    "vllm-chat-hidden-tokens": Expect("ok", 4, "usage", 1, None, L, 15),
    "vllm-chat-logprobs": Expect("ok", 3, "logprobs", 2, [2, 1], L),
    "vllm-chat-n2": Expect("protocol_error", 6, "usage", 6, None, S, 15, error=SEVERAL),
    "vllm-chat-reasoning": Expect("ok", 5, "usage", 4, None, S, 13, 8, 2),
    "vllm-chat-tools": Expect("ok", 9, "usage", 3, None, "tool_calls", 188),
    "vllm-chat-max1": Expect("ok", 1, "usage", 1, None, L, 15),
    "vllm-chat-merged-chunks": Expect("ok", 5, "usage", 3, None, L, 3530),
    "vllm-chat-engine-killed": Expect(
        "stream_error", 2, "chunks", 2, error="The engine core is gone."
    ),
    "vllm-chat-api-killed": Expect("truncated", 2, "chunks", 2, error=CUT),
    "vllm-chat-cut-in-chunk": Expect("truncated", 1, "chunks", 1, error=CUT),
    "vllm-completions": Expect("ok", 3, "chunks", 3, None, L),
    "vllm-completions-two-prompts": Expect(
        "protocol_error", 4, "usage", 4, None, L, 7, error=SEVERAL
    ),
    "vllm-chat-nonstream": Expect("ok", 3, "usage", 1, [3], L, 15),
    "vllm-err-unknown-model": Expect(
        "http_error", http=404, error="HTTP 404: The model `x` does not exist."
    ),
    "vllm-err-no-key": Expect("http_error", http=401, error="HTTP 401: Unauthorized"),
    "vllm-err-method": Expect("http_error", http=405, error="HTTP 405: Method Not Allowed"),
    # llama.cpp: role and first token in one HTTP chunk; comments; cached tokens
    "llamacpp-chat-stream-usage": Expect("ok", 3, "usage", 3, None, L, 15, 14),
    "llamacpp-chat-pings": Expect("ok", 2, "usage", 2, None, L, 3530, 0),
    "llamacpp-chat-return-progress": Expect("ok", 2, "usage", 2, None, L, 2570, 0),
    "llamacpp-chat-n2": Expect(
        "protocol_error", 5, "usage", 5, None, L, 15, 14, error=SEVERAL
    ),  # a usage for each choice: 2 + 3
    "llamacpp-chat-eos-first": Expect("ok", 1, "usage", 0, None, S, 15, 14),
    "llamacpp-chat-eos-first-no-usage": Expect("empty", finish=S, error=NO_TOKEN),
    "llamacpp-chat-killed": Expect("truncated", 2, "chunks", 2, error=CUT),
    "llamacpp-chat-error-after-200": Expect("stream_error", error="The output does not match"),
    "llamacpp-completions-usage": Expect("ok", 3, "usage", 3, None, L, 4, 3),
    "llamacpp-completions-empty-events": Expect("ok", 2, "usage", 2, None, L, 4, 3),
    "llamacpp-chat-nonstream": Expect("ok", 2, "usage", 1, [2], L, 15, 14),
    "llamacpp-err-no-key": Expect("http_error", http=401, error="HTTP 401: Invalid API Key"),
    "llamacpp-err-bad-json": Expect(
        "http_error", http=500, error="HTTP 500: [json.exception.parse_error]"
    ),
    # SGLang: reasoning_content null in every delta, finish in a chunk of its own
    "sglang-chat-stream-usage": Expect("ok", 3, "usage", 3, None, L, 15, None, 0),
    "sglang-chat-contusage": Expect("ok", 3, "usage_per_chunk", 2, [1, 2], L, 15, None, 0),
    "sglang-chat-reasoning": Expect("ok", 3, "usage", 3, None, L, 13, None, 3),
    "sglang-chat-eos-first": Expect("ok", 1, "usage", 0, None, S, 15, None, 0),
    "sglang-chat-max0": Expect("empty", finish=L, error=NO_TOKEN),
    "sglang-completions-usage": Expect("ok", 3, "usage", 3, None, L, 4, None, 0),
    "sglang-err-max-tokens": Expect(
        "http_error", http=400, error="max_new_tokens must be at least 0"
    ),
    # transformers serve: role chunk at once, no [DONE], usage in the finish chunk
    "transformers-chat-stream": Expect("ok", 3, "usage", 3, None, L, 15),
    "transformers-chat-error-event": Expect(
        "stream_error", error="`max_new_tokens` must be greater than 0"
    ),
    "transformers-chat-killed": Expect("truncated", 2, "chunks", 2, error=CUT),
    "transformers-err-bad-json": Expect("http_error", http=422, error="json_invalid"),
    "transformers-err-messages": Expect(
        "http_error", http=500, error="HTTP 500: Internal Server Error"
    ),
    # LiteLLM: usage beside an empty delta, empty texts dropped, text_tokens in the details
    "litellm-chat-stream-usage": Expect("ok", 2, "usage", 2, None, L, 15, 3, 0),
    "litellm-chat-drops-empty-text": Expect("ok", 5, "usage", 0, None, L, 15, None, 0),
    "litellm-chat-upstream-killed": Expect(
        "stream_error", 1, "chunks", 1, error="peer closed connection"
    ),
    "litellm-completions-two-prompts": Expect("ok", 4, "usage", 4, None, L, 7, None, 0),
    "litellm-err-unknown-model": Expect("http_error", http=400, error="Invalid model name"),
    "litellm-err-no-key": Expect("http_error", http=500, error="HTTP 500: Internal Server Error"),
    # vllm-router: chunk sizes in upper case, errors under text/event-stream
    "vllm-router-chat-stream-usage": Expect("ok", 2, "usage", 2, None, L, 15),
    "vllm-router-worker-killed": Expect("truncated", 1, "chunks", 1, error=CUT),
    "vllm-router-err-max-tokens": Expect(
        "http_error", http=400, error="HTTP 400: max_tokens=100000 cannot"
    ),
    "vllm-router-err-worker-down": Expect("http_error", http=500, error="HTTP 500: Request failed"),
    # llama-cpp-python: no usage; [DONE] after a cut, and no last HTTP chunk; a 200 without an event
    "llama-cpp-python-chat": Expect("ok", 2, "chunks", 2, None, L),
    "llama-cpp-python-cut-by-next-request": Expect("truncated", 2, "chunks", 2, error=CUT),
    "llama-cpp-python-no-event": Expect("empty", error="without a single event"),
    "proxy-err-html": Expect("http_error", http=502, error="502 Bad Gateway"),
}


def assert_read_as(record: RequestRecord, expect: Expect) -> None:
    found = Expect(
        record.status,
        record.output_tokens,
        record.token_source,
        len(record.chunk_at_us),
        record.chunk_tokens,
        record.finish_reason,
        record.input_tokens,
        record.cached_tokens,
        record.reasoning_tokens,
        record.error,
        record.http_status or 0,
    )
    assert found._replace(error=None) == expect._replace(error=None), record.error
    if expect.error is None:
        assert record.error is None
    else:
        assert expect.error in (record.error or "")
        assert "\n" not in (record.error or "")
    assert record.status in STATUSES
    assert record.token_source is None or record.token_source in TOKEN_SOURCES


def test_every_stream_has_its_expectation() -> None:
    assert set(NAMES) == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_from_each_engines_stream(name: str) -> None:
    assert_read_as(play([(5, raw(name))]), TABLE[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_at_any_byte_offset_changes_nothing(name: str) -> None:
    data = raw(name)
    for offset in range(1, len(data), often(3, 1)):
        assert_read_as(play([(1, data[:offset]), (2, data[offset:])]), TABLE[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_of_a_few_bytes_change_nothing(name: str, size: int) -> None:
    data = raw(name)
    assert_read_as(play((i, data[i : i + size]) for i in range(0, len(data), size)), TABLE[name])


EVENT_STREAMS = [  # whose end and framing are not the point
    n for n in NAMES if TABLE[n].status not in ("truncated", "http_error") and "nonstream" not in n
]


@pytest.mark.parametrize("name", EVENT_STREAMS)
@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_line_ends_of_the_events_change_nothing(name: str, line_end: bytes) -> None:
    """CRLF and CR line ends, over close-delimited HTTP, in pieces of 1 to 5 bytes."""
    head, body = _unchunked(raw(name))
    data = head + body.replace(b"\n", line_end)
    for size in (1, 4, 5, len(data)):
        assert_read_as(
            play((i, data[i : i + size]) for i in range(0, len(data), size)), TABLE[name]
        )


def _unchunked(response: bytes) -> tuple[bytes, bytes]:
    """Head without Transfer-Encoding, and the body put together."""
    head, _, rest = response.partition(b"\r\n\r\n")
    head = re.sub(rb"(?i)\r\n(transfer-encoding|connection): [^\r]*", b"", head)
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return head + b"\r\n\r\n", body


def test_reasoning_is_a_token_but_no_answer() -> None:
    data = raw("vllm-chat-reasoning")
    events = [m.start() for m in re.finditer(rb"[0-9a-f]+\r\ndata: ", data)]
    record = play(list(enumerate(in_pieces(data, events))))  # read i brings event i - 1 …
    # events: role, reasoning, reasoning, answer, answer: the first reasoning is token 1
    assert (record.first_event_ns, record.first_token_ns, record.first_answer_ns) == (1, 2, 4)
    all_reasoning = play([(7, raw("sglang-chat-reasoning"))])
    assert (all_reasoning.first_token_ns, all_reasoning.first_answer_ns) == (7, None)


def test_ids_and_retry_hints_of_the_server_are_kept() -> None:
    assert play([(1, raw("transformers-chat-stream"))]).server_request_id == "req-7"
    assert play([(1, raw("litellm-chat-stream-usage"))]).server_request_id == "call-9"
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
    record = play([(1, busy)])
    assert (record.status, record.http_status, record.retry_after_s) == ("http_error", 429, 7.0)
    dated = busy.replace(b"7", b"Wed, 21 Oct 2015 07:28:00 GMT")  # long past: at once
    assert play([(1, dated)]).retry_after_s == 0.0
