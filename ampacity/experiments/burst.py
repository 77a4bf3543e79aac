"""The burst: base load, a step or another shape, base load again, in one open-loop stage."""

import math
from dataclasses import asdict, dataclass

from ampacity.durations import duration_text
from ampacity.experiments.stages.rig import Rig
from ampacity.live_panel import Outlook
from ampacity.values import ConfigError

RAMP = (1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3)  # of the step's height
SHAPES = ("step", "ramp")
BASE_MARGIN = 1.5  # over the length needed: fewer requests may arrive than expected


@dataclass(frozen=True)
class BurstPlan:
    """Rates in requests/s, lengths in s. ``shape``: step, ramp, or factors of equal parts."""

    base_rps: float
    factor: float = 3.0
    base_s: float = 60.0
    burst_s: float = 30.0
    recovery_s: float = 120.0
    shape: str = "step"
    max_recovery_s: float | None = None  # the limit of a gate

    @property
    def factors(self) -> tuple[float, ...]:
        """Return the load factor of each equal part of the burst. Raises ConfigError."""
        if self.shape == "step":
            return (self.factor,)
        if self.shape == "ramp":
            return tuple(1 + (self.factor - 1) * part for part in RAMP)
        try:
            given = tuple(float(part) for part in self.shape.split("/"))
        except ValueError:
            given = ()
        if not given or not all(0 < part < 1e6 for part in given):
            raise ConfigError(
                f"--shape {self.shape}: write {', '.join(SHAPES)}, or factors above 0, as 2/3/2"
            )
        return given

    @property
    def duration_s(self) -> float:
        """Return the length of the whole stage."""
        return self.base_s + self.burst_s + self.recovery_s

    @property
    def mean_rps(self) -> float:
        """Return the mean rate of the whole stage."""
        mean = sum(self.factors) / len(self.factors)
        return (
            self.base_rps * (self.base_s + mean * self.burst_s + self.recovery_s) / self.duration_s
        )

    @property
    def arrivals(self) -> str:
        """Return the arrival process: Poisson, with its rate in steps."""
        rates = "/".join(f"{rate:.12g}" for rate in (1.0, *self.factors, 1.0))
        part = f"/{self.burst_s / len(self.factors):.12g}" * len(self.factors)
        return f"steps:rates={rates},lengths={self.base_s:.12g}{part}/{self.recovery_s:.12g}"

    @property
    def settled_base(self) -> tuple[float, float]:
        """Return (expected requests, length in s) of the base phase after it has settled."""
        from ampacity.analysis.burst.timeline import SETTLE_SHARE

        length_s = (1 - SETTLE_SHARE) * self.base_s
        return length_s * self.base_rps, length_s

    def too_short(self, answer_s: float = 0.0) -> str | None:
        """Return why the base phase is too short to show the normal level; None if it is not.

        ``answer_s``: duration of a single answer.
        """
        from ampacity.analysis.burst.recovery import BASE_ANSWERS_MIN, BASE_REQUESTS_MIN
        from ampacity.analysis.burst.timeline import SETTLE_SHARE

        expected, length_s = self.settled_base
        needed_s = max(BASE_REQUESTS_MIN / self.base_rps, BASE_ANSWERS_MIN * answer_s)
        if length_s >= needed_s:
            return None
        about = (
            f", {length_s / answer_s:.1f} answers long"
            if length_s < BASE_ANSWERS_MIN * answer_s
            else ""
        )
        enough_s = math.ceil(BASE_MARGIN * needed_s / (1 - SETTLE_SHARE))
        return (
            f"--base-duration {duration_text(self.base_s)} is too short: about {expected:.0f} "
            f"requests are due once it has settled{about}; {BASE_REQUESTS_MIN} requests and "
            f"{BASE_ANSWERS_MIN:.0f} answers are needed to know what to come back to: "
            f"--base-duration {enough_s}s"
        )

    async def run(self, rig: Rig) -> None:
        """Run the stage."""
        if short := self.too_short(rig.typical_e2e_s):
            rig.tell(f"the recovery time will not be known: {short}")
        parts = f"{duration_text(self.base_s)} base, {duration_text(self.burst_s)} burst"
        after = f"{duration_text(self.recovery_s)} recovery"
        rig.tell(f"the run takes {duration_text(self.duration_s)}: {parts}, {after}")
        rig.note_down("burst", asdict(self))
        rig.expect(Outlook(1))
        await rig.open_stage(self.mean_rps, self.duration_s)
