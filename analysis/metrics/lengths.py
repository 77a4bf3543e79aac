"""The lengths that a run was measured at: planned, sent and received tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.contract.figures import Spread
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.metrics.observations import quantile_rank
from ampacity.analysis.metrics.odd_answers import text_counts
from ampacity.analysis.metrics.requests import Floats, Requests, visible_tokens

_LEVELS = {f"p{percent}": percent / 100 for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99)}

NAMES_MAX = 20  # of models that answered
LENGTHS_OFF_SHARE = 0.1  # of the plan: above it the work was another
SLACK_TOKENS = 2  # of a request, by which a prompt may miss its plan


class Deviation(NamedTuple):
    """Tokens that came beside planned ones, over the requests of which both are known."""

    mean: float | None = None  # sum of differences / sum planned
    each: float = 0.0  # the same of absolute differences, those of SLACK_TOKENS left out

    @property
    def text(self) -> str:
        """Return it in words: ``74% shorter than planned``; "" where there is hardly one."""
        if self.mean is not None and abs(self.mean) > LENGTHS_OFF_SHARE:
            return f"{abs(self.mean):.0%} {'longer' if self.mean > 0 else 'shorter'} than planned"
        off = self.each > LENGTHS_OFF_SHARE
        return f"{self.each:.0%} off one by one, though not on average," if off else ""


def describe(lengths: Floats) -> dict[str, Any]:
    """Return a LENGTHS object: mean and percentiles of the known lengths, null where empty."""
    known = np.sort(lengths[~np.isnan(lengths)])
    n = len(known)
    if not n:
        nulls = dict.fromkeys(["mean", *_LEVELS, "max"])
        return {"n": 0, **nulls, "reason": "no request has a known length"}
    levels = {name: float(known[quantile_rank(q, n) - 1]) for name, q in _LEVELS.items()}
    return {"n": n, "mean": float(known.mean()), **levels, "max": float(known[-1])}


def spread(values: Floats) -> Spread:
    """Return the mean, median, p95, p99 and maximum of a sample, null where it is empty."""
    found = describe(values[np.isfinite(values)])
    return Spread(**{name: found[name] for name in ("n", "mean", "p50", "p95", "p99", "max")})


def realised(table: pa.Table, requests: Requests) -> dict[str, Any]:
    """Return ``workload.realised``: over all stages, rows with attempt 0."""
    first = requests.take(requests.attempt == 0)
    ok = first.has_status("ok")
    answers = first.take(ok)
    sources = table["token_source"].take(pa.array(answers.row))  # one cut off can have no usage
    names = text_counts(table["answered_by"].take(pa.array(answers.row)))
    return {
        "input_tokens": {
            "planned": describe(first.input_tokens_planned),
            "sent": describe(first.input_tokens),
        },
        "output_tokens": {
            "planned": describe(first.output_tokens_planned),
            "received": describe(answers.output_tokens),
        },
        "sequence_tokens": describe(answers.input_tokens + answers.output_tokens),
        "input_deviation": deviations(answers)[0].mean,
        "cached_token_share": answers.cached_share(),
        "tokens_per_chunk": _tokens_per_chunk(answers),
        "token_source": {
            str(c["values"]): int(c["counts"])
            for c in pc.value_counts(sources).to_pylist()
            if c["values"] is not None
        },
        "answered_by": dict([*names.items()][:NAMES_MAX]),
    }


def _tokens_per_chunk(answers: Requests) -> float | None:
    tokens = visible_tokens(answers)
    known = (answers.chunks > 0) & (tokens > 0)
    return float(tokens[known].sum() / answers.chunks[known].sum()) if known.any() else None


def mean_tokens(requests: Requests, stages: Sequence[Stage]) -> tuple[float | None, float | None]:
    """Return the mean tokens of an answered request, sent and received.

    Lengths do not depend on the load, so all stages that are findings count. One without a steady
    state is left out: it gave up on the long answers.
    """
    held = [s.index for s in stages if not s.client_limited and s.stable is not False]
    answers = requests.take(requests.has_status("ok") & np.isin(requests.stage, held))
    sent = np.where(
        np.isnan(answers.input_tokens), answers.input_tokens_planned, answers.input_tokens
    )
    return describe(sent)["mean"], describe(answers.output_tokens)["mean"]


def deviations(requests: Requests) -> tuple[Deviation, Deviation]:
    """Return how input and output tokens of the good answers miss their plan."""
    r = requests.take(requests.has_status("ok"))
    inputs = _deviation(r.input_tokens, r.input_tokens_planned)
    return inputs, _deviation(r.output_tokens, r.output_tokens_planned)


def _deviation(counted: Floats, planned: Floats) -> Deviation:
    both = ~np.isnan(counted) & (planned > 0)
    if not both.any():
        return Deviation()
    gaps, total = counted[both] - planned[both], planned[both].sum()
    apart = np.abs(gaps)
    each = apart[apart > SLACK_TOKENS].sum()
    return Deviation(float(gaps.sum() / total), float(each / total))
