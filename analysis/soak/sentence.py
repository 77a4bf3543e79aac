"""A soak in one sentence, and the command that goes on from it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.capacity.levels import number_text
from ampacity.analysis.contract.soak import Soak, SoakChange
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.next_run import again, budgets_times, resume_command, sweep_instead
from ampacity.analysis.soak.change_point import WINDOWS_MIN
from ampacity.analysis.verdict import other_load
from ampacity.durations import duration_text, rounded_up

NAMED = 2
SPARE = 3  # windows that a busy client may spoil
LEAST_COUNTING = 0.2  # share of the windows: below it a longer soak is no remedy


def clock(seconds: float) -> str:
    """Return the time since the start: ``03:10``, with seconds where there are some."""
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes // 60:02}:{minutes % 60:02}"
    return f"{text}:{rest:02}" if rest else text


def size_text(value: float, unit: str) -> str:
    """Return a figure with its unit: ``412 ms``, ``3.1 %``, ``183 MB``, ``49.9 req/s``."""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "share":
        return f"{round(value * 100, 3):.3g} %"
    if unit == "bytes":
        return f"{value / 1e6:.4g} MB"
    return f"{value:.4g}" if unit == "requests" else f"{value:.4g} {unit}"


def change_text(change: SoakChange) -> str:
    """Return ``since 03:10 (window 19) from 210 ms to 265 ms``, or ``no change``."""
    if change.verdict == "inconclusive":
        return f"inconclusive: {change.reason}"
    if change.after is None or change.before is None or change.since_s is None:
        return "no change"
    before, after = (size_text(v, change.unit) for v in (change.before, change.after))
    if change.verdict == "drift":
        return f"drifts from {before} to {after}"
    return f"since {clock(change.since_s)} (window {change.window}) from {before} to {after}"


def soak_sentence(summary: Summary) -> str:
    """Return verdict and changes in words."""
    assert summary.soak is not None
    soak, slos = summary.soak, ", ".join(slo.text for slo in summary.slos)
    at = f"{number_text(soak.rate_rps)} req/s over {duration_text(round(soak.duration_s, 1))}"
    parts = [f"No SLO was given: {at}."]
    if summary.slos:
        why = "; ".join(f"{v.slo}: {v.reason}" for v in soak.slo_verdicts if v.verdict != "met")
        parts = [f"{soak.verdict.capitalize()} at {at}: {soak.reason or why or slos}."]
    changed = changes(soak)
    if changed:
        more = f", and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        texts = ", ".join(f"{c.name} {change_text(c)}" for c in changed[:NAMED])
        at_client = "" if of_server(changed) else "nothing of the server; "
        parts.append(f"Changed: {at_client}{texts}{more}.")
    elif any(c.verdict == "no change" for c in soak.changes):
        parts.append("Nothing changed over the windows.")
    else:
        parts.append("Too few windows to tell what changed.")
    sentence = " ".join(filter(None, [other_load(summary), *parts]))
    if summary.partial:
        sentence = f"Partial run ({summary.partial}): {sentence[0].lower()}{sentence[1:]}"
    return sentence


def changes(soak: Soak) -> list[SoakChange]:
    """Return the figures that changed, those of the client last."""
    found = [c for c in soak.changes if c.after is not None]
    return sorted(found, key=lambda c: not of_server([c]))


def of_server(changed: Sequence[SoakChange]) -> bool:
    """Return whether any of the figures is not the client's own."""
    return any(not change.name.startswith("client ") for change in changed)


def soak_command(summary: Summary, meta: Mapping[str, Any], path: str) -> str | None:
    """Return the next command: what is left, a longer soak where something is open, or a sweep."""
    words, soak = list(meta.get("command_line") or ()), summary.soak
    assert soak is not None
    if words[1:2] != ["soak"]:
        return None
    if str(summary.partial or "").startswith(("interrupted", "killed")):
        return resume_command(words, path)
    few = all(change.verdict == "inconclusive" for change in soak.changes)
    if few or (summary.slos and soak.verdict == "inconclusive"):
        count = 1 - len(soak.client_limited_windows) / max(soak.windows, 1)
        wanted = (WINDOWS_MIN + SPARE) / max(count, LEAST_COUNTING)
        window_s = soak.planned_s // wanted if few and count == 1 else soak.window_s
        length_s = max(soak.planned_s, wanted * (window_s := max(window_s, 1.0)))
        length_s = rounded_up(length_s if few else 2 * length_s)
        length = {"--duration": duration_text(length_s), "--window": duration_text(window_s)}
        return again(words, length | budgets_times(words, length_s / soak.duration_s))
    return sweep_instead(meta)
