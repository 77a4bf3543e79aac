"""A sweep in virtual time: the simulated engine alone, no clock, no socket, the same run directory."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ampacity.analysis.stage.analyse import analyse_stage
from ampacity.config import Settings
from ampacity.experiments.stages.base_rig import LOOKS, BaseRig, Enough, answers_told
from ampacity.experiments.stages.context import fit_context
from ampacity.experiments.stages.provenance import out_path, run_meta, utc_now
from ampacity.experiments.sweep import sweep
from ampacity.experiments.virtual.playback import Played, play
from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.probe.look import Calibration, ProbeResult, Served
from ampacity.loadgen.rundir.files import RunWriter
from ampacity.loadgen.rundir.records import RequestRecord, to_batch
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.progress import Progress
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.values import ConfigError
from ampacity.workloads.schedule import Schedule

ORIGIN_NS = 1_000_000_000  # virtual time begins here, so that no time stamp is 0
REQUESTS_MIN = 2000  # in a stage, so that a p99 can be decided
IDLE_NS = 60_000_000_000  # between stages; each begins on an idle engine
STAGE_MAX_S = 3e7  # a year of engine time
PATIENCE_NS = (
    2**32 - 1
) * 1000  # 71 minutes, for which requests.parquet has room: then a user gives up


class Stopped(Exception):
    """The run is to end while a stage is played, of which nothing is kept."""


class VirtualRig(BaseRig):
    """Runs stages on an engine in virtual time; drives ``sweep`` as the real rig does."""

    def __init__(
        self, settings: Settings, deployment: Deployment, writer: RunWriter, progress: Progress
    ) -> None:
        super().__init__(settings, writer, progress)
        self._deployment = deployment
        self._start_ns = ORIGIN_NS
        self._playing = False
        sessions = settings.workload.sessions
        self._answers_told = answers_told(settings.workload)
        self._unfit: dict[str, int]  # of the stage's schedule: what the context cut, how many
        self._finish_s = 0.0 if sessions is None else sessions.finish_s
        median = Schedule(
            np.zeros(1),
            self._median("input_tokens"),
            self._median("output_tokens"),
            first_request_id=0,
        )
        alone = self._play(self._fit(median)).outcome
        self.typical_e2e_s = float(alone.finish_s[0])

    def _median(self, side: str) -> NDArray[np.int64]:
        return np.array([round(getattr(self.settings.workload, side).quantile(0.5))])

    def stage_s(self, rate_rps: float) -> float:
        return _stage_s(self.settings, rate_rps)

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, enough: Enough | None = None
    ) -> dict[str, Any] | None:
        duration_s = duration_s or self.stage_s(rate_rps)
        schedule = self._open_schedule(rate_rps, duration_s)
        schedule, cut = self._fit(schedule).capped(self._left_requests, self._left_tokens)
        if cut and len(schedule):
            duration_s = float(schedule.scheduled_s[-1]) + 1e-6
        if self._nothing_left(schedule, cut):
            return None
        played, decided = None, None
        with self._stoppable():
            played = self._play(schedule, until_s=duration_s + self._finish_s)
            if enough is not None:
                ended_s, decided = self._ended_when_enough(played, duration_s, rate_rps, enough)
                if decided:  # sessions are not played on
                    duration_s, cut, played = ended_s, None, self._play(schedule, until_s=ended_s)
        if played is None or self.ended:
            return None
        return self._judge(played, cut, duration_s, offered_rps=rate_rps, decided=decided)

    def stop(self, reason: str) -> None:
        """End the run, for a signal: the stage that is played is dropped, one that is written down is finished."""
        self.ended = ("interrupted", reason)
        if self._playing:
            raise Stopped

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        self._playing = True
        try:
            with self._progress.at_work(f"stage {len(self.stages)}"):
                yield
        except Stopped:
            pass
        finally:
            self._playing = False

    def _play(self, schedule: Schedule, **how: Any) -> Played:
        return play(
            self._deployment,
            schedule,
            seed=self.settings.seed,
            answers_told=self._answers_told,
            **how,
        )

    def _nothing_left(self, schedule: Schedule, cut: str | None) -> bool:
        if self.ended or not len(schedule):
            self.ended = self.ended or (("budget", cut) if cut else None)
            return True
        return False

    def _ended_when_enough(
        self, played: Played, duration_s: float, rate_rps: float, enough: Enough
    ) -> tuple[float, str | None]:
        """How long a stage takes that is looked at on its way, and why it ended."""
        index, start_ns = len(self.stages), self._start_ns
        records = _records(played, index, start_ns)
        waits_s = max(
            (
                slo.limit_s
                for slo in self.settings.slos
                if slo.metric in ("ttft", "e2e", "first_answer")
            ),
            default=0.0,
        )
        for look in LOOKS:
            now_ns = start_ns + int(look * duration_s * 1e9)
            end_ns = now_ns - int(waits_s * 1e9)  # what is due later may still meet its limit
            seen = [_as_of(r, now_ns) for r in records if r.scheduled_ns < end_ns]
            if not seen:
                continue
            meta = {
                "index": index,
                "kind": "open",
                "offered_rps": rate_rps,
                "concurrency": None,
                "start_ns": start_ns,
                "end_ns": end_ns,
                "scheduled_requests": len(seen),
                "drained_ns": now_ns,
                "ended_early": None,
                "audit": None,
            }
            table = pa.Table.from_batches([to_batch(seen)])
            decided = enough(
                analyse_stage(table, meta, self.settings.slos, self.settings.warmup_requests)
            )
            if decided:
                return look * duration_s, decided
        return duration_s, None

    async def closed_stage(self, concurrency: int) -> dict[str, Any] | None:
        count = 50 * concurrency
        while True:  # until the users are busy for the whole stage
            schedule = self._fit(self._closed_schedule(count))
            schedule, cut = schedule.capped(self._left_requests, self._left_tokens)
            if self._nothing_left(schedule, cut):
                return None
            ramp_s = self.settings.ramp_s
            duration_s = ramp_s + self.settings.duration_s
            played = None
            with self._stoppable():
                played = self._play(
                    schedule,
                    until_s=duration_s + self._finish_s,
                    users=concurrency,
                    users_until_s=duration_s,
                    think_s=self.settings.think_s,
                    ramp_s=ramp_s,
                )
            if played is None or self.ended:
                return None
            if cut or not played.used_up:
                break
            count *= 2
        return self._judge(played, cut, duration_s, concurrency=concurrency)

    def _judge(
        self,
        played: Played,
        cut: str | None,
        duration_s: float,
        *,
        offered_rps: float | None = None,
        concurrency: int | None = None,
        decided: str | None = None,
    ) -> dict[str, Any]:
        self._count(self._unfit)
        self._note_sharing(played.schedule)
        schedule, outcome = played.schedule, played.outcome
        index, start_ns, n = len(self.stages), self._start_ns, len(schedule)
        for record in _records(played, index, start_ns):
            self._writer.append(record)
        self._first_request_id = max(map(schedule.request_id, range(n))) + 1
        self._spend(n, schedule.planned_tokens())
        drained_ns = start_ns + int(float(outcome.finish_s.max()) * 1e9)
        end_ns = start_ns + int(duration_s * 1e9)
        meta = {
            "index": index,
            "kind": "closed" if concurrency else "open",
            "lengths": self.lengths,
            "offered_rps": offered_rps,
            "concurrency": concurrency,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "scheduled_requests": n,
            "drained_ns": drained_ns,
            "ended_early": cut,
            "decided_early": decided,
            "audit": asdict(judge(Measures(), Tolerance())),
        }
        if concurrency and self.settings.ramp_s:
            meta["ramp_s"] = self.settings.ramp_s
        if schedule.session is not None:
            meta["sessions"] = {
                "begun": played.begun,
                "cut": [f"{index}-{session}" for session in played.cut],
            }
        if schedule.shared is not None or schedule.continues is not None:
            planned = schedule.planned_cached_tokens(answers_too=self._answers_told)
            meta["cached_share_planned"] = float(planned.sum() / schedule.input_tokens.sum())
        self._writer.meta["stages"].append(meta)
        self._start_ns = max(drained_ns, end_ns) + IDLE_NS
        table = self._writer.stage_table(index)
        self._writer.write_meta()  # from here on the stage survives a kill
        judged: dict[str, Any] = analyse_stage(
            table, meta, self.settings.slos, self.settings.warmup_requests
        )
        self.stages.append(judged)
        self._progress.judged(judged)
        if cut and not self.ended:
            self.ended = ("budget", cut)
        return judged

    def _fit(self, schedule: Schedule) -> Schedule:
        """What does not fit the model's context is shortened, and a conversation ends before it, as in a real run."""
        context = self._deployment.config.max_model_len
        fitting, self._unfit = fit_context(
            schedule, context, begin_shorter=self.settings.fit_context
        )
        if len(schedule) and not len(fitting):
            raise ConfigError(
                f"no conversation of workload {self.settings.workload.name} fits the context of {context} tokens: "
                "take a model with a longer one, MODEL@HARDWARE,max_model_len=N, or --fit-context"
            )
        return fitting


def _stage_s(settings: Settings, rate_rps: float) -> float:
    """How long a stage is: as asked for, and REQUESTS_MIN requests at least, as virtual time costs nothing."""
    duration_s = max(settings.duration_s, REQUESTS_MIN / rate_rps)
    if duration_s > STAGE_MAX_S:
        raise ConfigError(
            f"{rate_rps:g} requests/s: a stage of {REQUESTS_MIN} requests would take {duration_s:.2g} s of engine time; "
            f"give {REQUESTS_MIN / STAGE_MAX_S:.1g} or more"
        )
    return duration_s


def _records(played: Played, stage: int, start_ns: int) -> list[RequestRecord]:
    """One row for each request, with the time of every chunk; ok, or cut off where it takes longer than PATIENCE_NS."""
    schedule, tokens = played.schedule, played.outcome
    records = []
    scheduled_ns = start_ns + np.round(schedule.scheduled_s * 1e9).astype(np.int64)
    session = [-1] * len(schedule) if schedule.session is None else schedule.session.tolist()
    for i, due_ns in enumerate(scheduled_ns.tolist()):
        times_s, counts = tokens.chunks(i)
        times_ns = start_ns + np.round(times_s * 1e9).astype(np.int64)
        first_ns, last_ns = int(times_ns[0]), int(times_ns[-1])
        record = RequestRecord(
            request_id=schedule.request_id(i),
            stage=stage,
            scheduled_ns=due_ns,
            status="ok",
            target="predicted",
            class_=schedule.class_name(i),
            session_id=None if session[i] < 0 else f"{stage}-{session[i]}",
            turn=None if session[i] < 0 or schedule.turn is None else int(schedule.turn[i]),
            dispatched_ns=due_ns,
            connected_ns=due_ns,
            started_ns=due_ns,
            sent_ns=due_ns,
            headers_ns=first_ns,
            first_event_ns=first_ns,
            first_token_ns=first_ns,
            first_answer_ns=first_ns,
            last_token_ns=last_ns,
            ended_ns=last_ns,
            http_status=200,
            finish_reason="length",
            input_tokens_planned=int(schedule.input_tokens[i]),
            input_tokens=int(schedule.input_tokens[i]),
            cached_tokens=int(tokens.cached_tokens[i]),
            output_tokens_planned=int(schedule.output_tokens[i]),
            output_tokens=int(counts.sum()),
            token_source="usage_per_chunk",
            chunk_at_us=((times_ns - due_ns) // 1000).tolist(),
            chunk_tokens=counts.tolist(),
        )
        records.append(_as_of(record, due_ns + PATIENCE_NS))
    return records


def _as_of(record: RequestRecord, now_ns: int) -> RequestRecord:
    """A record as it would be if its request had been cut off at ``now_ns``."""
    if record.ended_ns is None or record.ended_ns <= now_ns or record.started_ns is None:
        return record
    so_far = bisect_right(record.chunk_at_us, (now_ns - record.started_ns) // 1000)
    first_ns = record.first_token_ns if so_far else None
    return replace(
        record,
        status="unfinished",
        ended_ns=now_ns,
        first_token_ns=first_ns,
        first_answer_ns=first_ns,
        last_token_ns=None,
        finish_reason=None,
        output_tokens=None,
        chunk_at_us=record.chunk_at_us[:so_far],
        chunk_tokens=None if record.chunk_tokens is None else record.chunk_tokens[:so_far],
    )


Drive = Callable[[VirtualRig], Awaitable[None]]


async def predict(
    settings: Settings,
    engine: EngineConfig | Deployment,
    command_line: list[str],
    progress: Progress,
    drive: Drive = sweep,
    experiment: str = "predict",
) -> Path:
    """Sweep the engine (or ``drive`` it otherwise) in virtual time; gives the run directory back."""
    if settings.workload.prompts is not None:
        raise ConfigError(
            f"workload {settings.workload.name} has real prompts, which virtual time does not play: practise on "
            "'ampacity simulate', with 'ampacity sweep URL'"
        )
    if settings.workload.sessions is not None and experiment == "search":
        raise ConfigError(
            "a search looks at stages that are shorter than sessions: predict a workload of sessions without --search, with --rates"
        )
    for rate_rps in settings.rates or ():
        _stage_s(settings, rate_rps)
    out = out_path(settings, experiment)
    deployment = Deployment(engine) if isinstance(engine, EngineConfig) else engine
    config = deployment.config
    served = Served(
        models=(config.name,),
        engine="ampacity simulator, predicted",
        max_model_len=config.max_model_len,
    )
    nothing = RequestRecord(-1, -1, 0, "ok")
    probe = ProbeResult(
        served, RequestShape("chat", config.name), Calibration(measured=True), nothing
    )
    meta = run_meta(settings, probe, secrets.token_hex(6), "", experiment, command_line, None)
    meta["predicted"] = True
    meta["endpoint"] |= {"url": f"predicted: {config.name}", "api": "chat", "server": None}
    if any(kind.cancel is not None for kind in settings.workload.classes):
        progress.note(
            "users who leave are not played in virtual time: every answer runs to its end"
        )
    began_s = time.monotonic()
    with RunWriter(out, meta) as writer:
        rig = VirtualRig(settings, deployment, writer, progress)
        with _interruptible(rig, progress):
            await drive(rig)
        status, reason = rig.ended or ("complete", None)
        writer.meta.update(status=status, status_reason=reason, ended_utc=utc_now())
        writer.finish()
    virtual_s = sum((s["drained_ns"] - s["start_ns"]) / 1e9 for s in writer.meta["stages"])
    elapsed_s = time.monotonic() - began_s
    progress.note(f"{virtual_s:,.0f} s of engine time in {elapsed_s:.1f} s")
    return out


@contextlib.contextmanager
def _interruptible(rig: VirtualRig, progress: Progress) -> Iterator[None]:
    """As in a real run the first Ctrl-C (or SIGTERM) ends the run cleanly, the second one at once."""

    def on_signal(number: int, _: Any) -> None:
        if rig.ended and rig.ended[0] == "interrupted":
            raise KeyboardInterrupt
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        progress.note(f"{name}: ending the run, the report follows")
        rig.stop(f"interrupted by {name}")

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with contextlib.suppress(Stopped):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
