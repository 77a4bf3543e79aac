"""Goodput: requests/s that met every SLO, and those of them whose answer was accepted."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.contract.capacity import Offline
from ampacity.analysis.contract.stage import Accepted, Stage
from ampacity.analysis.metrics.requests import Bools, Floats
from ampacity.analysis.slo import ERROR_RATE, Slo
from ampacity.analysis.stage.throughput import is_figure

_YES, _NO = {"true", "1", "yes", "accepted"}, {"false", "0", "no", "rejected"}


class LabelsError(ValueError):
    """A file of labels that cannot be read; one line that names the file and the line."""


def goodput_rps(met: int, span_s: float) -> float:
    """Return requests/s that met every SLO; ``span_s`` is from ``throughput.span_s``."""
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
    is_json = rows[0][1].startswith("{")
    names = [] if is_json else _cells(*rows[0])
    if not is_json and not {"request_id", "accepted"} <= set(names):
        at, line = rows[0]
        raise LabelsError(f"{at}: the header must name request_id and accepted, it is {line!r:.60}")
    found: dict[int, bool] = {}
    for at, line in rows if is_json else rows[1:]:
        cells = [] if is_json else _cells(at, line)
        try:
            row = json.loads(line) if is_json else dict(zip(names, cells, strict=False))
            request_id, text = int(str(row["request_id"])), str(row["accepted"]).strip().lower()
        except (json.JSONDecodeError, RecursionError) as error:
            raise LabelsError(f"{at}: this is no JSON: {error}") from None
        except (KeyError, ValueError, TypeError):
            raise LabelsError(
                f"{at}: needs request_id, a whole number, and accepted, true or false"
            ) from None
        if text not in _YES | _NO:
            raise LabelsError(f"{at}: accepted is {text!r}: write true or false")
        if found.setdefault(request_id, text in _YES) != (text in _YES):
            raise LabelsError(f"{at}: request {request_id} is labelled twice, once each way")
    return found


def _cells(at: str, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise LabelsError(f"{at}: this is no CSV: {error}") from None


def accepted_goodput(
    judged: Sequence[bool | None] | None,
    meets: Bools | None,
    output_tokens: Floats,
    window_s: float,
    cost_usd: float | None,
) -> Accepted:
    """Return requests inside every SLO whose answer was accepted, per second, and their cost.

    ``judged``: whether the answer of each request was accepted. Unlabelled ones (None) count as not
    accepted, and are counted. ``cost_usd`` is that of the whole window.
    """
    found = dict.fromkeys(f for f in Accepted.__struct_fields__ if f != "reason")
    if judged is None:
        why = "nobody judged the answers (ampacity report --labels FILE, or --checker COMMAND)"
        return Accepted(**found, reason=why)
    if meets is None:
        return Accepted(**found, reason="an SLO could not be judged")
    good = np.array([bool(label) for label in judged], dtype=np.bool_) & meets
    n, tokens = int(np.count_nonzero(good)), float(output_tokens[good].sum())
    tokens_per_s: float | None = tokens / window_s if window_s > 0 else 0.0
    if np.isnan(tokens):  # nobody counted them
        tokens_per_s = None
    return Accepted(
        requests=n,
        rps=goodput_rps(n, window_s),
        share=n / len(judged) if judged else None,
        output_tokens_per_s=tokens_per_s,
        unlabelled=judged.count(None),
        cost_per_result_usd=_cost(cost_usd, n, 1),
        cost_per_million_output_tokens=_cost(cost_usd, tokens, 1e6),
        reason=None,
    )


def _cost(cost_usd: float | None, count: float | None, per: float) -> float | None:
    return cost_usd / count * per if cost_usd is not None and count and count > 0 else None


def window_cost_usd(fleet_inputs: Mapping[str, Any], window_s: float) -> float | None:
    """Return GPU-hours of one instance over the window times their price, if that is known."""
    price = fleet_inputs.get("gpu_hour_usd")
    gpus = int(fleet_inputs.get("tensor_parallel") or 1)
    return None if price is None else float(price) * gpus * window_s / 3600


def offline_throughput(
    stages: Sequence[Stage], slos: Sequence[Slo], fleet_inputs: Mapping[str, Any]
) -> Offline:
    """Return the highest sustained throughput and its cost, for work without a latency SLO.

    Of the stages that have a steady state, were not limited by the client and violated no error
    rate, the one with most output tokens per second.
    """
    found = dict.fromkeys(Offline.__struct_fields__)
    if any(slo.metric != ERROR_RATE for slo in slos):
        return Offline(**found | {"reason": "a latency SLO is given: see capacity"})
    kept_up = [
        s
        for s in stages
        if s.stable
        and s.ok
        and s.slo_met is not False
        and not s.client_limited
        and not s.ended_early
    ]
    if not kept_up:
        return Offline(**found | {"reason": "no stage kept its load up"})
    best = max(
        [s for s in kept_up if is_figure(s)] or kept_up,
        key=lambda s: (s.output_tokens_per_s or 0.0, s.achieved_rps),
    )
    per_s = window_cost_usd(fleet_inputs, 1.0)
    return Offline(
        stage=best.index,
        achieved_rps=best.achieved_rps,
        output_tokens_per_s=best.output_tokens_per_s,
        output_tokens_per_s_ci=best.output_tokens_per_s_ci,
        cost_per_million_output_tokens=_cost(per_s, best.output_tokens_per_s, 1e6),
        cost_per_thousand_requests=_cost(per_s, best.achieved_rps, 1e3),
        reason=None,
    )
