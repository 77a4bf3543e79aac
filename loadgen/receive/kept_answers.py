"""Keep the texts of good answers for a quality checker: ``answers-N.jsonl``, N the process."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.send.secrets import redact
from ampacity.loadgen.send.surrogates import map_texts


class KeptAnswers:
    """Appends a line for each answer to ``path``, ``left_bytes`` at most.

    A full or lost disk ends the keeping, not the run: this is called from the receive path.
    """

    def __init__(
        self,
        path: Path,
        left_bytes: int,
        *,
        prompts: bool,
        secrets: Callable[[], tuple[str, ...]],
        later: Callable[[Callable[[], object]], object] = lambda write: write(),
    ) -> None:
        """Keep answers in ``path``, with ``prompts`` each with its prompt; ``later`` writes."""
        self._path, self._left_bytes, self._later = path, left_bytes, later
        self._prompts, self._secrets = prompts, secrets

    def keep(self, exchange: Exchange) -> None:
        """Append the text of a good answer, without reasoning."""
        record = exchange.record
        if record.status != "ok" or self._left_bytes <= 0:
            return
        line: dict[str, Any] = {"request_id": record.request_id, "class": record.class_}
        if self._prompts:
            body = msgspec.json.decode(exchange.request.partition(b"\r\n\r\n")[2])
            prompt = body.get("messages") or body.get("prompt") or body.get("input")
            line["prompt"] = self._redacted(prompt)
        line["answer"] = self._redacted(exchange.text())
        if calls := exchange.content().calls:
            line["tool_calls"] = [
                {"name": call.name, "arguments": self._redacted(call.arguments)} for call in calls
            ]
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._left_bytes -= len(data := text.encode("utf-8", "replace"))
        if self._left_bytes >= 0:
            self._later(partial(self._append, data))

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError:
            self._left_bytes = 0

    def _redacted(self, value: Any) -> Any:
        return map_texts(value, lambda text: redact(text, self._secrets()))
