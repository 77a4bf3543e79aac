"""Fit the sessions of a log: joint lengths, and the limit at which contexts are compacted."""

import math

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.fit.traffic import turns_of
from ampacity.workloads.sessions import JOINT_MAX
from ampacity.workloads.traces.trace import Trace

Ints = NDArray[np.int64]
_CUTS = 20  # prompts that are shorter than what came before, from which on ...
# ... so large a share within so much of the longest prompt shows a limit
_AT_LIMIT, _NEAR = (0.5, 0.8)


def shrunk_note(trace: Trace, limit_tokens: int | None) -> list[str]:
    """Return a note where prompts are shorter than what preceded them in their session."""
    order, _, _, later = turns_of(trace)
    shrunk = int(_shrunk(trace.input_tokens[order], trace.output_tokens[order], later).sum())
    if not shrunk:
        return []
    how = (
        "most of them near the longest prompt: "
        f"fitted sessions are compacted at {limit_tokens} tokens"
        if limit_tokens
        else "compacted, or thoughts left out: "
        "fitted sessions grow evenly to the same mean and spread of contexts"
    )
    return [
        f"{shrunk} of {len(later)} later prompts are shorter than the one before and its answer "
        f"({how})"
    ]


def _shrunk(inputs: Ints, outputs: Ints, later: Ints) -> NDArray[np.bool_]:
    return np.asarray(inputs[later] < inputs[later - 1] + outputs[later - 1])


def context_limit(inputs: Ints, outputs: Ints, later: Ints) -> tuple[int, Ints] | None:
    """Return (longest later prompt, summary lengths) where sessions are compacted at a limit.

    ``later``: indices of turns after the first in ``inputs`` and ``outputs``, session by session.
    None where fewer than twenty prompts, or few of them near the longest, are shorter than what
    preceded them.
    """
    shrunk = _shrunk(inputs, outputs, later)
    limit = int(inputs[later].max())
    cut = later[shrunk]
    near = inputs[cut - 1] + outputs[cut - 1] >= _NEAR * limit
    if len(cut) < _CUTS or near.mean() < _AT_LIMIT:
        return None
    grown = later[~shrunk]
    said = inputs[grown] - inputs[grown - 1] - outputs[grown - 1]
    usual = float(np.median(said)) if len(said) else 0.0
    return limit, np.maximum(np.rint(inputs[cut[near]] - usual), 1).astype(np.int64)


def joint_sessions(
    inputs: Ints, outputs: Ints, turns: Ints, first: Ints, matched: bool = True
) -> list[list[int]]:
    """Return [turns, first, second, mean later message tokens] of each session, to three digits.

    ``inputs`` and ``outputs`` (int64[n]) are session by session; ``turns`` and ``first`` as from
    ``turns_of``. From the second turn on contexts are replaced by evenly spaced ones with the same
    mean m and standard deviation s: n of them span sqrt(3 (n - 1) / (n + 1)) s to either side, at
    most the session's largest context. Real contexts grow fast at first, then slowly, or shrink.
    Growth below a mean answer and one token is raised; the mean is kept where possible. Unless
    ``matched``, messages are kept, without those of compacted prompts.
    """
    answer = float(outputs.mean())
    least = answer + 1
    rows = []
    for begin, count in zip(first.tolist(), turns.tolist(), strict=True):
        contexts = inputs[begin : begin + count].astype(np.float64)
        second = later = 0.0
        if count > 1 and not matched:
            said = np.diff(contexts) - outputs[begin : begin + count - 1]
            grown = said[1:][said[1:] > 0]
            second, later = max(float(said[0]), 1), float(grown.mean()) if len(grown) else 1
        elif count > 1:
            rest = contexts[1:]
            mean, lowest = float(rest.mean()), float(contexts[0]) + least
            wide = math.sqrt(3 * (count - 2) / count) * float(rest.std())
            low = max(mean - min(wide, float(rest.max()) - mean), lowest)
            growth = 2 * (mean - low) / (count - 2) if count > 2 else least
            if growth < least:
                low, growth = max(mean - least * (count - 2) / 2, lowest), least
            second, later = low - contexts[0] - answer, growth - answer
        three = (max(float(contexts[0]), 1), second, later)
        rows.append([count, *(round(float(f"{tokens:.3g}")) for tokens in three)])
    rows.sort(key=lambda row: row[1] + row[2] + row[0] * row[3])
    if len(rows) > JOINT_MAX:  # evenly, by the last context
        rows = [rows[int((i + 0.5) * len(rows) / JOINT_MAX)] for i in range(JOINT_MAX)]
    return rows
