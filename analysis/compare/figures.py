"""The figures of a scorecard: what a run delivers and costs, made of what was measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from ampacity.analysis.change import engine
from ampacity.analysis.change.results import Line
from ampacity.analysis.compare.pairs import ComparedRun, Pairing
from ampacity.analysis.compare.shift import NOTHING_COUNTS

NO_PRICE = "no price of a GPU hour (--gpu-hour)"
Runs = Sequence[ComparedRun]


@dataclass(frozen=True)
class Figure:
    """A line of the scorecard: the run's ``factor`` times its ``basis`` to the ``power``."""

    question: str
    name: str
    label: str
    higher: bool | None  # None: no run wins it
    basis: str = ""  # see Pairing.value
    factor: Callable[[ComparedRun], float | None] = lambda run: 1.0
    power: int = 1

    def line(self, runs: Runs, values: Sequence[float | str], **known: Any) -> Line:
        """Return the line of these values; a text is the reason why there is none."""
        numbers = [None if isinstance(v, str) else v for v in values]
        valued = [v for v in numbers if v is not None]
        best = (max if self.higher else min)(valued, default=None)
        alone = self.higher is not None and len(valued) > 1 and valued.count(best or 0.0) == 1
        tested = self.higher is not None and len(valued) == len(runs)
        line = Line(
            question=self.question,
            name=self.name,
            label=self.label,
            higher_is_better=self.higher,
            values=numbers,
            reasons=[v if isinstance(v, str) else None for v in values],
            best=runs[numbers.index(best)].name if alone else None,
            changes=[None] * len(runs),
            verdict="inconclusive" if tested else "unknown",
        )
        return structs.replace(line, **known)

    def value(self, run: ComparedRun, basis: float | str) -> float | str:
        factor = self.factor(run)
        if isinstance(basis, str) or factor is None:
            return basis if isinstance(basis, str) else NO_PRICE
        return NOTHING_COUNTS if basis == 0 and self.power < 0 else factor * basis**self.power

    def change(self, pairing: Pairing) -> engine.Change | str:
        found = pairing.change(self.basis)
        a, b = self.factor(pairing.a), self.factor(pairing.b)
        if isinstance(found, str) or not a or not b:
            return found if isinstance(found, str) else NO_PRICE
        if self.power == 1 and a == b:
            return found
        change = engine.log_change(
            self.power * found.log_ratio + math.log(b / a), found.se, found.df
        )
        shown = found.change
        return change if shown is None else change.beside(a, b * (1 + shown) ** self.power)


def _per_gpu(run: ComparedRun) -> float:
    return 1 / run.gpus


def _cost(name: str, label: str, basis: str, times: float, power: int = -1) -> Figure:
    def usd(run: ComparedRun) -> float | None:
        return None if run.usd_per_s is None else run.usd_per_s * times

    return Figure("cost", name, label, False, basis, usd, power)


TOKENS = "output_tokens_per_s_per_gpu", "output tokens/s per GPU"
USD_PER_TOKENS = "usd_per_million_output_tokens", "USD per million output tokens"
PER_DOLLAR = "ttft_p99_s_x_usd_per_hour", "TTFT p99 in s × USD/h (lower is better)"
FIGURES = (
    Figure("errors", "error_rate", "failed or cut off, where compared", False, "failed"),
    Figure("capacity", "goodput_rps", "goodput per instance, req/s", True, "good"),
    Figure("capacity", "goodput_rps_per_gpu", "goodput per GPU, req/s", True, "good", _per_gpu),
    Figure("capacity", *TOKENS, True, "tokens", _per_gpu),
    _cost(*USD_PER_TOKENS, "tokens", 1e6),
    _cost("usd_per_thousand_good_requests", "USD per 1,000 good requests", "good", 1e3),
    _cost("usd_per_thousand_accepted_requests", "USD per 1,000 accepted requests", "accepted", 1e3),
    _cost(*PER_DOLLAR, "ttft_p99", 3600.0, 1),
    Figure("tail", "ttft_p99_over_p50", "TTFT p99 / p50", None, "ttft_tail"),
    Figure("tail", "e2e_p99_over_p50", "E2E p99 / p50", None, "e2e_tail"),
)
BURST = Figure("burst", "recovery_s", "recovery after the burst, s", False)
C_MAX = Figure("capacity", "c_max", "C_max, requests in flight", None)
CAPACITY = Figure("capacity", "capacity_rps", "capacity per instance, req/s", True)
CAPACITY_PER_GPU = Figure("capacity", "usable_rps_per_gpu", "capacity per GPU, req/s", True)
