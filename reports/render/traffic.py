"""A workload beyond its lengths and arrivals in words, and what was sent of it as a table."""

from collections.abc import Mapping
from typing import Any

from ampacity.analysis.contract.summary import Summary
from ampacity.reports.render.figures import by_load, count, seconds, share, significant
from ampacity.reports.render.table import Rows, Table


def workload_facts(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of classes, sessions, shared prefixes and images.

    ``described``: ``workload`` of run.json.
    """
    classes = described.get("classes") or []
    found = [
        (f"Class {kind['name']}" if len(classes) > 1 else "Requests", text)
        for kind in classes
        if (text := _class(kind, classes))
    ]
    if sessions := described.get("sessions"):
        found.append(("Sessions", _sessions(sessions)))
    if prefixes := described.get("prefixes"):
        found.append(("Shared prefixes", _prefixes(prefixes)))
    if images := described.get("images"):
        sizes = ", ".join(images.get("sizes") or []) or f"{images.get('files')} files"
        found.append(("Images", f"{images.get('count')} a prompt, {sizes}"))
    if clipped := described.get("clipped_to_context"):
        found.append(("Cut to the model's context", f"{count(clipped)} requests"))
    if beyond := described.get("turns_beyond_context"):
        found.append(("Left out", f"{count(beyond)} turns that would not fit the model's context"))
    return found


def side_title(described: Mapping[str, Any], side: str, more: str = "") -> str:
    """Return the heading of a side's lengths: with sessions, that of their first message."""
    first = described.get("sessions") and side == "input"
    return f"First message, tokens{more}" if first else f"{side.capitalize()} tokens{more}"


def traffic_table(summary: Summary) -> Table:
    """Return, by stage and class, what was planned, what was sent, and what was answered."""
    held = {entry.stage: entry for entry in summary.traffic}
    rows = Rows(
        "Traffic",
        [
            (stage, held[stage.index].gap_cv, kind)
            for stage in by_load(summary.stages)
            if stage.index in held
            for kind in held[stage.index].classes
        ],
    )
    rows.words("load", lambda row: row[0].name)
    rows.words("class", lambda row: row[2].name)
    rows.figure("planned", "of requests", lambda row: row[2].planned_share, share, why="")
    rows.figure("sent", "of requests", lambda row: row[2].share, share)
    rows.figure("requests", "", lambda row: row[2].requests, count)
    rows.figure("ok", "", lambda row: row[2].ok, count)
    rows.figure("failed", "", lambda row: row[2].failed, count)
    rows.figure("cancelled", "", lambda row: row[2].cancelled, count)
    rows.figure("cut off", "unfinished", lambda row: row[2].unfinished, count)
    rows.figure("gap CV", "arrivals", lambda row: row[1], significant, why="")
    rows.figure("input", "tokens p50", lambda row: row[2].input_tokens.p50, count, why="")
    rows.figure("output", "tokens p50", lambda row: row[2].output_tokens.p50, count, why="")
    rows.figure("cached", "of input", lambda row: row[2].cached_share, share, why="")
    for head, value in (
        ("TTFT p50", lambda row: row[2].ttft_from_schedule_s.p50),
        ("TTFT p95", lambda row: row[2].ttft_from_schedule_s.p95),
    ):
        rows.figure(head, "whole stage", value, seconds, why="")
    return rows.done()


def lengths_line(workload: Mapping[str, Any]) -> str:
    """Return the realised lengths, else those planned: ``prompts p50 128 tokens, p99 506; …``."""
    realised, parts = workload.get("realised") or {}, []
    for what, name, side in (("prompts", "input", "sent"), ("answers", "output", "received")):
        sides = realised.get(f"{name}_tokens") or {}
        held = sides.get(side) or sides.get("planned") or {}
        if held.get("p50") and held.get("p99"):
            parts.append(f"{what} p50 {count(held['p50'])} tokens, p99 {count(held['p99'])}")
    return "; ".join(parts)


def _class(kind: Mapping[str, Any], classes: list[Mapping[str, Any]]) -> str:
    parts = []
    if len(classes) > 1 and all("weight" in k for k in classes):
        parts = [share(kind["weight"] / sum(k["weight"] for k in classes))]
        parts += [f"{side} {kind[f'{side}_tokens']['text']}" for side in ("input", "output")]
    if kind.get("correlation"):
        parts.append(f"rank correlation {kind['correlation']:g}")
    if kind.get("arrivals"):
        parts.append(f"arrivals {kind['arrivals']}")
    if kind.get("clients"):
        parts.append(f"{kind['clients']} clients")
    if models := kind.get("models"):
        parts.append(
            f"model {models[0]}"
            if len(models) == 1
            else f"{len(models)} models, {models[0]} to {models[-1]}"
        )
    if body := kind.get("extra_body"):
        parts.append(", ".join(f"{name} {value}" for name, value in body.items()))
    if kind.get("headers"):
        parts.append(f"headers {', '.join(kind['headers'])}")
    if kind.get("slos"):
        parts.append(f"SLO {', '.join(kind['slos'])}")
    if cancel := kind.get("cancel"):
        after = cancel.get("after_ms") or cancel.get("after_tokens") or {}
        unit = "ms" if cancel.get("after_ms") else "tokens"
        parts.append(f"{share(cancel['share'])} leave after {after.get('text')} ({unit})")
    return "; ".join(parts)


def _sessions(held: Mapping[str, Any]) -> str:
    def text(name: str, of: Mapping[str, Any] = held) -> str:
        value = of.get(name)
        return str(value["text"]) if isinstance(value, Mapping) and "text" in value else str(value)

    parts = [f"{held['mean_requests']:.3g} requests on average", f"turns {text('turns')}"]
    if held.get("think_ms"):
        parts.append(f"pause {text('think_ms')} (ms)")
    if held.get("user_tokens"):
        parts.append(f"later messages {text('user_tokens')} (tokens)")
    if steps := held.get("steps"):
        parts.append(
            f"tool calls {text('calls', steps)}, "
            f"each result {text('result_tokens', steps)} (tokens)"
        )
        if steps.get("delay_ms"):
            parts.append(f"a tool takes {text('delay_ms', steps)} (ms)")
        if branches := steps.get("branches"):
            parts.append(
                f"{share(branches['share'])} of the calls ask {text('width', branches)} helpers"
            )
    if held.get("limit_tokens"):
        parts.append(f"compacted above {count(held['limit_tokens'])} tokens")
    parts.append(
        f"history of {'planned texts' if held.get('history') == 'planned' else 'the real answers'}"
    )
    return "; ".join([*parts, f"a failed turn {held.get('on_failed_turn')}s its session"])


def _prefixes(held: Mapping[str, Any]) -> str:
    if held.get("cached_share") is not None:
        pool = held["pools"][0]
        return (
            f"{share(held['cached_share'])} of the input tokens cached, "
            f"by {count(pool['pool'])} texts (Zipf {pool['zipf']:g})"
        )
    return "; ".join(
        f"{pool['name']}: {pool['tokens']['text']} tokens, {count(pool['pool'])} texts"
        + (f" (Zipf {pool['zipf']:g})" if pool["zipf"] else "")
        + (f", in {share(pool['share'])} of the prompts" if pool["share"] < 1 else "")
        for pool in held["pools"]
    )
