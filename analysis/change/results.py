"""The results of compare and gate, as they are in the JSON (docs/compare.md, docs/ci.md)."""

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ampacity.analysis.contract.part import Interval


class Result(msgspec.Struct, frozen=True):
    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object; a field that is UNSET is absent."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Setting(Result, frozen=True):
    """A field that must be equal in compared runs and is not, with the value of each run."""

    variable: str
    values: list[Any]


class RunSummary(Result, frozen=True):
    name: str
    path: str
    run_id: str | None
    started_utc: str | None
    seed: int | str | None
    model: str | None
    url: str | None
    engine: str | None
    engine_version: str | None
    hardware: str | None
    quantization: str | None
    gpus: int
    gpu_hour_usd: float | None
    requests: int
    failed: int
    unfinished: int
    best_stage: str | None
    predicted: bool
    client_limited_stages: list[int]
    other_lengths: list[str]
    cached_token_share: float | None
    input_tokens: float | None
    input_tokens_per_planned: float | None
    input_tokens_relative_se: float | None
    output_tokens: float | None
    output_tokens_per_planned: float | None
    output_tokens_relative_se: float | None


class ShownChange(Result, frozen=True):
    """A change against the first run; ``tested_change`` is what the test is about."""

    change: float | None
    change_ci: Interval
    tested_change: float | None
    p: float


class Line(Result, frozen=True, kw_only=True):
    """A figure of all runs; ``higher_is_better`` None: none is the better one.

    ``brackets``: intervals of a figure without a test. ``lower_bound``: the p99 it uses has no
    upper end. ``at_least``: the capacity it uses is only a lower bound.
    """

    question: str
    name: str
    label: str
    higher_is_better: bool | None
    values: list[float | None]
    brackets: list[Interval] | None = None
    reasons: list[str | None]
    best: str | None
    changes: list[ShownChange | None]
    verdict: str
    winner: str | None = None
    reason: str | None = None
    smallest_seen: float | None = None
    note: str | None = None
    lower_bound: list[bool] | UnsetType = UNSET
    at_least: list[bool] | UnsetType = UNSET


class QuantileChange(Result, frozen=True):
    """One quantile of two runs; an infinite one is null and listed in ``infinite``.

    ``change`` is that of the two values; ``shift``, that of the quantile's neighbourhood, is what
    is tested. ``at_least``: whose interval has no upper end.
    """

    q: float
    reference_s: float | None
    other_s: float | None
    infinite: list[str]
    at_least: list[bool]
    change: float | None = None
    change_ci: Interval | None = None
    shift: float | None = None
    slower: bool | None = None
    p: float | None = None
    smallest_seen: float | None = None
    verdict: str = "unknown"
    reason: str | None = None


class Shift(Result, frozen=True):
    metric: str
    reference: str
    other: str
    quantiles: list[QuantileChange]

    @property
    def changed(self) -> list[QuantileChange]:
        return [q for q in self.quantiles if q.verdict == "differs"]


class CurveStage(Result, frozen=True):
    load: str
    achieved_rps: float
    stable: bool | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_p99_ci: Interval | None


class Curve(Result, frozen=True):
    run: str
    stages: list[CurveStage]


class Comparison(Result, frozen=True):
    schema_version: int
    sentence: str
    notes: list[str]
    assumed_run_noise: float | None
    compared: bool
    other_work: str | None
    aa: bool
    level: str | None
    interleaved_pairs: int | None
    interleaved_pairs_planned: int | None
    same_schedule: bool
    slos: list[str]
    runs: list[RunSummary]
    differences: list[Setting]
    scorecard: list[Line]
    shift: list[Shift]
    curves: list[Curve]
    next_command: str | None = None


SHIFT_SHOWN = 0.01  # a larger difference between tested change and that of the figures is reported


class Check(Result, frozen=True):
    """A line of the gate's result.

    ``change`` is relative (error_rate: in points), > 0 where the figure is higher. ``shift`` is
    what the test is about: by how much the neighbourhood of the quantile moved.
    """

    name: str
    kind: str  # change | slo | sanity | capacity
    level: str | None
    verdict: str = "inconclusive"  # pass | regression | met | violated | inconclusive
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    change_ci: Interval | None = None
    shift: float | None = None
    tolerance: float | None = None
    p_regression: float | None = None
    p_equivalence: float | None = None
    more_requests: int | None = None
    reason: str | None = None

    @property
    def title(self) -> str:
        return f"{self.name} at {self.level}" if self.level else self.name

    @property
    def tested(self) -> float | None:
        """Return the change that is tested, where it is a point or more off that of the figures."""
        if self.shift is None or self.change is None:
            return None
        return self.shift if abs(self.change - self.shift) > SHIFT_SHOWN else None


class GateResult(Result, frozen=True, kw_only=True):
    """A gate's result; where nothing can be compared, only the fields without a default.

    ``stage_s``: how long each load of the candidate lasted, in s, over all its runs.
    """

    command: ClassVar[str] = "gate"
    schema_version: int | UnsetType = UNSET
    verdict: str  # pass | regression | inconclusive | cannot_compare
    sentence: str
    same_schedule: bool | UnsetType = UNSET
    family: int | UnsetType = UNSET
    alpha: float | UnsetType = UNSET
    look: int | UnsetType = UNSET
    looks: int | UnsetType = UNSET
    alpha_of_look: float | UnsetType = UNSET
    baseline_runs: int | UnsetType = UNSET
    candidate_runs: int | UnsetType = UNSET
    notes: list[str]
    untracked: dict[str, str]
    checks: list[Check]
    stage_s: dict[str, float] = {}


class CheckResult(GateResult, frozen=True, kw_only=True):
    """The result of ``ampacity check``: limits without a baseline.

    ``verdict``: met | violated | inconclusive | not_checked.
    """

    command: ClassVar[str] = "check"
    run: str | UnsetType = UNSET
    requests: int | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET
