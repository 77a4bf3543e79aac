"""The texts of good answers, kept beside a run for a checker: ``answers-N.jsonl``, N the process, only where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.send.secrets import redact


class KeptAnswers:
    """Appends a line for each answer to ``path``, until that holds ``left_bytes``.

    It is called from the receive path: a disk that is full or gone ends the keeping, not the run.
    """

    def __init__(
        self, path: Path, left_bytes: int, *, prompts: bool, secrets: tuple[str, ...]
    ) -> None:
        """``prompts``: what was asked stands beside the answer."""
        self._path, self._left_bytes, self._prompts, self._secrets = (
            path,
            left_bytes,
            prompts,
            secrets,
        )

    def keep(self, exchange: Exchange) -> None:
        """The text of a good answer, without what was reasoned."""
        record = exchange.record
        if record.status != "ok" or self._left_bytes <= 0:
            return
        line: dict[str, Any] = {"request_id": record.request_id, "class": record.class_}
        if self._prompts:
            body = msgspec.json.decode(exchange.request.partition(b"\r\n\r\n")[2])
            line["prompt"] = self._hidden(
                body.get("messages") or body.get("prompt") or body.get("input")
            )
        line["answer"] = self._hidden(exchange.said())
        if calls := exchange.told().calls:
            line["tool_calls"] = [
                {"name": call.name, "arguments": self._hidden(call.arguments)} for call in calls
            ]
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._left_bytes -= len(data := text.encode("utf-8", "replace"))
        if self._left_bytes >= 0:
            try:
                with self._path.open("ab") as file:
                    file.write(data)
            except OSError:
                self._left_bytes = 0

    def _hidden(self, value: Any) -> Any:
        """``value`` without a secret in any of its texts."""
        if isinstance(value, str):
            return redact(value, self._secrets)
        if isinstance(value, list):
            return [self._hidden(item) for item in value]
        return {k: self._hidden(v) for k, v in value.items()} if isinstance(value, dict) else value
