"""The controls with which a page sizes the fleet anew, and what its script needs for that.

``page.js`` does the arithmetic of ``ampacity.analysis.capacity.fleet_figures`` on these numbers.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.contract.summary import Summary, to_json
from ampacity.analysis.other_limits import AtLimit, at_limit

INSTANCES_ASSUMED = 10  # of a run without a peak: a fleet to begin with


@dataclass(frozen=True)
class Control:
    """A slider with its number; ``value`` None: as at the peak."""

    name: str
    label: str
    low: float
    high: float
    step: float
    value: float | None

    @property
    def text(self) -> str:
        return "" if self.value is None else f"{self.value:.15g}"


def what_if(summary: Summary, tried: Sequence[AtLimit], directory: str) -> dict[str, Any] | None:
    """Return the controls and the numbers behind them; None where no capacity was found.

    ``directory`` is that of the run, for the command that says the same.
    """
    fleet, rate = summary.fleet, summary.capacity.capacity_rps
    if not rate:
        return None
    texts = " and ".join(slo.text for slo in summary.slos)
    limits = list(tried) or [at_limit(texts, summary.capacity)]
    peak = fleet.peak_rps or float(f"{INSTANCES_ASSUMED * rate:.2g}")
    step = 10.0 ** (math.floor(math.log10(peak)) - 2)
    price = fleet.gpu_hour_usd or 0.0
    controls = [
        Control("peak_rps", "Peak, requests/s", step, 10 * peak, step, peak),
        Control("safety_factor", "Safety factor", 1.0, 2.0, 0.05, fleet.safety_factor or 1.5),
        Control("gpu_hour_usd", "Price of a GPU hour, $", 0.0, max(10.0, 4 * price), 0.05, price),
        Control(
            "utilisation",
            "Mean load over the day, % of what the fleet carries",
            1,
            100,
            1,
            None,
        ),
    ]
    return {
        "controls": controls,
        "assumed": fleet.peak_rps is None,
        "command": shlex.join(["ampacity", "plan", directory]),
        "data": {
            "tensor_parallel": fleet.tensor_parallel,
            "input_tokens": fleet.input_tokens_mean,
            "output_tokens": fleet.output_tokens_mean,
            "slos": [s.text for s in summary.slos if s.text not in {at.slo for at in limits}],
            "limits": [to_json(limit) for limit in limits],
        },
    }
