"""The captured streams of real engines, byte for byte (tests/data/streams).

Expected values come from each stream's own usage or logprobs, else from its text-bearing events
counted with a regular expression; never from the parser under test. Captures that were cut in the
middle or closed by the client are left out.
"""

import re
from pathlib import Path

import pytest

from tests.streams.playing import MS, in_pieces, play

SAMPLES = Path(__file__).parents[2] / "data" / "streams"

# status, tokens by usage or by text-bearing events counted with grep, finish reason
Expect = dict[str, tuple[str, int | None, str | None]]


def _table(text: str, prefix: str = "") -> Expect:
    """Parse entries of name, status, tokens and finish reason; "-" is None."""
    rows = (entry.split() for entry in text.split(";") if entry.strip())
    return {
        prefix + name: (status, None if n == "-" else int(n), None if end == "-" else end)
        for name, status, n, end in rows
    }


_RAW = _table("""
    litellm--chat-stream-logprobs ok 3 length; litellm--chat-stream-max1 ok 1 length;
    litellm--chat-stream-usage ok 8 length; litellm--completions-stream-usage ok 6 length;
    litellm--completions-two-prompts-stream ok 4 length; litellm--eos-first-token ok 1 stop;
    litellm--err-unknown-model http_error - -; llamacpp--chat-stream-contusage ok 6 length;
    llamacpp--chat-stream-logprobs ok 3 length; llamacpp--chat-stream-long-prefill ok 6 length;
    llamacpp--chat-stream-max1 ok 1 length; llamacpp--chat-stream-n2 protocol_error 8 length;
    llamacpp--chat-stream-usage ok 8 length; llamacpp--completions-stream-usage ok 6 length;
    llamacpp--eos-first-token ok 1 stop; llamacpp--err-negative-max-tokens http_error - -;
    llamacpp--err-unknown-model ok 4 length;
    llamacpp--server-killed-midstream-SIGKILL truncated 11 -;
    sglang--chat-reasoning-stream ok 16 length; sglang--chat-stream-contusage ok 6 length;
    sglang--chat-stream-max1 ok 1 length; sglang--chat-stream-usage ok 8 length;
    sglang--completions-stream-usage ok 6 length; sglang--eos-first-token ok 1 stop;
    sglang--err-negative-max-tokens http_error - -; sglang--err-unknown-model ok 4 length;
    transformers--chat-stream-max1 ok 1 length; transformers--chat-stream-usage ok 8 length;
    vllm--chat-reasoning-stream ok 24 length; vllm--chat-stream-contusage ok 6 length;
    vllm--chat-stream-logprobs ok 3 length; vllm--chat-stream-long-prefill ok 6 length;
    vllm--chat-stream-max1 ok 1 length; vllm--chat-stream-n2 protocol_error 8 length;
    vllm--chat-stream-usage ok 8 length;
    vllm--completions-two-prompts-stream protocol_error 4 length;
    vllm--err-negative-max-tokens http_error - -; vllm--err-unknown-model http_error - -;
    vllm-router--chat-stream-usage ok 6 length;
""")


def test_every_raw_capture_is_in_the_table() -> None:
    assert {p.stem for p in (SAMPLES / "raw").glob("*.http")} == set(_RAW)


@pytest.mark.parametrize("name", sorted(_RAW))
def test_captured_bytes(name: str) -> None:
    data = _true_length((SAMPLES / "raw" / f"{name}.http").read_bytes())
    for reads in (
        [data],
        in_pieces(data, range(100, len(data), 100)),
        in_pieces(data, range(1, len(data))),
    ):
        record = play(enumerate(reads))
        assert (record.status, record.output_tokens, record.finish_reason) == _RAW[name], (
            record.error
        )


def _true_length(response: bytes) -> bytes:
    """Paths in the captures were replaced: a Content-Length may no longer match its body."""
    head, _, body = response.partition(b"\r\n\r\n")
    return (
        re.sub(rb"(?i)content-length: \d+", b"content-length: %d" % len(body), head)
        + b"\r\n\r\n"
        + body
    )


# per engine: capture, status, tokens, finish reason
_TABLES = {
    "litellm": """
        chat-nonstream-logprobs ok 2 length; chat-nonstream-max1 ok 1 length;
        chat-nonstream-n2 protocol_error 8 length; chat-nonstream ok 8 length;
        chat-stream-gzip ok 4 length; chat-stream-logprobs ok 3 length;
        chat-stream-max1 ok 1 length; chat-stream-usage ok 8 length; chat-stream ok 8 length;
        completions-nonstream ok 6 length; completions-stream-logprobs ok 3 length;
        completions-stream-usage ok 6 length; completions-stream ok 6 length;
        completions-token-ids-prompt http_error - -; completions-two-prompts-stream ok 4 length;
        eos-first-token ok 1 stop; err-401-no-key http_error - -; err-401-wrong-key http_error - -;
        err-bad-json http_error - -; err-max-tokens-too-big http_error - -;
        err-max-tokens-zero http_error - -; err-missing-messages http_error - -;
        err-prompt-too-long too_long - -; err-temperature-out-of-range http_error - -;
        err-unknown-model http_error - -; err-wrong-type http_error - -;
        ignore-eos-false-natural-stop ok 1 stop; ignore-eos-true ok 5 length;
        llamacpp-behind-long-prefill ok 6 length; llamacpp-behind-stream-no-usage ok 4 length;
        llamacpp-behind-stream ok 4 length; max-completion-tokens ok 3 length;
        min-tokens ok 5 stop; stop-string-nonstream ok 1 stop; stop-string ok 1 stop;
        unknown-field ok 2 length; upstream-down http_error - -;
        via-openai-provider-ignore-eos ok 4 length; via-openai-provider-stream ok 4 length;
    """,
    "llama-cpp-python": """
        chat-nonstream ok 3 stop; completions-stream ok 3 length; err-bad-json http_error - -;
        err-prompt-too-long empty - -; ignore-eos ok 4 length;
    """,
    "llamacpp": """
        bytes-model/chat-stream-error-after-200 stream_error - -;
        bytes-model/completions-stream-split-utf8 stream_error - -;
        chat-nonstream-logprobs ok 2 length; chat-nonstream-max1 ok 1 length;
        chat-nonstream-n2 protocol_error 4 length; chat-nonstream ok 8 length;
        chat-stream-contusage ok 6 length; chat-stream-gzip ok 4 length;
        chat-stream-logprobs ok 3 length; chat-stream-long-prefill-return-progress ok 6 length;
        chat-stream-long-prefill ok 6 length; chat-stream-max1 ok 1 length;
        chat-stream-n2 protocol_error 8 length; chat-stream-queued-behind-busy-slots ok 3 length;
        chat-stream-usage ok 8 length; chat-stream ok 8 length;
        chat-structured-json-stream ok 10 stop; chat-tools-required-nonstream ok 160 length;
        completions-nonstream ok 6 length; completions-stream-logprobs ok 3 length;
        completions-stream-usage ok 6 length; completions-stream ok 6 length;
        completions-token-ids-prompt ok 3 length; eos-first-token ok 1 stop;
        err-401-no-key http_error - -; err-bad-json http_error - -;
        err-max-tokens-too-big empty - stop; err-max-tokens-zero ok 1 length;
        err-missing-messages http_error - -; err-negative-max-tokens http_error - -;
        err-prompt-too-long too_long - -; err-temperature-out-of-range empty - stop;
        err-unknown-model ok 4 length; err-wrong-type http_error - -;
        ignore-eos-false-natural-stop ok 2 stop; ignore-eos-true ok 5 length;
        max-completion-tokens ok 3 length; min-tokens ok 1 stop;
        server-killed-midstream-SIGKILL truncated 11 -; stop-string-nonstream ok 3 stop;
        stop-string ok 3 stop; unknown-field ok 2 length;
    """,
    "sglang": """
        chat-nonstream-logprobs ok 2 length; chat-nonstream-max1 ok 1 length;
        chat-nonstream-n2 protocol_error 8 length; chat-nonstream ok 8 length;
        chat-reasoning-nonstream ok 8 length; chat-reasoning-stream ok 16 length;
        chat-stream-contusage ok 6 length; chat-stream-gzip ok 4 length;
        chat-stream-max1 ok 1 length; chat-stream-usage ok 8 length; chat-stream ok 6 length;
        chat-tools-auto-stream ok 6 length; completions-nonstream ok 6 length;
        completions-stream-logprobs ok 3 length; completions-stream-usage ok 6 length;
        completions-stream ok 6 length; completions-token-ids-prompt ok 3 length;
        eos-first-token ok 1 stop; err-bad-json http_error - -;
        err-max-tokens-too-big too_long - -; err-max-tokens-zero empty - length;
        err-missing-messages http_error - -; err-negative-max-tokens http_error - -;
        err-prompt-too-long too_long - -; err-temperature-out-of-range http_error - -;
        err-unknown-model ok 4 length; err-wrong-type http_error - -;
        ignore-eos-false-natural-stop ok 1 stop; ignore-eos-true ok 5 length;
        max-completion-tokens ok 3 length; min-tokens ok 5 stop; stop-string-nonstream ok 2 stop;
        stop-string ok 3 stop; unknown-field ok 2 length;
    """,
    "transformers": """
        cb-chat-stream ok 7 stop; chat-nonstream-logprobs ok 2 length;
        chat-nonstream-max1 ok 1 length; chat-nonstream-n2 ok 4 length; chat-nonstream ok 4 stop;
        chat-stream-contusage ok 4 stop; chat-stream-gzip ok 4 length;
        chat-stream-logprobs ok 3 length; chat-stream-max1 ok 1 length; chat-stream-n2 ok 4 length;
        chat-stream-usage ok 4 stop; chat-stream ok 4 stop; completions-nonstream ok 6 length;
        completions-stream-logprobs ok 3 length; completions-stream-usage ok 6 length;
        completions-stream ok 6 length; completions-token-ids-prompt http_error - -;
        eos-first-token stream_error - -; err-bad-json http_error - -;
        err-max-tokens-too-big stream_error - -; err-max-tokens-zero stream_error - -;
        err-missing-messages http_error - -; err-negative-max-tokens stream_error - -;
        err-prompt-too-long ok 4 length; err-temperature-out-of-range stream_error - -;
        err-unknown-model http_error - -; err-wrong-type http_error - -;
        ignore-eos-false-natural-stop stream_error - -; ignore-eos-true http_error - -;
        max-completion-tokens ok 3 length; min-tokens http_error - -;
        server-killed-midstream-SIGKILL truncated 4 -; stop-string-nonstream ok 2 stop;
        stop-string ok 2 stop; unknown-field http_error - -;
    """,
    "vllm": """
        bytes-model/chat-stream-n2-split-utf8 protocol_error 8 length;
        bytes-model/first-logprobs-request-30s-stall ok 3 length;
        bytes-model/ignore-eos-hidden-special-tokens ok 5 length;
        bytes-model/stream-split-utf8 ok 16 length; chat-nonstream-logprobs ok 2 length;
        chat-nonstream-max1 ok 1 length; chat-nonstream-n2 protocol_error 8 length;
        chat-nonstream ok 8 length; chat-prompt-cache-details ok 2 length;
        chat-reasoning-nonstream ok 24 length; chat-reasoning-stream ok 24 length;
        chat-stream-contusage ok 6 length; chat-stream-gzip ok 4 length;
        chat-stream-logprobs ok 3 length; chat-stream-long-prefill ok 6 length;
        chat-stream-max1 ok 1 length; chat-stream-n2 protocol_error 8 length;
        chat-stream-usage ok 8 length; chat-stream ok 8 length; chat-tools-auto-stream ok 6 length;
        chat-tools-named-nonstream ok 245 stop; completions-nonstream ok 6 length;
        completions-stream-logprobs ok 3 length; completions-stream ok 6 length;
        completions-token-ids-prompt ok 3 length;
        completions-two-prompts-stream protocol_error 4 length; err-401-no-key http_error - -;
        err-bad-json http_error - -; err-max-tokens-too-big http_error - -;
        err-max-tokens-zero http_error - -; err-missing-messages http_error - -;
        err-negative-max-tokens http_error - -; err-prompt-too-long too_long - -;
        err-temperature-out-of-range http_error - -; err-unknown-model http_error - -;
        err-wrong-type http_error - -; ignore-eos-false-natural-stop ok 1 stop;
        ignore-eos-true ok 5 length; max-completion-tokens ok 3 length; min-tokens ok 5 stop;
        stop-string-nonstream ok 1 stop; stop-string ok 1 stop; unknown-field ok 2 length;
    """,
    "vllm-router": """
        chat-nonstream ok 6 length; chat-stream-usage ok 6 length; completions-stream ok 3 length;
        err-bad-json http_error - -; err-max-tokens-too-big http_error - -; ignore-eos ok 6 length;
        worker-down http_error - -; worker-killed-midstream truncated 10 -;
    """,
}
_RECV: Expect = {}
for engine, table in _TABLES.items():
    _RECV |= _table(table, f"{engine}/")


def _reads(name: str) -> list[tuple[int, bytes]]:
    """The recv blocks of a capture: (ns after the request, bytes); CR and LF are escaped."""
    text = (SAMPLES / f"{name}.txt").read_text(encoding="utf-8", errors="surrogateescape")
    _, _, response = text.partition("##### RESPONSE")
    reads = []
    for block in re.split(r"^--- ", response, flags=re.M)[1:]:
        head, _, shown = block.partition("\n")
        said = re.fullmatch(r"\+([\d.]+) ms  (\d+) B", head)
        if said is None:
            continue  # what became of the connection
        lines = shown.removesuffix("\n").split("\n")
        data = "".join(
            line[:-4] + "\r\n"
            if line.endswith("\\r\\n")
            else line[:-2] + "\n"
            if line.endswith("\\n")
            else line
            for line in lines
        ).encode("utf-8", "surrogateescape")
        data = _with_true_paths(data, int(said[2]))
        assert len(data) == int(said[2]), (name, head, len(data))
        reads.append((round(float(said[1]) * MS), data))
    return reads


def _with_true_paths(data: bytes, size: int) -> bytes:
    """Put paths of the right length back, which were replaced: else the framing is wrong."""
    for short in (b"/MODELS", b"/ENGINES", b"/SITE-PACKAGES"):
        count = data.count(short)
        if count and len(data) != size:
            data = data.replace(short, b"/".ljust(len(short) + (size - len(data)) // count, b"x"))
    return data


@pytest.mark.parametrize("name", sorted(_RECV))
def test_captured_reads(name: str) -> None:
    reads = _reads(name)
    for played in (reads, [(1, b"".join(data for _, data in reads))]):
        record = play(played)
        assert (record.status, record.output_tokens, record.finish_reason) == _RECV[name], (
            record.error
        )


@pytest.mark.parametrize(
    ("name", "first_event_ms", "first_token_ms", "last_token_ms"),
    [  # read off the captures by eye
        ("transformers/err-prompt-too-long", 53.7, 10974.8, 11791.4),
        ("llamacpp/chat-stream-long-prefill-return-progress", 129.0, 22942.2, 23217.1),
        ("vllm/bytes-model/ignore-eos-hidden-special-tokens", 15.9, 38.5, 38.5),
        ("vllm/bytes-model/first-logprobs-request-30s-stall", 30628.0, 30628.1, 30628.7),
        ("litellm/llamacpp-behind-long-prefill", 13505.1, 13505.1, 13590.3),
    ],
)
def test_first_token_is_text_not_the_first_byte(
    name: str, first_event_ms: float, first_token_ms: float, last_token_ms: float
) -> None:
    record = play(_reads(name))
    found = (record.first_event_ns, record.first_token_ns, record.last_token_ns)
    assert found == tuple(round(ms * MS) for ms in (first_event_ms, first_token_ms, last_token_ms))
