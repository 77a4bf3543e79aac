"""Play stages on a simulated engine, in virtual time: no clock, no socket."""

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.slo import WAITS
from ampacity.analysis.stage.analyse import analyse_stage
from ampacity.experiments.stages.context import fit_context
from ampacity.experiments.stages.preflight import typical_lengths
from ampacity.experiments.stages.rig import Outcome, Watch
from ampacity.experiments.stages.rules import answers_in_history
from ampacity.experiments.virtual.playback import Played, play
from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.meta import read_stage
from ampacity.loadgen.rundir.records import RequestRecord, to_batch
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.telemetry import SCHEMA
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.samples import Sample
from ampacity.values import ConfigError
from ampacity.workloads.schedule import Schedule

ORIGIN_NS = 1_000_000_000  # virtual time begins here, so that no time stamp is 0
REQUESTS_MIN = 2000  # in a stage, so that a p99 can be decided
IDLE_NS = 60_000_000_000  # between stages; each begins on an idle engine
STAGE_MAX_S = 3e7  # a year of engine time
PATIENCE_NS = (2**32 - 1) * 1000  # 71 minutes, the longest that requests.parquet can hold


class Stopped(Exception):
    """The run ends while a stage is played; nothing of the stage is kept."""


class VirtualPlayer:
    """Plays stages on an engine in virtual time; the ``Player`` of predictions."""

    def __init__(
        self, settings: Settings, deployment: Deployment, writer: RunWriter, progress: Progress
    ) -> None:
        self.deployment = deployment
        self.start_ns = ORIGIN_NS  # of the next stage
        self._settings, self._writer, self._progress = settings, writer, progress
        self._playing = self._stopped = False
        self._server: list[dict[str, float | int]] = []
        sessions = settings.workload.sessions
        self._finish_s = 0.0 if sessions is None else sessions.finish_s
        self._answers_told = answers_in_history(settings.workload)
        inputs, outputs = (np.array([n]) for n in typical_lengths(settings, None))
        median, _ = self.fit(Schedule(np.zeros(1), inputs, outputs, first_request_id=0))
        self.typical_e2e_s = float(self._play(median).outcome.finish_s[0])

    def closed_counts(self, users: int) -> Iterable[int]:
        return (50 * users * 2**doubling for doubling in itertools.count())

    def stage_s(self, rate_rps: float) -> float:
        return stage_s(self._settings, rate_rps)

    def fit(
        self, schedule: Schedule, begin_shorter: bool | None = None
    ) -> tuple[Schedule, dict[str, int]]:
        """Fit a schedule to the context. Raises ConfigError if no conversation fits."""
        if begin_shorter is None:
            begin_shorter = self._settings.fit_context
        context = self.deployment.config.max_model_len
        fitting, counts = fit_context(schedule, context, begin_shorter=begin_shorter)
        if len(schedule) and not len(fitting):
            raise ConfigError(
                f"no conversation of workload {self._settings.workload.name} fits the context of "
                f"{context} tokens: give it a longer one, --preset MODEL@HARDWARE,max_model_len=N, "
                "or take a workload with shorter requests"
            )
        return fitting, counts

    async def settle(self) -> None:
        """Do nothing: every stage begins on an idle engine."""

    async def play(
        self, plan: StagePlan, labels: dict[str, Any], cut: str | None, watch: Watch | None
    ) -> Outcome | None:
        if not len(plan.schedule):
            return None
        duration_s, decided, played = plan.duration_s, None, None
        with self._stoppable(plan.index):
            played = self._play_plan(plan)
            if watch is not None:
                ended_s, decided = self._ended_when_enough(plan, played, watch)
                if decided:  # sessions are not played on
                    duration_s, cut = ended_s, None
                    played = self._play(plan.schedule, until_s=ended_s)
        if played is None or self._stopped:
            return None
        if played.used_up and not cut:
            return Outcome({}, None, 0, used_up=True)
        return self._write(plan, played, labels["lengths"], cut, duration_s, decided)

    def server(self) -> pa.Table:
        """Return the engines' own samples of all stages, as a scrape of /metrics has them."""
        return pa.Table.from_pylist(self._server, schema=SCHEMA)

    def stop(self) -> None:
        """End the run: the stage being played is dropped, one being written is finished."""
        self._stopped = True
        if self._playing:
            raise Stopped

    @contextlib.contextmanager
    def _stoppable(self, index: int) -> Iterator[None]:
        self._playing = True
        try:
            with self._progress.at_work(f"stage {index}"):
                yield
        except Stopped:
            pass
        finally:
            self._playing = False

    def _play(self, schedule: Schedule, **how: Any) -> Played:
        seed = self._settings.seed
        return play(self.deployment, schedule, seed=seed, answers_told=self._answers_told, **how)

    def _play_plan(self, plan: StagePlan) -> Played:
        until_s = plan.duration_s + self._finish_s
        if plan.concurrency is None:
            return self._play(plan.schedule, until_s=until_s)
        return self._play(
            plan.schedule,
            until_s=until_s,
            users=plan.concurrency,
            users_until_s=plan.duration_s,
            think_s=plan.think_s,
            ramp_s=plan.ramp_s,
        )

    def _ended_when_enough(
        self, plan: StagePlan, played: Played, watch: Watch
    ) -> tuple[float, str | None]:
        """Return (how long the stage lasts, why it ends early)."""
        start_ns, slos = self.start_ns, self._settings.slos
        records = _records(played, plan.index, start_ns)
        waits = [s.limit_s for s in slos if s.metric in WAITS]
        for look, alpha in watch.each():
            now_ns = start_ns + int(look * plan.duration_s * 1e9)
            end_ns = now_ns - int(max(waits, default=0.0) * 1e9)  # later ones may still meet it
            seen = [_as_of(r, now_ns) for r in records if r.scheduled_ns < end_ns]
            if not seen:
                continue
            so_far = {"end_ns": end_ns, "scheduled_requests": len(seen), "drained_ns": now_ns}
            meta = {
                **plan.meta(start_ns),
                **so_far,
                **alpha,
                "ramp_s": None,
                "ended_early": None,
                "audit": None,
            }
            table = pa.Table.from_batches([to_batch(seen)])
            warmup = self._settings.warmup_requests
            if decided := watch.enough(analyse_stage(table, read_stage(meta), slos, warmup)):
                return look * plan.duration_s, decided
        return plan.duration_s, None

    def _write(
        self,
        plan: StagePlan,
        played: Played,
        lengths: str | None,
        cut: str | None,
        duration_s: float,
        decided: str | None,
    ) -> Outcome:
        """Write the records and the stage's object in run.json."""
        schedule, outcome = played.schedule, played.outcome
        for record in _records(played, plan.index, self.start_ns):
            self._writer.append(record)
        last_id = max(map(schedule.request_id, range(len(schedule))))
        drained_ns = self.start_ns + int(float(outcome.finish_s.max()) * 1e9)
        meta = {
            **replace(plan, duration_s=duration_s).meta(self.start_ns),
            "lengths": lengths,
            "scheduled_requests": len(schedule),
            "drained_ns": drained_ns,
            "ended_early": cut,
            "decided_early": decided,
            "audit": asdict(judge(Measures(), Tolerance())),
        }
        if plan.kind == "open":
            meta.pop("ramp_s", None)
        if schedule.session is not None:
            cut_sessions = [f"{plan.index}-{session}" for session in played.cut]
            meta["sessions"] = {"begun": played.begun, "cut": cut_sessions}
        if schedule.shared is not None or schedule.continues is not None:
            planned = schedule.planned_cached_tokens(answers_too=self._answers_told)
            meta["cached_share_planned"] = float(planned.sum() / schedule.input_tokens.sum())
        self._writer.meta["stages"].append(meta)
        self._server += _server_rows(outcome.samples, self.start_ns, self.deployment.engines)
        self.start_ns = max(drained_ns, meta["end_ns"]) + IDLE_NS
        table = self._writer.stage_table(plan.index)
        return Outcome(meta, table, last_id + 1 - plan.schedule.first_request_id)


def stage_s(settings: Settings, rate_rps: float) -> float:
    """Return the length of a stage: at least REQUESTS_MIN requests, as virtual time is free."""
    duration_s = max(settings.duration_s, REQUESTS_MIN / rate_rps)
    if duration_s > STAGE_MAX_S:
        raise ConfigError(
            f"{rate_rps:g} requests/s: a stage of {REQUESTS_MIN} requests would take "
            f"{duration_s:.2g} s of engine time; give {REQUESTS_MIN / STAGE_MAX_S:.1g} or more"
        )
    return duration_s


def _server_rows(
    samples: Sequence[Sample], start_ns: int, engines: int
) -> list[dict[str, float | int]]:
    """Return samples of the engines as rows of server.parquet."""
    return [
        {
            "at_ns": start_ns + round(s.at_s * 1e9),
            "engines": engines,
            "running": s.running,
            "waiting": s.waiting,
            "kv_cache_usage": s.kv_usage,
            "preemptions_total": s.preemptions,
            "prefix_cache_queries_total": s.prefix_queries,
            "prefix_cache_hits_total": s.prefix_hits,
            "spec_draft_tokens_total": s.drafted,
            "spec_accepted_tokens_total": s.accepted,
        }
        for s in samples
    ]


def _records(played: Played, stage: int, start_ns: int) -> list[RequestRecord]:
    """Return one record per request, with the time of every chunk; cut off after PATIENCE_NS."""
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
    """Return the record as if its request had been cut off at ``now_ns``."""
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
