"""Refuse runs that are no evidence or another experiment, and list how runs differ."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.change.samples import BLOCKS, Blocks, in_blocks
from ampacity.analysis.contract.summary import to_json
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import RunRecords, read_records
from ampacity.analysis.summary import summarise
from ampacity.analysis.warnings import ERROR_SHARE
from ampacity.loadgen.rundir.files import Run

LENGTHS_SHARE = 0.1  # token counts that differ by more, and significantly, are another workload
LENGTHS_SURE = 3.5  # standard errors: exceeded by two equal runs in one of a thousand cases
CACHED_POINTS = 0.05
LONGEST = 60  # characters of a value in a message
_DONE = ("complete", "budget")  # a user's own limit ends a run cleanly
_VARYING = tuple(  # fields that vary between runs of one experiment
    f"workload.{name}"
    for name in (
        "tokenizer.tokens_per_word",
        "tokenizer.overhead_tokens",
        "tokenizer.measured",
        "tokenizer.method",
        "tokenizer.words",
        "tokenizer.overhead_error_tokens",
        "tokenizer.word_sd_tokens",
        "realised",
        "source",
        "clipped_to_context",
        "turns_beyond_context",  # counts grow with the requests sent: see ``realised``
        "prompts",  # counts of each; what they have in common follows from the other fields
    )
)
_OPTIONS = {  # the option that sets the fields whose name starts so
    "workload.input_tokens": "--input-tokens",
    "workload.output_tokens": "--output-tokens",
    "workload.arrivals": "--arrivals",
    "workload.name": "--workload",
    "workload.trace": "--trace",
    "workload.tokenizer": "--tokenizer",
    "model": "--model",
    "api": "--api",
    "client.connections": "--connections",
    "client.timestamps": "--timestamps",
    "client.think_s": "--think-time",
    "slos": "--slo",
    "predicted": "predicted",
    "imported": "imported from",
    "realised.input_tokens": "input tokens a request as they came",
    "realised.output_tokens": "output tokens a request as they came",
    "realised.cached_token_share": "share of input tokens from the prefix cache",
}

_REMEDIES = {  # where the same plan resulted in other lengths
    "input_tokens": "the server's chat template or vocabulary has changed, or prompts were "
    "calibrated otherwise (workload.tokenizer in the run.json of both): run it again, and make a "
    "new baseline if it stays",
    "output_tokens": "fix the lengths (ignore_eos) or make a new baseline",
}


class CompareError(ValueError):
    """Runs cannot be compared; one line with the reason and the remedy."""


@dataclass(frozen=True)
class Judged:
    """A run that is fit to be compared, with its summary and its records."""

    run: Run
    summary: dict[str, Any]
    records: RunRecords

    @property
    def origin_ns(self) -> int:
        return self.records.origin_ns

    def levels(self) -> dict[str, tuple[Mapping[str, Any], dict[str, Any]]]:
        """Return each load level's entry in run.json and in the summary; repeated levels once."""
        stages = {s["index"]: s for s in self.summary["stages"]}
        repeated = self.summary["audit"]["repeated_stages"]
        found = {}
        for position, meta in enumerate(self.run.meta["stages"]):
            index = meta.get("index")
            stage = stages.get(position if index is None else index)
            if stage and stage["index"] not in repeated:
                found[level_name(stage)] = (meta, stage)
        return found


def carried(stage: Mapping[str, Any]) -> bool:
    """Return True if its latencies are those of its load.

    Where a steady state cannot be determined, signs of overload decide.
    """
    if stage["stable"] is not None:
        return bool(stage["stable"])
    unfinished = stage["errors"]["unfinished"] > ERROR_SHARE * stage["requests"]
    return bool(stage["window"]["settled"]) and stage["slo_met"] is not False and not unfinished


def level_name(stage: Mapping[str, Any]) -> str:
    """Return ``4/s`` or ``16 in flight``."""
    if stage["kind"] == "closed":
        return f"{stage['concurrency_set']} in flight"
    return f"{stage['offered_rps']:.6g}/s"


def prepare(run: Run, slos: list[Slo] | None = None, *, limited_too: bool = False) -> Judged:
    """Judge a run, with other SLOs than its own where given.

    Raises CompareError where it is no evidence. ``limited_too``: accept client-limited stages,
    which the caller leaves out.
    """
    if why := _no_evidence(run):
        raise CompareError(f"{run.path} {why}")
    if slos is not None:
        run = replace(run, meta={**run.meta, "slos": [s.as_dict() for s in slos]})
    starts = [int(s["start_ns"]) for s in run.meta["stages"] if s.get("start_ns")]
    judged = Judged(
        run, to_json(summarise(run)), read_records(run.requests, min(starts, default=0), run.meta)
    )
    _check_rows(judged)
    if judged.summary["audit"]["client_limited"] and not limited_too:
        limited = next(s for s in judged.summary["stages"] if s["client_limited"])
        raise CompareError(
            f"{run.path} is limited by its client ({limited['client_limited_reason']}): "
            "nothing in it is a finding; use a quieter or larger machine"
        )
    return judged


def _no_evidence(run: Run) -> str | None:
    status = run.meta.get("status")
    if run.going_s is not None:
        return f"is still running, last written {run.going_s:.0f} s ago: wait for its end"
    if not run.complete:
        return "was killed before it could finish: run it again"
    if status not in _DONE:
        reason = run.meta.get("status_reason") or "it did not come to its end"
        return f"is {status or 'unfinished'}: {reason}: run it again"
    empty = not run.requests.num_rows or not run.meta.get("stages")
    return "is empty: it holds no request" if empty else None


def _check_rows(judged: Judged) -> None:
    """Check that the file has as many rows as requests were scheduled. Raises CompareError."""
    requests, path = judged.records.requests, judged.run.path
    first = requests.attempt == 0
    for position, stage in enumerate(judged.run.meta["stages"]):
        index, planned = stage.get("index", position), stage.get("scheduled_requests")
        rows = int(np.count_nonzero(first & (requests.stage == index)))
        if planned is not None and rows != planned:
            word = "truncated" if rows < planned else "damaged"
            raise CompareError(
                f"{path} is {word}: stage {index} has {rows} of {planned} scheduled requests"
            )


def identity(judged: Judged) -> dict[str, Any]:
    """Return what must be equal in runs that are compared: ``name.of.field`` to a value."""
    meta, workload = judged.run.meta, dict(judged.run.meta.get("workload") or {})
    locked, endpoint = meta.get("locked") or {}, meta.get("endpoint") or {}
    found = _flat(workload, "workload") | {
        "model": endpoint.get("model"),
        "api": endpoint.get("api"),
        "predicted": bool(meta.get("predicted")),
        # Another tool defines its figures otherwise
        "imported": (meta.get("imported") or {}).get("tool"),
    }
    found |= {
        f"client.{name}": locked.get(name) for name in ("connections", "timestamps", "think_s")
    }
    found |= _flat(locked.get("extra_body") or {}, "extra_body")
    return {k: v for k, v in found.items() if not k.startswith(_VARYING)}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: json.loads(json.dumps(value))}
    return {
        k: v
        for key, inner in value.items()
        for k, v in _flat(inner, f"{name}.{key}" if name else str(key)).items()
    }


def realised(judged: Judged) -> dict[str, float | None]:
    """Return the lengths that were realised, and the share of cached input tokens.

    For each side the mean, the tokens per planned token (None where the plan is not known) and the
    relative standard error of that ratio, else of the mean.
    """
    requests = judged.records.requests
    first = requests.take(requests.attempt == 0)
    answers = first.take(first.has_status("ok"))
    found = judged.summary["workload"]["realised"]
    sides = {
        "input_tokens": (
            found["input_tokens"]["sent"]["mean"],
            first.input_tokens,
            first.input_tokens_planned,
        ),
        "output_tokens": (
            found["output_tokens"]["received"]["mean"],
            answers.output_tokens,
            answers.output_tokens_planned,
        ),
    }
    result: dict[str, float | None] = {"cached_token_share": found["cached_token_share"]}
    for side, (mean, came, planned) in sides.items():
        ratio, se = _per_planned(came, planned)
        result |= {side: mean, f"{side}_per_planned": ratio, f"{side}_relative_se": se}
    return result


def _per_planned(came: Floats, planned: Floats) -> tuple[float | None, float | None]:
    """Return the tokens per planned token and its relative standard error; in scheduled order.

    The error is by the delta method from sums of consecutive blocks, so neighbours may be
    correlated. Where the plan is unknown: (None, relative standard error of the mean);
    (None, None) where there are too few.
    """
    known = ~np.isnan(came)
    in_plan = bool(known.any()) and bool((planned[known] > 0).all())
    came, size = came[known], planned[known] if in_plan else np.ones(int(known.sum()))
    if len(came) < BLOCKS or not came.sum():
        return None, None
    per_block = Blocks(in_blocks(came), in_blocks(size), math.inf)
    residual = per_block.over / per_block.over.mean() - per_block.size / per_block.size.mean()
    se = float(residual.std(ddof=1)) / math.sqrt(BLOCKS)
    return per_block.share if in_plan else None, se


def unlike_keys(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ; a missing name is null.

    In virtual time ``model`` names the engine, which is under test as a live server's build is.
    """
    free = (*_VARYING, "model") if all(f.get("predicted") for f in found) else _VARYING
    keys = sorted(k for k in set().union(*found) if not k.startswith(free))
    return [k for k in keys if any(f.get(k) != found[0].get(k) for f in found)]


def in_words(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return differences (``variable``, ``values``) by option, with the values formatted.

    Of several fields of one option its text is taken, or the first.
    """
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: not row["variable"].endswith(".text")):
        name = row["variable"]
        known = (o for start, o in _OPTIONS.items() if f"{name}.".startswith(f"{start}."))
        option = next(known, name)
        option = option.replace("extra_body.", "--extra-body ").replace("workload.", "workload: ")
        words = [said(value) for value in row["values"]]
        if len(set(words)) == 1:
            words = [json.dumps(value) for value in row["values"]]
        found.setdefault(option, words)
    return dict(sorted(found.items()))


def said(value: Any) -> str:
    """Format a value for people, cut at ``LONGEST`` characters."""
    if isinstance(value, bool | None):
        return {None: "not given", True: "yes", False: "no"}[value]
    if isinstance(value, list) and all(isinstance(v, str | int) for v in value):
        return ", ".join(map(str, value)) or "none"
    text = f"{value:.4g}" if isinstance(value, float) else value
    text = text if isinstance(text, str) else json.dumps(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def check_distinct(runs: Sequence[Judged]) -> None:
    """Raise CompareError where two runs hold the same records of a load."""
    for (i, run), (j, other) in itertools.combinations(enumerate(runs), 2):
        for name in run.levels().keys() & other.levels().keys():
            ours, theirs = _times(run, name), _times(other, name)
            if ours.size and np.array_equal(ours, theirs, equal_nan=True):
                own = "--seed" if run.run.meta.get("predicted") else "run directory"
                raise CompareError(
                    f"runs {i + 1} and {j + 1} ({run.run.path} and {other.run.path}) hold the same "
                    f"times to the nanosecond at {name}: they are one run and show no noise from "
                    f"run to run; give each its own {own}"
                )


def _times(judged: Judged, name: str) -> Floats:
    """Return when each request was due and ended, in ns after the first was due; shape (2, n)."""
    requests = judged.records.requests
    of_level = requests.stage == judged.levels()[name][1]["index"]
    times = np.stack([requests.scheduled_ns[of_level], requests.ended_ns[of_level]])
    return np.asarray(times - times[0, :1], dtype=np.float64)


def check_same(base: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Raise CompareError that lists what differs between two identities."""
    unlike = unlike_keys([base, other])
    if unlike:
        unequal = in_words([{"variable": k, "values": [other.get(k), base.get(k)]} for k in unlike])
        listed = "; ".join(
            f"{k} is {ours}, in the baseline {theirs}"
            for k, (ours, theirs) in [*unequal.items()][:5]
        )
        more = f"; and {len(unequal) - 5} more" if len(unequal) > 5 else ""
        raise CompareError(f"{name} is another experiment than the baseline: {listed}{more}")


def lengths_apart(base: Mapping[str, Any], other: Mapping[str, Any], side: str) -> float | None:
    """Return the factor by which the lengths of ``other`` differ; None where they are equal.

    Different: by more than LENGTHS_SHARE and by more than LENGTHS_SURE standard errors. The same
    plan may be drawn differently, so lengths are compared per planned token where both are known.
    None as well where one run has too few answers. Arguments as from ``realised``.
    """
    ratios = [x.get(f"{side}_per_planned") for x in (base, other)]
    se, other_se = (x.get(f"{side}_relative_se") for x in (base, other))
    a, b = (base.get(side), other.get(side)) if ratios == [None, None] else ratios
    if not a or not b or se is None or other_se is None:
        return None
    apart = abs(math.log(b / a))
    beyond = apart > math.log1p(LENGTHS_SHARE) and apart > LENGTHS_SURE * math.hypot(se, other_se)
    return float(b / a) if beyond else None


def check_realised(base: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Raise CompareError where the same plan resulted in other lengths or another cached share."""
    for side, remedy in _REMEDIES.items():
        if factor := lengths_apart(base, other, side):
            raise CompareError(
                f"{name} had {factor:.3g} times the {side.replace('_', ' ')} of the baseline for "
                f"the same plan ({other[side]:.4g} a request on average, the baseline "
                f"{base[side]:.4g}): other lengths, other latencies; {remedy}"
            )
    a, b = base.get("cached_token_share") or 0.0, other.get("cached_token_share") or 0.0
    if abs(a - b) > CACHED_POINTS:
        raise CompareError(
            f"{name} had {b:.0%} of its input tokens from the prefix cache, the baseline {a:.0%}: "
            "start both with a cold cache"
        )
