"""The one sentence at the top of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.slo import Slo, duration_text


def write_verdict(summary: Mapping[str, Any]) -> str:
    """The verdict in plain words, from a summary whose other figures are in place."""
    sentence = _finding(summary)
    if summary["partial"]:
        sentence = f"Partial run ({summary['partial']}): {sentence[0].lower()}{sentence[1:]}"
    return f"Predicted: {sentence[0].lower()}{sentence[1:]}" if summary["predicted"] else sentence


def _finding(summary: Mapping[str, Any]) -> str:
    stages, capacity = summary["stages"], summary["capacity"]
    if not summary["requests"]:
        return "Nothing was measured: no request was recorded."
    if not any(s["ok"] for s in stages):
        worst = max(summary["errors"].items(), key=lambda item: item[1])
        return f"No request was answered: {worst[1]} of {summary['requests']} ended as {worst[0]}."
    if all(s["client_limited"] for s in stages):
        return "No finding: the client could not keep up with the load in any stage, so nothing says what the server can do."
    if not summary["slos"]:
        best = max((s for s in stages if not s["client_limited"]), key=lambda s: s["achieved_rps"])
        return (
            f"Up to {_n(best['achieved_rps'])} requests/s and {_n(best['output_tokens_per_s'])} output tokens/s were "
            "carried; no SLO was given, so no capacity is named."
        )
    if capacity["usable_rps"] is None:
        return _nothing_usable(summary)
    return _usable(summary)


def _usable(summary: Mapping[str, Any]) -> str:
    capacity, fleet = summary["capacity"], summary["fleet"]
    low, high = capacity["usable_rps_ci"]
    lower_bound = capacity["crossing"] == "lower_bound"
    rate = f"{_n(capacity['usable_rps'])} requests/s"
    if lower_bound:
        sentence = (
            f"One instance carries at least {rate} with {_limits(summary['slos'])}; no stage broke the SLO"
        )
    else:
        binding = next(s for s in summary["slos"] if s["text"] == capacity["binding_slo"])
        upper = f"and {_n(high)}" if high is not None else "and an unknown upper end"
        sentence = f"One instance carries {rate} (95 % between {_n(low)} {upper}) with {_limits([binding])}"
        others = len(summary["slos"]) - 1
        if others:
            sentence += f" ({others} other SLO{'s' if others > 1 else ''} met there)"
    c_max = round(capacity["c_max"], 1) if capacity["c_max"] < 10 else round(capacity["c_max"])
    sentence += f"; C_max {'at least ' if lower_bound else ''}{c_max:g} requests in flight"
    if fleet["instances"] is not None:
        unit = "instance" if fleet["instances"] == 1 else "instances"
        gpus = "GPU" if fleet["gpus"] == 1 else "GPUs"
        sentence += (
            f"; {fleet['instances']} {unit} ({fleet['gpus']} {gpus}) for {_n(fleet['peak_rps'])} requests/s"
        )
    return sentence + "."


def _nothing_usable(summary: Mapping[str, Any]) -> str:
    capacity = summary["capacity"]
    limits = _limits(summary["slos"])
    if capacity["usable_rps_ci"] is None:
        return f"No verdict on {limits}: {capacity['reason']}."
    high = capacity["usable_rps_ci"][1]
    return f"No load was shown to meet {limits}; usable rate is below {_n(high)} requests/s ({capacity['reason']})."


def _limits(slos: list[dict[str, Any]]) -> str:
    named = [(Slo(s["metric"], s["quantile"], s["limit_s"]), s["limit_s"]) for s in slos]
    return " and ".join(f"{slo.name} ≤ {_spaced(duration_text(limit))}" for slo, limit in named)


def _spaced(duration: str) -> str:
    unit = duration.lstrip("0123456789.")
    return f"{duration.removesuffix(unit)} {unit}"


def _n(value: float) -> str:
    """Three significant digits, no exponent."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:g}"
