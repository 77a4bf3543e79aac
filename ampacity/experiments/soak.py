"""The soak: one load for hours, in windows that follow each other without a gap.

The load is one endless schedule; each window is a stage with a file of its own. A window's requests
that are in flight at its end go on beside the next one's. After each window another process, which
gives way to the load, writes summary and report anew.
"""

import asyncio
import shutil
import sys
import time
from dataclasses import asdict, dataclass

from ampacity.durations import duration_text
from ampacity.experiments.stages.live import LivePlayer
from ampacity.experiments.stages.rig import Rig
from ampacity.live_panel import Outlook
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.rotate import part_summary
from ampacity.values import ConfigError
from ampacity.workloads.profile import Workload
from ampacity.workloads.schedule import Schedule, endless_schedule

LEAD_S = 0.5  # before a window begins: its first requests are built
WINDOW_MIN_S = 1.0
GIVES_WAY = (("chrt", "-i", "0"), ("nice", "-n", "19"))  # commands: the first that there is
ENDS_WITHIN_S = 600.0  # an answer in flight at the end of a window may take so long


@dataclass(frozen=True)
class SoakPlan:
    """A load of ``rate_rps`` for ``duration_s``, in windows of ``window_s``."""

    rate_rps: float
    duration_s: float
    window_s: float

    def check(self, workload: Workload) -> None:
        """Raise ConfigError if the windows do not fit the duration or the workload."""
        endless_schedule(workload, rate_rps=self.rate_rps, begin_s=0.0, end_s=1.0, seed=0)
        if not WINDOW_MIN_S <= self.window_s <= self.duration_s:
            raise ConfigError(
                f"--window {duration_text(self.window_s)}: give at least "
                f"{duration_text(WINDOW_MIN_S)}, and at most the --duration of "
                f"{duration_text(self.duration_s)}"
            )

    async def run(self, rig: Rig) -> None:
        """Play every window."""
        assert isinstance(rig.player, LivePlayer)
        rig.note_down("soak", asdict(self))
        windows = -int(-self.duration_s // self.window_s)
        rig.tell(
            f"a soak of {duration_text(self.duration_s)} in {windows} windows of "
            f"{duration_text(self.window_s)}; summary and report are written after each"
        )
        await _Soak(self, rig, rig.player).run()


class _Soak:
    """A soak that is going on."""

    def __init__(self, plan: SoakPlan, rig: Rig, player: LivePlayer) -> None:
        self._plan, self._rig, self._player = plan, rig, player
        self._playing: list[asyncio.Task[None]] = []
        self._unanswered: tuple[str, str] | None = None
        self._over = asyncio.Event()  # a window has ended since the last checkpoint
        self._told = False  # that a checkpoint failed
        self._ids = self._tokens = 0  # of the windows so far

    async def run(self) -> None:
        """Play window after window, each drawn while the one before is played."""
        at_s, index = self._take_up()
        if at_s >= self._plan.duration_s:
            return
        self._expect(at_s, index)
        origin_ns = time.monotonic_ns() + round((LEAD_S - at_s) * 1e9)
        writing = asyncio.create_task(self._checkpoints())
        schedule, cut = self._draw(at_s)
        last = False
        while not last:
            end_s = self._end_of(at_s)
            if cut:  # it ends with the last request that may be sent
                end_s = at_s + float(schedule.scheduled_s.max(initial=0.0)) + 1e-6
            last = bool(cut) or end_s >= self._plan.duration_s
            plan = self._stage(index, schedule, end_s - at_s)
            task = asyncio.create_task(self._window(plan, origin_ns + round(at_s * 1e9), at_s))
            self._playing = [t for t in self._playing if not t.done() or t.exception()] + [task]
            at_s, index = end_s, index + 1
            with self._player.showing(plan):
                if last:
                    await asyncio.wait(self._playing)
                else:
                    schedule, cut = await asyncio.to_thread(self._draw, at_s)
                    await self._until(origin_ns + round((at_s - LEAD_S) * 1e9))
                    last = self._ended() is not None
        await asyncio.gather(*self._playing)
        writing.cancel()
        await asyncio.wait([writing])  # so that what follows is newer
        self._rig.ended = self._ended() or (("budget", cut) if cut else None)

    def _expect(self, at_s: float, index: int) -> None:
        """Set how many windows there are, with the pieces that seams made of some."""
        left_s = self._plan.duration_s - at_s
        while at_s < self._plan.duration_s:
            at_s, index = self._end_of(at_s), index + 1
        self._rig.expect(Outlook(index, left_s, part="window"))

    def _take_up(self) -> tuple[float, int]:
        """Return where in its load the soak begins or goes on, and the number of its next window."""
        stages, found = self._player.stages, None
        while stages and not found:
            at_s, plan = self._recorded(len(stages) - 1)
            part_summary(self._player.path, plan.index).unlink(missing_ok=True)
            found = self._rig.recorded.recall(plan)
            if not found and (not stages or stages[-1]["drained_ns"] is not None):
                self._ids = plan.schedule.first_request_id
                return at_s, plan.index
        if not found:
            return 0.0, 0
        for stage in stages[:-1]:
            if stage["drained_ns"] is None:  # killed while the next window was played
                self._rig.recorded.recall(self._recorded(stage["index"])[1])
        (meta, table), (at_s, plan) = found, self._recorded(plan.index)
        if not meta.get("interrupted"):
            return self._end_of(at_s), plan.index + 1
        self._ids = int(table["request_id"].to_numpy().max()) + 1
        cut_s = at_s + (meta["cut_ns"] + 1 - meta["start_ns"]) / 1e9  # its drain may have begun
        return min(cut_s, self._end_of(at_s)), plan.index + 1

    def _recorded(self, index: int) -> tuple[float, StagePlan]:
        """Return where a recorded window begins, and its plan."""
        stages = self._player.stages
        at_s = float(stages[index]["from_s"])
        if self._rig.settings.max_tokens and at_s:
            self._tokens = self._load(0.0, at_s).planned_tokens()
        self._ids = sum(stage["scheduled_requests"] for stage in stages[:index])
        schedule, _ = self._draw(at_s)
        return at_s, self._stage(index, schedule, self._end_of(at_s) - at_s)

    def _end_of(self, at_s: float) -> float:
        """Return the end of the window at ``at_s``; the first after a seam may be another length."""
        length_s = self._plan.window_s
        end_s = (int(at_s / length_s + 1e-9) + 1) * length_s
        if end_s - at_s < WINDOW_MIN_S:
            end_s += length_s
        return min(end_s, self._plan.duration_s)

    def _ended(self) -> tuple[str, str] | None:
        """Return how the soak ended, if it did before its time."""
        if any(task.done() and task.exception() for task in self._playing):
            return "aborted", "a window could not be played"  # whose error follows
        return self._player.ended() or self._unanswered

    def _draw(self, at_s: float) -> tuple[Schedule, str | None]:
        """Return the requests of the window at ``at_s``, and why they are the last ones."""
        settings = self._rig.settings
        drawn = self._load(at_s, self._end_of(at_s))
        schedule, unfit = self._player.fit(drawn, True)
        self._rig.add_counts(unfit)
        left = [
            None if limit is None else limit - used
            for limit, used in (
                (settings.max_requests, self._ids),
                (settings.max_tokens, self._tokens),
            )
        ]
        schedule, cut = schedule.capped(*left)
        self._ids += len(drawn)
        self._tokens += schedule.planned_tokens()
        return schedule, cut and self._rig.budget_text(cut)

    def _load(self, begin_s: float, end_s: float) -> Schedule:
        return endless_schedule(
            self._rig.settings.workload,
            rate_rps=self._plan.rate_rps,
            begin_s=begin_s,
            end_s=end_s,
            seed=self._rig.settings.seed,
            first_request_id=self._ids,
        )

    def _stage(self, index: int, schedule: Schedule, length_s: float) -> StagePlan:
        return StagePlan(
            index=index,
            kind="open",
            schedule=schedule,
            duration_s=length_s,
            offered_rps=self._plan.rate_rps,
            drain_s=ENDS_WITHIN_S,
            sticky=self._rig.settings.sticky,
        )

    async def _window(self, plan: StagePlan, start_ns: int, at_s: float) -> None:
        labels = {"schedule": 0, "lengths": None, "from_s": at_s}
        answered = await self._player.follow(plan, start_ns, labels)
        if len(plan.schedule) and not answered:
            why = f"no request of window {plan.index} was answered"
            self._unanswered = self._unanswered or ("aborted", why)
        self._over.set()

    async def _until(self, at_ns: int) -> None:
        while (left_ns := at_ns - time.monotonic_ns()) > 0 and not self._ended():
            await asyncio.sleep(min(left_ns / 1e9, 0.1))

    async def _checkpoints(self) -> None:
        """Write summary and report anew after windows, in a process that gives way to the load."""
        idle = next((words for words in GIVES_WAY if shutil.which(words[0])), ())
        report = ("report", "--quiet", str(self._player.path))
        nothing = asyncio.subprocess.DEVNULL
        while True:
            await self._over.wait()
            self._over.clear()
            judged = [stage for stage in self._player.stages if stage["drained_ns"]]
            process = await asyncio.create_subprocess_exec(
                *(*idle, sys.executable, "-m", "ampacity", *report),
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                start_new_session=True,
            )
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                    for half in self._player.path.rglob(f".*.{process.pid}"):
                        half.unlink()
            for stage in judged if status == 0 else ():  # its summary has what they mean
                stage["audit"]["stalls"] = []
            if status and not self._told:
                self._told = True
                self._rig.tell(f"no summary so far: see 'ampacity report {self._player.path}'")
