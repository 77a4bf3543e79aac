"""Goodput: requests per second that met every SLO, of those that were offered.

And what a checker accepted of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.metrics.requests import Bools, Floats, Ints
from ampacity.analysis.slo import ERROR_RATE, Slo
from ampacity.analysis.stage.throughput import is_figure

_YES, _NO = {"true", "1", "yes", "accepted"}, {"false", "0", "no", "rejected"}


class LabelsError(ValueError):
    """A file of labels that cannot be read; one line that names the file and the line."""


def goodput_rps(met: int, span_s: float) -> float:
    """Return requests of the cohort that met every SLO, per second of the load that it is worth
    (``throughput.span_s``).
    """
    return met / span_s if span_s > 0 else 0.0


def parse_labels(lines: Iterable[str], where: str) -> dict[int, bool]:
    """Return request_id -> accepted, from JSON lines or CSV with a header. Raises LabelsError."""
    rows = [
        (f"{where}:{number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not rows:
        raise LabelsError(
            f'{where}: the file is empty; write lines such as {{"request_id": 0, "accepted": true}}'
        )
    names = None if rows[0][1].startswith("{") else _header(*rows.pop(0))
    found: dict[int, bool] = {}
    for at, line in rows:
        try:
            row = (
                json.loads(line) if names is None else dict(zip(names, _cells(line), strict=False))
            )
            request_id, text = int(str(row["request_id"])), str(row["accepted"]).strip().lower()
        except (json.JSONDecodeError, RecursionError, csv.Error) as error:
            raise LabelsError(
                f"{at}: this is no {'JSON' if names is None else 'CSV'}: {error}"
            ) from None
        except (KeyError, ValueError, TypeError):
            raise LabelsError(
                f"{at}: needs request_id, a whole number, and accepted, true or false"
            ) from None
        if text not in _YES | _NO:
            raise LabelsError(f"{at}: accepted is {text!r}: write true or false")
        if found.setdefault(request_id, text in _YES) != (text in _YES):
            raise LabelsError(f"{at}: request {request_id} is labelled twice, once each way")
    return found


def _header(at: str, line: str) -> list[str]:
    try:
        names = _cells(line)
    except csv.Error as error:
        raise LabelsError(f"{at}: this is no CSV: {error}") from None
    if not {"request_id", "accepted"} <= set(names):
        raise LabelsError(f"{at}: the header must name request_id and accepted, it is {line!r:.60}")
    return names


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]))]


def accepted_goodput(
    request_ids: Ints,
    meets: Bools | None,
    output_tokens: Floats,
    labels: Mapping[int, bool] | None,
    window_s: float,
    cost_usd: float | None,
) -> dict[str, Any]:
    """Return the ``accepted`` object.

    Requests inside every SLO whose answer was accepted, per second, and what one cost. Unlabelled
    answers count as not accepted, and are counted. ``cost_usd`` is that of the whole window.
    """
    result: dict[str, Any] = {
        "requests": None,
        "rps": None,
        "share": None,
        "output_tokens_per_s": None,
        "unlabelled": None,
        "cost_per_result_usd": None,
        "cost_per_million_output_tokens": None,
        "reason": None,
    }
    if labels is None:
        return result | {
            "reason": (
                "nobody judged the answers (ampacity report --labels FILE, or --checker COMMAND)"
            )
        }
    if meets is None:
        return result | {"reason": "an SLO could not be judged"}
    known = np.array([labels.get(int(i)) is not None for i in request_ids], dtype=np.bool_)
    good = np.array([labels.get(int(i), False) for i in request_ids], dtype=np.bool_) & meets
    n, tokens = (
        int(np.count_nonzero(good)),
        float(output_tokens[good].sum()),
    )  # NaN: nobody counted them
    counted = not np.isnan(tokens)
    return result | {
        "requests": n,
        "rps": goodput_rps(n, window_s),
        "share": n / len(request_ids) if len(request_ids) else None,
        "output_tokens_per_s": None if not counted else tokens / window_s if window_s > 0 else 0.0,
        "unlabelled": int(np.count_nonzero(~known)),
        "cost_per_result_usd": cost_usd / n if cost_usd is not None and n else None,
        "cost_per_million_output_tokens": cost_usd / tokens * 1e6
        if cost_usd is not None and tokens > 0
        else None,
    }


def window_cost_usd(fleet_inputs: Mapping[str, Any], window_s: float) -> float | None:
    """Return GPU-hours of one instance over the window times their price.

    None where no price is known.
    """
    price = fleet_inputs.get("gpu_hour_usd")
    gpus = int(fleet_inputs.get("tensor_parallel") or 1)
    return None if price is None else float(price) * gpus * window_s / 3600


def offline_throughput(
    stages: Sequence[dict[str, Any]], slos: Sequence[Slo], fleet_inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``offline`` object, for work without a latency SLO.

    The highest throughput that can be kept up, and its cost. Of the stages that have a steady
    state, were not limited by the client and broke no error rate, the one with most output tokens
    per second.
    """
    result: dict[str, Any] = {
        "stage": None,
        "achieved_rps": None,
        "output_tokens_per_s": None,
        "output_tokens_per_s_ci": None,
        "cost_per_million_output_tokens": None,
        "cost_per_thousand_requests": None,
        "reason": None,
    }
    if any(slo.metric != ERROR_RATE for slo in slos):
        return result | {"reason": "a latency SLO is given: see capacity"}
    kept_up = [
        s
        for s in stages
        if s["stable"]
        and s["ok"]
        and s["slo_met"] is not False
        and not s["client_limited"]
        and not s["ended_early"]
    ]
    if not kept_up:
        return result | {"reason": "no stage kept its load up"}
    best = max(
        [s for s in kept_up if is_figure(s)] or kept_up,
        key=lambda s: (s["output_tokens_per_s"] or 0.0, s["achieved_rps"]),
    )
    rate, tokens_per_s = best["achieved_rps"], best["output_tokens_per_s"]
    per_s = window_cost_usd(fleet_inputs, 1.0)
    return result | {
        "stage": best["index"],
        "achieved_rps": rate,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_per_s_ci": best.get("output_tokens_per_s_ci"),
        "cost_per_million_output_tokens": per_s / tokens_per_s * 1e6
        if per_s is not None and tokens_per_s
        else None,
        "cost_per_thousand_requests": per_s / rate * 1e3 if per_s is not None and rate else None,
    }
