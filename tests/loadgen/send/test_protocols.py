"""The body of a request, and the words of an error."""

import json

import pytest

from ampacity.loadgen.send.protocols import Dialect, RequestShape, error_text, excerpt


def test_the_body_asks_for_exactly_the_planned_tokens() -> None:
    chat = json.loads(RequestShape("chat", "m").body("Hi", 7))
    assert chat == json.loads("""{"model": "m", "messages": [{"role": "user",
        "content": "Hi"}], "max_tokens": 7, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "ignore_eos": true}""")
    plainest = Dialect(False, False, False, "max_completion_tokens")
    shape = RequestShape("completions", "m", plainest, {"temperature": 0, "stream": False})
    assert json.loads(shape.body("Hi", 7)) == json.loads("""{"model": "m", "prompt": "Hi",
        "max_completion_tokens": 7, "stream": false, "temperature": 0}""")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","code":4}}', "m"),
        (b'{"error":"s"}', "s"),
        (b'{"detail":"d"}', "d"),
        (b'{"object":"error","message":"m","code":400}', "m"),
        (b'{"detail":[{"msg":"x"}]}', '[{"msg":"x"}]'),
        (b'{"error":{"code":5}}', '{"code":5}'),
        (b"[1]", "[1]"),
        (b"plain\r\n  text\t", "plain text"),
        (b"\xff\x00bin", "\ufffd\ufffdbin"),
        (b"", ""),
    ],
)
def test_the_servers_own_words(body: bytes, message: str) -> None:
    assert error_text(body) == message


def test_an_excerpt_is_one_short_printable_line() -> None:
    found = excerpt(b"a\x1b[31m\n" * 1000)
    assert len(found) == 200
    assert found.isprintable()
