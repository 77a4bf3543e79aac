"""Recorded messages that an API cannot take as they are recorded, in the form of chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ampacity.loadgen.send.protocols import PROTOCOLS, Api
from ampacity.workloads.prompts.files import PromptFile
from ampacity.workloads.traces.recorded import Recorded

_PARTS, _CALLS, _RESULTS, _TOOLS = (
    "images or other parts without a text",
    "calls of tools",
    "results of tools",
    "definitions of tools or of a format",
)


def form_notes(api: Api, file: PromptFile | Recorded | None, entries: Sequence[int]) -> list[str]:
    """Return a note on what of the recorded prompts ``entries`` this API loses, or may refuse."""
    if api == "chat" or file is None:
        return []
    with_messages = PROTOCOLS[api].conversation
    counts = _of_trace(file, entries) if isinstance(file, Recorded) else _of_file(file)
    if not with_messages:
        del counts[_RESULTS]  # their text is sent
    listed = ", ".join(f"{of} in {n} requests" for of, n in counts.items() if n)
    if not listed:
        return []
    if with_messages:
        return [f"--api {api}: prompts are sent as recorded, in the form of chat: {listed}"]
    return [f"--api {api}: messages are sent as one text, without {listed}"]


def _of_trace(file: Recorded, entries: Sequence[int]) -> dict[str, int]:
    kinds = [set(_kinds(msgspec.json.decode(text))) for text in file.messages]
    chosen = np.asarray(entries, dtype=np.int64)
    fields = np.array([bool(fields) for fields in file.fields])[file.field_of[chosen]]

    def requests(kind: str) -> int:
        of_messages: NDArray[np.int64] = np.array([kind in held for held in kinds], dtype=np.int64)
        sums = np.concatenate([[0], np.cumsum(of_messages[file.ids])])
        return int(np.count_nonzero(sums[file.start[chosen + 1]] > sums[file.start[chosen]]))

    counts = {kind: requests(kind) for kind in (_PARTS, _CALLS, _RESULTS)}
    return counts | {_TOOLS: int(fields.sum())}


def _of_file(file: PromptFile) -> dict[str, int]:
    counts = dict.fromkeys((_PARTS, _CALLS, _RESULTS, _TOOLS), 0)
    for entry in file.entries:
        counts[_PARTS] += any(_PARTS in _kinds(m) for turn in entry.turns for m in turn)
    return counts


def _kinds(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, list) and not all(part.get("text") for part in content):
        yield _PARTS
    if message.get("tool_calls") or message.get("function_call"):
        yield _CALLS
    if message.get("role") in ("tool", "function"):
        yield _RESULTS
