"""Fit requests to the model's context: shorten or drop what does not fit, and report it."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ampacity.analysis.warnings import BEYOND_CONTEXT_SHARE
from ampacity.loadgen.probe.results import ProbeResult
from ampacity.settings import Settings
from ampacity.values import ConfigError
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import Schedule, open_schedule

SAMPLE_REQUESTS = 1000  # of the workload, checked before the run
CLIPPED, BEYOND = "clipped_to_context", "turns_beyond_context"  # counts in run.json


def fit_context(
    schedule: Schedule,
    context: int,
    spare: NDArray[np.float64] | float = 0,
    *,
    begin_shorter: bool = False,
) -> tuple[Schedule, dict[str, int]]:
    """Return (requests within ``context - spare`` tokens, counts of shortened and dropped ones).

    Single requests are shortened, first the answer to half of the context; those with a text from
    a file are dropped. A conversation ends before the turn that does not fit; with
    ``begin_shorter`` its first turn is shortened like a single request, so that every one begins.
    """
    clipped = np.zeros(len(schedule), dtype=bool)
    if schedule.session is None or begin_shorter:
        schedule, clipped = _shortened(schedule, context, spare)
    beyond = schedule.input_tokens + schedule.output_tokens + spare > context
    if schedule.session is None:
        beyond &= _has_text(schedule)
    fitting = schedule.without(beyond)
    return fitting, {CLIPPED: int((clipped & ~beyond).sum()), BEYOND: len(schedule) - len(fitting)}


def _has_text(schedule: Schedule) -> NDArray[np.bool_]:
    """Return bool[n]: which prompts come from a file."""
    return np.zeros(len(schedule), dtype=bool) if schedule.entry is None else schedule.entry >= 0


def _shortened(
    schedule: Schedule, context: int, spare: NDArray[np.float64] | float
) -> tuple[Schedule, NDArray[np.bool_]]:
    """Cut single requests and first turns to the context; return (schedule, which ones).

    A later turn is shorter by what its history lost.
    """
    outputs = np.minimum(schedule.output_tokens, max(context // 2, 1))
    room = np.maximum(np.floor(context - outputs - spare), 1).astype(np.int64)
    inputs = np.where(
        _has_text(schedule), schedule.input_tokens, np.minimum(schedule.input_tokens, room)
    )
    clipped = (inputs < schedule.input_tokens) | (outputs < schedule.output_tokens)
    new = schedule.new_tokens
    if schedule.continues is not None:
        later = schedule.continues >= 0
        lost = np.where(later, 0, schedule.input_tokens - inputs)
        if new is not None:
            new = np.where(later, new, np.maximum(new - lost, 1))
        gone = schedule.output_tokens - outputs
        for i in np.flatnonzero(later).tolist():  # each comes after what it continues
            before = schedule.continues[i]
            lost[i] = lost[before] + gone[before]
        inputs = schedule.input_tokens - lost
        clipped = (lost > 0) | (gone > 0)
    found = replace(schedule, input_tokens=inputs, output_tokens=outputs, new_tokens=new)
    return found, clipped


def check_context(settings: Settings, probe: ProbeResult, trace: Replayed | None) -> str | None:
    """Return a note about requests that do not fit the model's context; None if all do.

    Raises ConfigError if more than BEYOND_CONTEXT_SHARE of a workload does not fit without
    ``--fit-context``, and if no request of a trace can be sent as it is.
    """
    context = probe.served.max_model_len
    if context is None:
        return None
    sample = _sample(settings) if trace is None else trace.schedule
    spare = probe.calibration.margin_tokens(sample.input_tokens)
    shorter = settings.fit_context and trace is None  # recorded prompts cannot be shortened
    fitting, counts = fit_context(sample, context, spare, begin_shorter=shorter)
    lengths = sample.input_tokens + sample.output_tokens
    nothing = not len(fitting) or (
        not settings.fit_context and not (lengths + spare <= context).any()
    )
    if trace is not None and nothing:
        begins = slice(None) if sample.turn is None else sample.turn == 0
        offer = (
            "" if not len(fitting) else ", or give --fit-context, which shortens every one of them"
        )
        raise ConfigError(
            f"the trace: not one of its {len(sample):,} requests can be sent as it is, within the "
            f"model's context of {context:,} tokens: they begin with "
            f"{int(lengths[begins].min()):,} and more, with their answers. "
            f"Serve the model with a longer context, take another trace{offer}"
        )
    share = sum(counts.values()) / max(len(sample), 1)
    if share <= (BEYOND_CONTEXT_SHARE if trace is None else 0):
        return None
    name = settings.prompts.name if settings.prompts else f"workload {settings.workload.name}"
    name = "the trace" if trace is not None else name
    if settings.fit_context or trace is not None:
        changes = _changes(counts, len(sample))
        return f"{name}: {changes}, to fit the model's context of {context:,} tokens"
    longest = int(np.quantile(lengths, 0.99))
    offered = fit_context(sample, context, spare, begin_shorter=True)[1]
    offer = _changes(offered, len(sample))
    raise ConfigError(
        f"{name} does not fit the model's context of {context:,} tokens: its requests have up to "
        f"{longest:,} at p99. Serve the model with a longer context, take another workload, or give "
        f"--fit-context: {offer}"
    )


def _changes(counts: dict[str, int], of: int) -> str:
    words = ((CLIPPED, "of the requests are shortened"), (BEYOND, "of the turns are left out"))
    return " and ".join(f"{counts[name] / of:.1%} {what}" for name, what in words if counts[name])


def _sample(settings: Settings) -> Schedule:
    """Return some requests of the workload, drawn as those of the first stage."""
    return open_schedule(
        settings.workload,
        rate_rps=1.0,
        duration_s=float(SAMPLE_REQUESTS),
        seed=settings.seed,
        stage=0,
    )
