"""May two runs be compared at all? What a gate refuses to judge, and what differs between runs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.change.samples import BLOCKS, Blocks, in_blocks
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import RunRecords, read_records
from ampacity.analysis.summary import summarise
from ampacity.analysis.warnings import ERROR_SHARE
from ampacity.loadgen.rundir.files import Run

LENGTHS_SHARE = (
    0.1  # tokens that differ by more, and by more than chance lets expect, are another workload
)
LENGTHS_SURE = 3.5  # standard errors: two equal runs differ by more in one of a thousand cases
CACHED_POINTS = 0.05
LONGEST = 60  # characters of a value in a message
_DONE = ("complete", "budget")  # a user's own limit ends a run cleanly
_OF_THE_DAY = tuple(
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
        "turns_beyond_context",  # counts that grow with the requests sent: see ``realised``
        "prompts",  # says how often each was sent; what they have in common follows from the other fields
    )
)

_OPTIONS = {  # by the start of a name: what a user knows it by
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


_MENDS = {  # what to do where the same plan became other lengths
    "input_tokens": "the server's chat template or vocabulary has changed, or prompts were calibrated otherwise (workload.tokenizer in "
    "the run.json of both): run it again, and make a new baseline if it stays",
    "output_tokens": "fix the lengths (ignore_eos) or make a new baseline",
}


class CompareError(ValueError):
    """Runs that cannot be compared; one line that says why and what to do."""


@dataclass(frozen=True)
class Judged:
    """A run that is fit to be compared, with its summary (ampacity.analysis.summary) and its records."""

    run: Run
    summary: dict[str, Any]
    records: RunRecords

    @property
    def origin_ns(self) -> int:
        return self.records.origin_ns

    def levels(self) -> dict[str, tuple[Mapping[str, Any], dict[str, Any]]]:
        """(entry of run.json's stages, stage object of the summary) of each load level; repeated ones once."""
        stages = {s["index"]: s for s in self.summary["stages"]}
        found = {}
        for position, meta in enumerate(self.run.meta["stages"]):
            index = meta.get("index")
            stage = stages.get(position if index is None else index)
            if stage and stage["index"] not in self.summary["audit"]["repeated_stages"]:
                found[level_name(stage)] = (meta, stage)
        return found


def carried(stage: Mapping[str, Any]) -> bool:
    """Whether its latencies are those of its load. Where a steady state cannot be told, none that shows overload fits."""
    overload = (
        stage["slo_met"] is False or stage["errors"]["unfinished"] > ERROR_SHARE * stage["requests"]
    )
    return bool(
        stage["stable"] or (stage["stable"] is None and stage["window"]["settled"] and not overload)
    )


def level_name(stage: Mapping[str, Any]) -> str:
    """``4/s`` or ``16 in flight``."""
    if stage["kind"] == "closed":
        return f"{stage['concurrency_set']} in flight"
    return f"{stage['offered_rps']:.6g}/s"


def prepare(run: Run, slos: list[Slo] | None = None, *, limited_too: bool = False) -> Judged:
    """Judge a run, with other SLOs than its own where given. Raises CompareError where it is no evidence.

    ``limited_too``: take a run whose client was the limit in some stage; the caller leaves those stages out.
    """
    status = run.meta.get("status")
    if run.going_s is not None:
        raise CompareError(
            f"{run.path} is still running, last written {run.going_s:.0f} s ago: wait for its end"
        )
    if not run.complete:
        raise CompareError(f"{run.path} was killed before it could finish: run it again")
    if status not in _DONE:
        reason = run.meta.get("status_reason") or "it did not come to its end"
        raise CompareError(f"{run.path} is {status or 'unfinished'}: {reason}: run it again")
    if not run.requests.num_rows or not run.meta.get("stages"):
        raise CompareError(f"{run.path} is empty: it holds no request")
    if slos is not None:
        run = replace(run, meta={**run.meta, "slos": [s.as_dict() for s in slos]})
    starts = [int(s["start_ns"]) for s in run.meta["stages"] if s.get("start_ns")]
    judged = Judged(
        run, summarise(run), read_records(run.requests, min(starts, default=0), run.meta)
    )
    _check_rows(judged)
    audit = judged.summary["audit"]
    if audit["client_limited"] and not limited_too:
        limited = next(s for s in judged.summary["stages"] if s["client_limited"])
        raise CompareError(
            f"{run.path} is limited by its client ({limited['client_limited_reason']}): nothing in it is a finding; "
            "use a quieter or larger machine"
        )
    return judged


def _check_rows(judged: Judged) -> None:
    """As many rows as were scheduled; a file that was cut or added to is no evidence."""
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
    """What must be equal in runs that are compared: flat, ``name.of.field`` to a value."""
    meta, workload = judged.run.meta, dict(judged.run.meta.get("workload") or {})
    locked, endpoint = meta.get("locked") or {}, meta.get("endpoint") or {}
    found = _flat(workload, "workload") | {
        "model": endpoint.get("model"),
        "api": endpoint.get("api"),
        "predicted": bool(meta.get("predicted")),
        "imported": (meta.get("imported") or {}).get(
            "tool"
        ),  # another tool defines its figures otherwise
    }
    found |= {
        f"client.{name}": locked.get(name) for name in ("connections", "timestamps", "think_s")
    }
    found |= _flat(locked.get("extra_body") or {}, "extra_body")
    return {k: v for k, v in found.items() if not k.startswith(_OF_THE_DAY)}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: json.loads(json.dumps(value))}
    return {
        k: v
        for key, inner in value.items()
        for k, v in _flat(inner, f"{name}.{key}" if name else str(key)).items()
    }


def realised(judged: Judged) -> dict[str, float | None]:
    """Lengths as they came, and the share of cached input tokens.

    For each side the mean, the tokens per planned token (None where the plan is not known) and the relative
    standard error of that ratio, else of the mean.
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
    """(tokens that came per planned token, its relative standard error) of requests in scheduled order.

    The error by the delta method from the sums of consecutive blocks, so that neighbours may be alike. Where the
    plan is unknown: (None, the relative standard error of the mean). (None, None) where there are too few.
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
    """Names whose values are not the same in all; a name that is missing is null.

    In virtual time ``model`` is the name of the engine: what is under test, as a live server's build is.
    """
    free = (*_OF_THE_DAY, "model") if all(f.get("predicted") for f in found) else _OF_THE_DAY
    keys = sorted(k for k in set().union(*found) if not k.startswith(free))
    return [k for k in keys if any(f.get(k) != found[0].get(k) for f in found)]


def in_words(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Differences (``variable``, ``values``) by the option that they stand for, each with the values in words.

    Of several fields of one option its text is taken, or the first.
    """
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: not row["variable"].endswith(".text")):
        name = row["variable"]
        option = next(
            (o for start, o in _OPTIONS.items() if f"{name}.".startswith(f"{start}.")), name
        )
        option = option.replace("extra_body.", "--extra-body ").replace("workload.", "workload: ")
        words = [said(value) for value in row["values"]]
        found.setdefault(
            option, words if len(set(words)) > 1 else [json.dumps(v) for v in row["values"]]
        )
    return dict(sorted(found.items()))


def said(value: Any) -> str:
    """A value in words, for people; cut at ``LONGEST``."""
    if isinstance(value, bool | None):
        return {None: "not given", True: "yes", False: "no"}[value]
    if isinstance(value, list) and all(isinstance(v, str | int) for v in value):
        return ", ".join(map(str, value)) or "none"
    text = (
        value
        if isinstance(value, str)
        else f"{value:.4g}"
        if isinstance(value, float)
        else json.dumps(value)
    )
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def check_distinct(runs: Sequence[Judged]) -> None:
    """Raises CompareError where two runs hold the same records of a load: they are one, and show no noise between them."""
    for (i, run), (j, other) in itertools.combinations(enumerate(runs), 2):
        for name in run.levels().keys() & other.levels().keys():
            ours, theirs = _times(run, name), _times(other, name)
            if ours.size and np.array_equal(ours, theirs, equal_nan=True):
                own = "--seed" if run.run.meta.get("predicted") else "run directory"
                raise CompareError(
                    f"runs {i + 1} and {j + 1} ({run.run.path} and {other.run.path}) hold the same times to the nanosecond "
                    f"at {name}: they are one run and show no noise from run to run; give each its own {own}"
                )


def _times(judged: Judged, name: str) -> Floats:
    """When each request of a load level was due and ended, in ns after the first was due; shape (2, n)."""
    requests = judged.records.requests
    of_level = requests.stage == judged.levels()[name][1]["index"]
    times = np.stack([requests.scheduled_ns[of_level], requests.ended_ns[of_level]])
    return np.asarray(times - times[0, :1], dtype=np.float64)


def check_same(base: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Raises CompareError that lists what differs between two identities."""
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
    """By which factor the lengths of ``other`` differ beyond LENGTHS_SHARE and beyond chance; None where they do not.

    Of ``realised`` entries. The same plan may be drawn differently, so what came is compared per planned token where
    both are known. Beyond chance: LENGTHS_SURE standard errors. Where too few came for one, nothing is shown.
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
    """Raises CompareError where the same plan became other lengths, or another share of cached tokens."""
    for side, mend in _MENDS.items():
        if factor := lengths_apart(base, other, side):
            raise CompareError(
                f"{name} had {factor:.3g} times the {side.replace('_', ' ')} of the baseline for the same plan "
                f"({other[side]:.4g} a request on average, the baseline {base[side]:.4g}): other lengths, other latencies; {mend}"
            )
    a, b = base.get("cached_token_share") or 0.0, other.get("cached_token_share") or 0.0
    if abs(a - b) > CACHED_POINTS:
        raise CompareError(
            f"{name} had {b:.0%} of its input tokens from the prefix cache, the baseline {a:.0%}: start both with a cold cache"
        )
