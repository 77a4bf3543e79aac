"""What a rig, real or virtual, keeps of its stages: the budget that is left, the numbers of requests, the judgements."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ampacity.config import Settings
from ampacity.loadgen.rundir.files import RunWriter
from ampacity.progress import Progress
from ampacity.workloads.profile import Workload
from ampacity.workloads.schedule import Schedule, closed_schedule, open_schedule

Enough = Callable[[dict[str, Any]], str | None]
"""Why a stage, judged as far as it came, need not go on; None: it must."""
LOOKS = (0.15, 0.25, 0.4, 0.6, 0.8)  # parts of a stage after which an ``Enough`` is asked


class BaseRig(ABC):
    """What an experiment needs of a rig, real or virtual; the part of one that needs no engine."""

    typical_e2e_s: float  # of a middling request, alone

    def __init__(self, settings: Settings, writer: RunWriter, progress: Progress) -> None:
        self.settings = settings
        self.lengths: str | None = None  # of the curve that the next stages belong to
        self.stages: list[dict[str, Any]] = []  # judged, in the order in which they ran
        self.ended: tuple[str, str] | None = None  # (status, reason): no further stage can run
        self._writer = writer
        self._progress = progress
        self._first_request_id = 0
        self._repetitions = 0  # of stages that were disturbed: they send the same lengths at the same times, other texts
        self._left_requests = settings.max_requests
        self._left_tokens = settings.max_tokens

    @abstractmethod
    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, enough: Enough | None = None
    ) -> dict[str, Any] | None:
        """One open-loop stage, ended as soon as there is ``enough``; its judgement (docs/summary.md), None when the run is over."""

    @abstractmethod
    async def closed_stage(self, concurrency: int) -> dict[str, Any] | None:
        """One closed-loop stage of ``concurrency`` virtual users, with the settings' think time and ramp."""

    def stage_s(self, rate_rps: float) -> float:
        """How long an open stage of the sweep is."""
        return self.settings.duration_s

    def tell(self, text: str) -> None:
        """A line for those who wait."""
        self._progress.note(text)

    def again(self, option: str, value: str) -> str:
        """The command of this run with another value of ``option``."""
        words = [str(word) for word in self._writer.meta["command_line"]]
        for gone in (option, "--out", "-o"):  # the directory is taken
            at = words.index(gone) if gone in words else len(words)
            words = [*words[:at], *words[at + 2 :]]
        return shlex.join([*words, option, value])

    def note_down(self, name: str, value: Any) -> None:
        """Write an entry of run.json."""
        self._writer.meta[name] = value
        self._writer.write_meta()

    def _note(self, text: str) -> None:
        self._progress.note(text)
        self._writer.meta["notes"].append(text)

    def _note_sharing(self, schedule: Schedule) -> None:
        """Say once in a run where prompts share less than the workload describes."""
        note = schedule.shared and schedule.shared.note
        if note and not any(": prefixes: " in told for told in self._writer.meta["notes"]):
            self._note(f"stage {len(self.stages)}: {note}")

    def _count(self, more: Mapping[str, int]) -> None:
        """Add to counts of run.json's ``workload``."""
        workload = self._writer.meta["workload"]
        workload |= {name: workload.get(name, 0) + n for name, n in more.items() if n}

    def _spend(self, requests: int, tokens: int) -> None:
        if self._left_requests is not None:
            self._left_requests -= requests
        if self._left_tokens is not None:
            self._left_tokens -= tokens

    @property
    def _schedule(self) -> int:
        """The number of the next stage's schedule."""
        return len(self.stages) - self._repetitions

    def _next(self) -> dict[str, Any]:
        """What makes the next stage's schedule differ from the others'."""
        return {
            "seed": self.settings.seed,
            "stage": self._schedule,
            "first_request_id": self._first_request_id,
        }

    def _open_schedule(self, rate_rps: float, duration_s: float) -> Schedule:
        return open_schedule(
            self.settings.workload, rate_rps=rate_rps, duration_s=duration_s, **self._next()
        )

    def _closed_schedule(self, requests: int) -> Schedule:
        return closed_schedule(self.settings.workload, requests=requests, **self._next())


def answers_told(workload: Workload) -> bool:
    """Whether histories have what the server answered."""
    return workload.sessions is None or workload.sessions.history == "answers"
