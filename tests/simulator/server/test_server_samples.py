"""Answers to recorded requests have the same fields in the same order as a real vLLM's.

The captures are in tests/data/streams. Words, ids, times and counts of tokens that depend
on a tokenizer differ; names, order, nesting, types, finish reasons and the number of chunks do not.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.face import Face
from tests.support.simulator.simulated_server import run, served

SAMPLES = Path(__file__).parents[2] / "data" / "streams" / "vllm"
CONFIG = linear_config(0.0005, 0.0, max_num_seqs=8, max_model_len=2048)
# Fields of vLLM that the simulator leaves out where they are null, as no client reads them.
LEFT_OUT = {"routed_experts", "prompt_text", "ec_transfer_params", "metrics", "multimodal_tokens"}
KEPT = {"finish_reason", "object", "role", "owned_by", "index", "code", "type", "param"}


def skeleton(value: Any, name: str = "") -> Any:
    """Names and types; the words of an error without what depends on the tokenizer."""
    if isinstance(value, dict) and name == "top_logprobs" and "token" not in value:
        return "by token"
    if isinstance(value, dict):
        return {k: skeleton(v, k) for k, v in value.items() if k not in LEFT_OUT or v is not None}
    if isinstance(value, list):
        return [] if name == "bytes" else [skeleton(v, name) for v in value]
    if name == "message":
        return re.sub(r"\d+ items", "N items", value)
    if name in KEPT or value is None or isinstance(value, bool):
        return value
    return type(value).__name__


def read(name: str) -> tuple[str, str, bytes, int, str, list[Any]]:
    """(method, path, request body, status, content type, decoded events or body) of a capture."""
    text = (SAMPLES / f"{name}.txt").read_text()
    asked, answered = text.split("##### RESPONSE", 1)
    line = re.search(r"^(GET|POST) (\S+) HTTP", asked, re.M)
    method, path = line.groups()
    body = asked.split("\n\n", 1)[1].strip().encode()
    plain = "".join(
        line for line in answered.split("\n")[1:] if not line.startswith("--- ")
    ).replace("\\r\\n", "\r\n")
    head, _, rest = plain.partition("\r\n\r\n")
    status = int(head.split(" ")[1])
    kind = re.search(r"content-type: ([^\r]+)", head).group(1)
    if "event-stream" in kind:
        events = re.findall(r"data: (\{.*?\}|\[DONE\])\\n\\n\r\n", rest)
        return method, path, body, status, kind, events
    return (
        method,
        path,
        body,
        status,
        kind,
        [rest.replace("\\n", "\n") if not rest.startswith("{") else rest],
    )


def decoded(events: list[str]) -> list[Any]:
    return [event if event == "[DONE]" else skeleton(json.loads(event)) for event in events]


@pytest.mark.parametrize(
    ("name", "face"),
    [
        ("chat-stream", Face()),
        ("chat-stream-usage", Face()),
        ("chat-stream-contusage", Face()),
        ("chat-stream-max1", Face()),
        ("chat-stream-logprobs", Face()),
        ("chat-nonstream", Face()),
        ("chat-nonstream-max1", Face()),
        ("chat-nonstream-n2", Face()),
        ("chat-nonstream-logprobs", Face()),
        ("max-completion-tokens", Face()),
        ("ignore-eos-true", Face(natural_tokens=2)),
        ("min-tokens", Face(natural_tokens=1)),
        ("completions-stream", Face()),
        ("completions-nonstream", Face()),
        ("completions-stream-logprobs", Face()),
        ("completions-token-ids-prompt", Face()),
        ("completions-two-prompts-stream", Face()),
        ("ignore-eos-false-natural-stop", Face(natural_tokens=1)),
        ("chat-reasoning-nonstream", Face(reasoning_share=1.0, prompt_tokens_details=True)),
        ("chat-prompt-cache-details", Face(reasoning_share=1.0, prompt_tokens_details=True)),
        ("unknown-field", Face()),
        ("models", Face()),
        ("tokenize", Face()),
        ("version", Face()),
        ("err-bad-json", Face()),
        ("err-max-tokens-too-big", Face()),
        ("err-max-tokens-zero", Face()),
        ("err-negative-max-tokens", Face()),
        ("err-missing-messages", Face()),
        ("err-temperature-out-of-range", Face()),
        ("err-unknown-model", Face()),
        ("err-wrong-type", Face()),
        ("err-unknown-path", Face()),
        ("err-method", Face()),
    ],
)
def test_the_answer_has_the_shape_of_vllms(name: str, face: Face) -> None:
    method, path, body, status, kind, wanted = read(name)

    async def ask() -> None:
        async with (
            served(CONFIG, face=face) as (_, url, session),
            session.request(method, url + path, data=body or None) as response,
        ):
            text = await response.text()
            found = re.findall(r"data: (.*)\n\n", text) if "event-stream" in kind else [text]
            assert response.status == status
            assert response.headers["Content-Type"].split(";")[0] == kind.split(";")[0]
            shapes, expected = decoded(found), decoded(wanted)
            if path == "/tokenize":
                shapes[0].pop("tokens")
                expected[0].pop("tokens")
            for shape, wish in zip(shapes, expected, strict=True):
                assert json.dumps(shape) == json.dumps(wish)  # with the order of the names

    run(ask)
