"""What a token costs, and how exact its time is, by the shape of the stream.

    python -m benchmarks.load.shapes                      every shape
    python -m benchmarks.load.shapes Chinese logprobs     some of them

The texts do not repeat: each token of each request is another one.
"""

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.bench import Scenario, measure
from benchmarks.load.clients import Load, ampacity
from benchmarks.load.mock import exit_with, write_streams
from benchmarks.options import parser

TOKENS = 128
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MORE_STREAMS = 100  # for the probe, and as arrivals are random
BAR = 2.0  # times the cheapest shape

Text = Callable[[random.Random], str]
Piece = tuple[int, bytes]


def ascii_text(draw: random.Random) -> str:
    return " " + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 9)))


def chinese(draw: random.Random) -> str:
    return "".join(chr(draw.randint(0x4E00, 0x9FA5)) for _ in range(2))


def emoji(draw: random.Random) -> str:
    return "".join(chr(draw.randint(0x1F300, 0x1F6FF)) for _ in range(3))


def code(draw: random.Random) -> str:
    return ascii_text(draw)[1:] + draw.choice(['("', '")\n', "\n    ", "\t", "'\\n'", '":', " -> "])


def event(data: object, name: str = "", *, escape: bool = False, space: str = " ") -> bytes:
    """Return a server-sent event of JSON."""
    text = json.dumps(data, ensure_ascii=escape, separators=(",", ":"))
    return f"event: {name}\n".encode() * bool(name) + f"data:{space}{text}\n\n".encode()


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def choice(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}


def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a chunk as vLLM has it."""
    head = {"id": f"chatcmpl-{7:032x}", "object": "chat.completion.chunk", "created": 1790000000}
    return {**head, "model": "mock", "choices": choices, **more}


def usage(completion: int) -> dict[str, int]:
    total = 20 + completion
    return {"prompt_tokens": 20, "total_tokens": total, "completion_tokens": completion}


@dataclass(frozen=True)
class Shape:
    """How a server writes one token: ``write(text, tokens so far)`` gives its event."""

    text: Text
    write: Callable[[str, int], bytes]
    first: bytes = event(chunk([choice({"role": "assistant", "content": ""})]))
    last: bytes = (
        event(chunk([choice({"content": ""}, "length", stop_reason=None)]))
        + event(chunk([], usage=usage(TOKENS)))
        + b"data: [DONE]\n\n"
    )
    tokens_per_event: int = 1
    events_per_chunk: int = 1
    chunks_per_send: int = 1
    options: tuple[str, ...] = ()  # of ampacity

    def stream(self, draw: random.Random) -> list[Piece]:
        """Return the pieces of one answer, each sent at once, with their tokens."""
        events = [
            self.write("".join(self.text(draw) for _ in range(self.tokens_per_event)), so_far)
            for so_far in range(self.tokens_per_event, TOKENS + 1, self.tokens_per_event)
        ]
        chunks = [http_chunk(b"".join(some)) for some in _groups(events, self.events_per_chunk)]
        sends = [b"".join(some) for some in _groups(chunks, self.chunks_per_send)]
        tokens = TOKENS // len(sends)
        end = http_chunk(self.last) + b"0\r\n\r\n"
        return [(0, HEAD + http_chunk(self.first)), *((tokens, send) for send in sends), (0, end)]


def _groups(items: list[bytes], size: int) -> list[list[bytes]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def vllm(field: str = "content", *, escape: bool = False) -> Callable[[str, int], bytes]:
    return lambda text, _: event(chunk([choice({field: text}, token_ids=None)]), escape=escape)


def with_total(text: str, so_far: int) -> bytes:
    return event(chunk([choice({"content": text}, token_ids=None)], usage=usage(so_far)))


def tool_call(text: str, _: int) -> bytes:
    call = {"index": 0, "function": {"arguments": f'"{text}'}}
    return event(chunk([choice({"content": None, "tool_calls": [call]}, token_ids=None)]))


def logprobs(text: str, _: int) -> bytes:
    def entry(word: str, value: float) -> dict[str, Any]:
        return {"token": word, "logprob": value, "bytes": list(word.encode())}

    top = [entry(text[: n + 1], -0.123456789 - n) for n in range(2)]
    listed = {"content": [{**entry(text, -0.0123456789), "top_logprobs": top}]}
    return event(chunk([choice({"content": text}, token_ids=None) | {"logprobs": listed}]))


def sglang(text: str, _: int) -> bytes:
    delta = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
    return event(chunk([choice(delta, matched_stop=None)], usage=None))


def tgi(text: str, _: int) -> bytes:
    delta = {"role": "assistant", "content": text}
    head = {"object": "chat.completion.chunk", "id": "", "created": 1790000000, "model": "mock"}
    whole = {**head, "system_fingerprint": "3.0.0-sha", "choices": [choice(delta)], "usage": None}
    return event(whole, space="")


def llamacpp(text: str, _: int) -> bytes:
    choices = [{"finish_reason": None, "index": 0, "delta": {"content": text}}]
    tail = {"system_fingerprint": "b1-1", "object": "chat.completion.chunk"}
    head = {"created": 1790000000, "id": f"chatcmpl-{7:032x}", "model": "mock"}
    return event({"choices": choices, **head, **tail})


def messages(text: str, _: int) -> bytes:
    delta = {"type": "text_delta", "text": text}
    data = {"type": "content_block_delta", "index": 0, "delta": delta}
    return event(data, "content_block_delta")


def responses(text: str, so_far: int) -> bytes:
    name = "response.output_text.delta"
    data = {"content_index": 0, "delta": text, "item_id": f"msg_{7:032x}", "logprobs": []}
    return event({**data, "output_index": 0, "sequence_number": so_far + 3, "type": name}, name)


def _of_responses(name: str, status: str, **more: Any) -> bytes:
    response = {"id": "resp_1", "model": "mock", "status": status, **more}
    return event({"response": response, "sequence_number": 0, "type": name}, name)


MESSAGES_USAGE = {"input_tokens": 20, "output_tokens": TOKENS}
SHAPES = {
    "ASCII": Shape(ascii_text, vllm()),
    "Chinese": Shape(chinese, vllm()),
    "emoji": Shape(emoji, vllm()),
    r"Chinese as \uXXXX": Shape(chinese, vllm(escape=True)),
    r"emoji as \uXXXX\uXXXX": Shape(emoji, vllm(escape=True)),
    "code": Shape(code, vllm()),
    "tool-call arguments": Shape(ascii_text, tool_call),
    "reasoning": Shape(ascii_text, vllm("reasoning")),
    "logprobs": Shape(ascii_text, logprobs),
    "running totals": Shape(ascii_text, with_total),
    "two tokens a chunk": Shape(ascii_text, with_total, tokens_per_event=2),
    "SGLang": Shape(ascii_text, sglang),
    "TGI": Shape(ascii_text, tgi),
    "llama.cpp": Shape(ascii_text, llamacpp),
    "Messages": Shape(
        ascii_text,
        messages,
        event({"type": "message_start", "message": {"model": "mock"}}, "message_start"),
        event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "max_tokens"},
                "usage": MESSAGES_USAGE,
            },
            "message_delta",
        )
        + event({"type": "message_stop"}, "message_stop"),
        options=("--api", "messages"),
    ),
    "Responses": Shape(
        ascii_text,
        responses,
        _of_responses("response.created", "in_progress"),
        _of_responses("response.completed", "completed", usage=MESSAGES_USAGE),
        options=("--api", "responses"),
    ),
    "4 events in a chunk": Shape(ascii_text, vllm(), events_per_chunk=4),
    "4 chunks in a segment": Shape(ascii_text, vllm(), chunks_per_send=4),
    "4 chunks of code in a segment": Shape(code, vllm(), chunks_per_send=4),
}


def run(
    name: str, rate_rps: float, duration_s: float, words: list[str] | None, ahead: bool
) -> dict[str, Any]:
    """Measure one shape; ``bytes`` are those of one token."""
    shape, draw = SHAPES[name], random.Random(name)
    count = round(rate_rps * duration_s * 1.2) + MORE_STREAMS
    streams = [shape.stream(draw) for _ in range(count)]
    load = Load(rate_rps, duration_s, output_tokens=TOKENS, options=shape.options)
    with tempfile.TemporaryDirectory(prefix="ampacity-shapes-") as directory:
        path = Path(directory) / "streams"
        write_streams(path, streams)
        scenario = Scenario(name, load, {}, {"streams": str(path)})
        result = measure(ampacity(words), scenario, (1, 0), ahead)
    size = sum(len(data) for tokens, data in streams[0] if tokens) / TOKENS
    return result | {"bytes": size}


def main() -> int:
    given = parser(__doc__)
    given.add_argument("shapes", nargs="*", choices=[*SHAPES, []])
    given.add_argument("--rate", type=float, default=190, help="requests/s")
    given.add_argument("--duration", type=float, default=10, help="seconds")
    given.add_argument("--ampacity", type=shlex.split, metavar="COMMAND", help="as of bench")
    given.add_argument("--ahead", action="store_true", help="as of bench")
    options = given.parse_args()
    results = [
        run(name, options.rate, options.duration, options.ampacity, options.ahead)
        for name in options.shapes or SHAPES
    ]
    for result in results:
        if "failed" in result:
            print(f"{result['scenario']}: {result['failed']}", file=sys.stderr)
    results = [r for r in results if "failed" not in r]
    best = min(r["cpu_ms_per_1000_load"] for r in results)
    print(
        "| shape | bytes | CPU | / best | ns a byte | TTFT p50 | p99 | ITL p99 | not ok, differ |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        cpu_ms = r["cpu_ms_per_1000_load"]
        bad = r["requests"] - r["statuses"].get("ok", 0), r["tokens_differ"]
        print(
            f"| {r['scenario']} | {r['bytes']:.0f} | {cpu_ms:.1f} | {cpu_ms / best:.2f} | "
            f"{cpu_ms * 1e3 / r['bytes']:.0f} | {r['ttft_error_ms_p50']} | "
            f"{r['ttft_error_ms_p99']} | {r['itl_error_ms_p99']} | {bad[0]}, {bad[1]} |"
        )
    return int(any(r["cpu_ms_per_1000_load"] > BAR * best for r in results))


if __name__ == "__main__":
    exit_with(main)
