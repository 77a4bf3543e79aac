"""Whether the figures of run.json can be what a run wrote: checked once, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.metrics import RecordsError

_LARGEST = 2.0**62  # of a time in ns
_MOST_REQUESTS = 2 * 10**7  # of a stage
_COUNTS = ("index", "scheduled_requests")
_AMOUNTS = ("offered_rps", "concurrency", "ramp_s")
_TIMES = ("start_ns", "end_ns", "drained_ns")
_AUDIT = ("slip_p50_s", "slip_p99_s", "slip_max_s", "loop_lag_p99_s", "receive_delay_p99_s", "cpu_fraction")
_FLEET = ("peak_rps", "tensor_parallel", "safety_factor", "gpu_hour_usd")


def check_figures(meta: Mapping[str, Any]) -> None:
    """Raises RecordsError, naming the field, where a figure of run.json is no number or out of any range."""
    _check(meta, ("warmup_requests",), "", whole=True)
    _check(meta.get("fleet_inputs") or {}, _FLEET, "fleet_inputs.")
    for i, stage in enumerate(meta.get("stages") or []):
        where = f"stages[{i}]."
        _check(stage, _COUNTS, where, whole=True)
        _check(stage, _AMOUNTS, where)
        _check(stage, _TIMES, where, least=-_LARGEST)
        _check(stage.get("audit") or {}, _AUDIT, f"{where}audit.")


def _check(
    holder: Mapping[str, Any], names: tuple[str, ...], where: str, *, whole: bool = False, least: float = 0.0
) -> None:
    most = _MOST_REQUESTS if whole else _LARGEST
    for name in names:
        value = holder.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RecordsError(
                f"run.json: {where}{name} is {value!r}, not a number: the file was changed or is damaged"
            )
        if not least <= value <= most or (whole and value != int(value)):
            raise RecordsError(
                f"run.json: {where}{name} is {value!r}, which no run writes: the file was changed"
            )
