"""Read and write durations with their unit: ``500ms``, ``30s``, ``2m``, ``1.5h``, ``2d``."""

import math
import re
from decimal import Decimal

UNITS_S = {
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86_400),
}
_DURATION = re.compile(rf"\s*(\d+(?:\.\d*)?|\.\d+)\s*({'|'.join(UNITS_S)})\s*")


def read_duration(text: str) -> float | None:
    """Return the seconds of a number and its unit; None: it is no duration."""
    match = _DURATION.fullmatch(text)
    return float(Decimal(match[1]) * UNITS_S[match[2]]) if match else None


def exact_text(seconds: float) -> str:
    """Return ``110s``, ``50ms``, ``300us``: the largest of these units with a number of 1 or more.

    ``read_duration`` reads exactly ``seconds`` from it.
    """
    value = Decimal(repr(float(seconds)))
    unit = next((unit for unit in ("s", "ms") if value >= UNITS_S[unit]), "us")
    return f"{(value / UNITS_S[unit]).normalize():f}{unit}"


def duration_text(seconds: float) -> str:
    """Return ``seconds`` as ``exact_text``, but in m, h or d where that is short and exact."""
    for unit, parts in (("d", 10), ("h", 10), ("m", 1)):
        number = parts * seconds / float(UNITS_S[unit])
        if number > 1.5 * parts and abs(number - round(number)) < 1e-9 * number:
            return f"{round(number) / parts:g}{unit}"
    return exact_text(seconds)


def rounded_up(seconds: float) -> float:
    """Return ``seconds`` rounded up for a recommendation.

    Whole seconds below 1.5 min, whole minutes below 1.5 h, then tenths of hours or days.
    """
    unit = next((unit for unit in "dhm" if seconds > 1.5 * float(UNITS_S[unit])), "s")
    step_s = float(UNITS_S[unit]) / (10 if unit in "dh" else 1)
    return math.ceil(round(seconds / step_s, 6)) * step_s
