"""The gate's answer as Markdown, for a CI service's step summary or a merge request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.gate_text import about_changes, change, chart, figure, title

_SIGNS = {
    "pass": "✅ pass",
    "regression": "❌ regression",
    "broken": "❌ broken",
    "inconclusive": "❔ inconclusive",
}


def gate_markdown(result: Mapping[str, Any]) -> str:
    """Verdict, table, the changes drawn as text, and what to know about them."""
    sign = {"pass": "✅", "inconclusive": "❔"}.get(result["verdict"], "❌")
    found = [f"## {sign} ampacity gate", "", escaped(result["sentence"]), ""]
    if result["checks"]:
        found += [
            "| check | baseline | candidate | change (95 % interval) | tolerance | verdict |",
            "|---|---|---|---|---|---|",
        ]
    for c in result["checks"]:
        tolerance = "" if c["tolerance"] is None else f"{c['tolerance'] * 100:.3g} %"
        cells = (
            title(c),
            figure(c, "baseline"),
            figure(c, "candidate"),
            change(c),
            tolerance,
            _SIGNS[c["verdict"]],
        )
        found.append(f"| {' | '.join(escaped(cell) for cell in cells)} |")
    drawn = chart(result)
    if drawn:
        found += ["", "```text", *drawn, "```"]
    said = [f"{title(c)}: {c['reason']}" for c in result["checks"] if c["reason"] and c["verdict"] != "pass"]
    said += [f"Not tracked: {name}, {reason}" for name, reason in result.get("untracked", {}).items()]
    notes = [f"- {escaped(text)}" for text in [*about_changes(result), *said, *result.get("notes", [])]]
    return "\n".join([*found, *([""] if notes else []), *notes]) + "\n"


def escaped(text: str) -> str:
    """Text that cannot end a table cell, open a tag or start a link."""
    for sign in "\\|<[`*":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
