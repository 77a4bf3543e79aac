"""What a request may ask: validation of its body, without a server."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.simulator.server.apierrors import ApiError
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.protocol import Api, Call, decode, parse
from ampacity.simulator.server.text import characters
from tests.support.repeats import often
from tests.support.simulator.simulated_server import CHAT, HELLO, PLAIN, read_frames


def parsed(body: dict[str, Any], api: Api, max_model_len: int = 4096, header: str = "") -> Call:
    return parse(
        body,
        api=api,
        models=("tiny",),
        max_model_len=max_model_len,
        default_id="00",
        header_id=header,
        natural_tokens=20,
    )


# parameters of a chat, and a part of the error message
BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"model": 7}, "body.model"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": -5, "stream": True}, "at least 1, got -5."),
    ({"max_tokens": 100_000}, "cannot be greater than max_model_len=4096"),
    ({"max_tokens": 4095}, "maximum context length is 4096 tokens"),
    ({"max_tokens": "4"}, "body.max_tokens"),
    ({"max_tokens": True}, "body.max_tokens"),
    ({"max_tokens": 1.5}, "body.max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"temperature": -3}, "temperature must be non-negative"),
    ({"temperature": "hot"}, "body.temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stream": "yes"}, "body.stream"),
    ({"stream_options": {"include_usage": True}}, "stream=True"),
    ({"stream_options": 1}, "body.stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"seed": "x"}, "body.seed"),
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": 100_000}, "at most 512 answers"),
    ({"best_of": 2}, "best_of is not simulated"),
    ({"tools": [{}]}, "tools is not simulated"),
    ({"response_format": {"type": "json_object"}}, "response_format is not"),
    ({"top_logprobs": 2}, "`logprobs` must be set to true"),
    ({"logprobs": True, "top_logprobs": 21}, "greater than max allowed: 20"),
    ({"stop": [""]}, "stop cannot contain an empty string"),
    ({"stop": [1]}, "body.stop"),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0"),
    ({"messages": [{"role": "user", "content": "x " * 4088}]}, "leaves no room"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "maximum context length"),
    ({"messages": "hello"}, "valid list"),
    ({"messages": []}, "at least 1 item"),
    ({"messages": ["hello"]}, "body.messages.0"),
    ({"messages": [{"role": "user", "content": 5}]}, "Only text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Only text"),
]


@pytest.mark.parametrize(
    ("path", "payload", "status", "words"),
    [
        (CHAT, b'{"model": "x", "messages": [', 400, "JSON decode error"),
        (CHAT, b"\xff\xfe", 400, "JSON decode error"),
        (CHAT, b"[" * 200_000, 400, "JSON decode error"),
        (CHAT, b"", 400, "JSON decode error"),
        (CHAT, [1], 400, "valid dictionary"),
        (CHAT, {"max_tokens": 4}, 400, "body.messages"),
        (CHAT, {"messages": HELLO, "model": "other"}, 404, "The model `other` does not exist"),
        *((CHAT, {"messages": HELLO} | given, 400, words) for given, words in BAD_PARAMETERS),
        (PLAIN, {"max_tokens": 4}, 400, "body.prompt"),
        (PLAIN, {"prompt": ["a", 5]}, 400, "body.prompt.1"),
        (PLAIN, {"prompt": "a", "echo": True}, 400, "echo is not simulated"),
        (PLAIN, {"prompt": []}, 400, "body.prompt"),
        (PLAIN, {"prompt": "a", "logprobs": -1}, 400, "must be a positive value"),
    ],
)
def test_bad_requests_are_answered_as_vllm_answers(
    path: str, payload: Any, status: int, words: str
) -> None:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    with pytest.raises(ApiError) as refused:
        parsed(decode(data), "chat" if path == CHAT else "completions")
    error = json.loads(refused.value.body)["error"]
    assert (refused.value.status, error["code"]) == (status, status)
    assert words in error["message"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner)
    ),
    max_leaves=6,
)
fields = "model messages prompt max_tokens min_tokens stream stream_options seed n".split()
fields += "temperature top_p stop logprobs top_logprobs max_completion_tokens ignore_eos".split()


some = st.dictionaries(st.sampled_from(fields), values)
# Half of them have a good prompt, so that some are served.
bodies = some | some.map(
    lambda body: {"max_tokens": 3} | body | {"messages": HELLO, "prompt": "a b", "model": "tiny"}
)


@settings(deadline=None, max_examples=often(15, 60))
@given(bodies, st.booleans(), st.text(max_size=10))
def test_whatever_is_asked_is_answered_or_refused(
    body: dict[str, Any], chat: bool, header: str
) -> None:
    """Any JSON object gives a valid call, with frames of JSON, or an ApiError with a JSON body."""
    refused = None
    try:
        call = parsed(body, "chat" if chat else "completions", 64, header)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert json.loads(refused.body)["error"]["code"] == refused.status
        return
    assert call.prompt_tokens >= 1
    for choice in call.choices:
        assert 1 <= choice.ending.tokens <= call.limit_tokens
        assert len(call.prompts[choice.prompt]) + call.limit_tokens <= 64
    texts, reasons = read_frames(call, Face())
    for choice in call.choices:
        assert texts[choice.index] == characters(choice.seed, 0, choice.ending.characters)
        assert reasons[choice.index] == choice.ending.finish_reason
