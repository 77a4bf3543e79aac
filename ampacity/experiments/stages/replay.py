"""Read the trace, or the schedule, that a run replays."""

import math
from dataclasses import replace
from pathlib import Path

from ampacity.settings import REPLAY, Settings
from ampacity.values import ConfigError, option
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS, load_tokenizer
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.schedule_file import is_schedule, read_schedule
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.times import check_replay_length

FOR_SCHEDULES = ("trace", "time_scale", "column", "time_unit")


def replay_of(settings: Settings) -> Replay:
    """Return the options of a replay. Raises WorkloadError."""
    return Replay(
        from_s=settings.trace_from,
        to_s=settings.trace_to,
        keep=settings.trace_keep,
        loops=settings.trace_loop,
        as_written=settings.trace_as_written,
        time_scale=settings.time_scale,
        think_scale=settings.think_scale,
        max_think_s=settings.max_think,
        block_tokens=settings.block_size,
    )


def read_replay(path: Path, settings: Settings) -> Replayed:
    """Return the trace or schedule as it is to be played. Raises WorkloadError, ConfigError."""
    found = _schedule(path, settings) if is_schedule(path) else _trace(path, settings)
    levels = settings.rates or settings.concurrency or ()
    if found.says_arrivals and levels:
        raise ConfigError(
            "--trace brings its own arrival times: drop --rates or --concurrency, "
            "or use --time-scale"
        )
    if not found.says_arrivals and len(levels) != 1:
        raise ConfigError(
            f"{found.source}: the file does not say when its requests, or its sessions, arrived: "
            "give --rates R (requests/s; they begin at random) or --concurrency N (this many at "
            "once)"
        )
    lasts_s, pauses_s = float(found.schedule.scheduled_s[-1]), found.schedule.think_s
    replay = replay_of(settings)
    check_replay_length(
        found.source,
        lasts_s,
        lasts_s * replay.time_scale,
        replay.to_s is not None or replay.max_think_s < math.inf,
        0.0 if pauses_s is None else float(pauses_s.max()),
    )
    return found


def _schedule(path: Path, settings: Settings) -> Replayed:
    replay = replay_of(settings)
    if replace(replay, time_scale=1.0) != Replay():
        names = [option(name) for name in REPLAY if name not in FOR_SCHEDULES]
        raise WorkloadError(f"{path}: a schedule is played as it is: drop {', '.join(names)}")
    return read_schedule(path, time_scale=replay.time_scale)


def _trace(path: Path, settings: Settings) -> Replayed:
    has_vocabulary = settings.tokenizer not in WORD_TOKENIZERS
    trace = read_trace(
        path,
        columns=settings.columns,
        time_unit=settings.time_unit,
        skip_bad_rows=settings.skip_bad_rows,
        timed=False,
        keep_texts=True,
        count=load_tokenizer(settings.tokenizer).count if has_vocabulary else None,
    )
    rate_rps = next(iter(settings.rates or ()), None)
    return replayed(trace, replay_of(settings), settings.seed, rate_rps)
