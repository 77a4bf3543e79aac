"""What an API cannot carry of recorded messages is named, and is not claimed to be sent."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampacity.loadgen.send.forms import form_notes
from ampacity.loadgen.send.protocols import Api
from ampacity.workloads.prompts.files import read_prompts
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from tests.support.stage_driving import requests_to

USER = {"role": "user", "content": "what is it?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOLD = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]
PARTS = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
IMAGE = [{"role": "user", "content": PARTS}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def trace_of(tmp_path: Path, *rows: dict[str, Any]) -> Replayed:
    path = tmp_path / "t.jsonl"
    lengths = {"input_tokens": 9, "output_tokens": 2}
    lines = (json.dumps({"timestamp": i} | lengths | row) for i, row in enumerate(rows))
    path.write_text("\n".join(lines))
    return replayed(read_trace(path, keep_texts=True), Replay(), 1)


@pytest.mark.parametrize(
    ("api", "said"),
    [
        ("chat", []),
        (
            "completions",
            [
                "--api completions: messages are sent as one text, without images or other parts "
                "without a text in 1 requests, calls of tools in 2 requests, definitions of tools or "
                "of a format in 2 requests"
            ],
        ),
        (
            "messages",
            [
                "--api messages: prompts are sent as recorded, in the form of chat: images or other "
                "parts without a text in 1 requests, calls of tools in 2 requests, results of tools "
                "in 2 requests, definitions of tools or of a format in 2 requests"
            ],
        ),
    ],
)
def test_what_an_api_does_not_carry_is_counted(tmp_path: Path, api: Api, said: list[str]) -> None:
    """Requests are counted, not messages, which are kept once."""
    told = {"messages": TOLD, "tools": TOOLS}
    trace = trace_of(tmp_path, told, {"messages": IMAGE}, told, {"messages": [USER]})
    assert form_notes(api, trace.recorded, range(4)) == said
    assert form_notes(api, trace.recorded, [3]) == []


def test_a_text_has_no_tools_in_its_body(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"messages": TOLD, "tools": TOOLS})
    maker = requests_to(api="completions", file=trace.recorded)
    maker.prepare(trace.schedule)
    body = json.loads(maker.make(0).partition(b"\r\n\r\n")[2])
    assert body["prompt"] == "what is it?\n\nsunny"
    assert "tools" not in body


@pytest.mark.parametrize(("api", "said"), [("chat", 0), ("completions", 1), ("responses", 1)])
def test_images_of_a_prompt_file_are_counted(tmp_path: Path, api: Api, said: int) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": IMAGE}) + "\n" + json.dumps({"messages": [USER]}))
    assert ["a text in 1 requests" in note for note in form_notes(api, read_prompts(path), ())] == [
        True
    ] * said
