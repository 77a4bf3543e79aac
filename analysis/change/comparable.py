"""Refuse runs that are another experiment, and list how runs differ."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.change.judged import CompareError, Judged
from ampacity.analysis.change.results import Setting
from ampacity.analysis.metrics.requests import Floats
from ampacity.loadgen.rundir.records import CACHE

LENGTHS_SHARE = 0.1  # token counts that differ by more, and significantly, are another workload
LENGTHS_SURE = 3.5  # standard errors: exceeded by two equal runs in one of a thousand cases
CACHED_POINTS = 0.05
LONGEST = 60  # characters of a value in a message
_VARYING = tuple(  # fields that vary between runs of one experiment
    f"workload.{name}"
    for name in (
        *(f"tokenizer.{x}" for x in ("tokens_per_word", "overhead_tokens", "measured", "method")),
        *(f"tokenizer.{x}" for x in ("words", "overhead_error_tokens", "word_sd_tokens")),
        *("realised", "source", "clipped_to_context", "prompts"),
        "turns_beyond_context",  # counts grow with the requests sent: see ``realised``
    )
)
_IF_KNOWN = ("answered_by", "workload.contents.")  # older runs do not have these
_WHOSE = {"realised.input_tokens": "prompts", "realised.output_tokens": "answers"}
_SHOWN = {
    "extra_body.": "--extra-body ",
    "workload.contents.": "contents of --",
    "workload.": "workload: ",
}
_OPTIONS = {  # the option that sets the fields whose name starts so
    "workload.input_tokens": "--input-tokens",
    "workload.output_tokens": "--output-tokens",
    "workload.arrivals": "--arrivals",
    "workload.name": "--workload",
    "workload.trace": "--trace",
    "workload.tokenizer": "--tokenizer",
    "model": "--model",
    "answered_by": "model by the answers' own account",
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


def identity(judged: Judged) -> dict[str, Any]:
    """Return what must be equal in runs that are compared: ``name.of.field`` to a value."""
    meta = judged.meta
    locked, endpoint = meta.get("locked") or {}, meta.get("endpoint") or {}
    found = _flat(meta.get("workload") or {}, "workload") | {
        "model": endpoint.get("model"),
        "api": endpoint.get("api"),
        "answered_by": _mostly(judged.summary.workload["realised"].get("answered_by") or {}),
        "predicted": bool(meta.get("predicted")),
        # Another tool defines its figures otherwise
        "imported": (meta.get("imported") or {}).get("tool"),
    }
    client = ("connections", "timestamps", "think_s")
    found |= {f"client.{name}": locked.get(name) for name in client}
    found |= _flat(locked.get("extra_body") or {}, "extra_body")
    return {k: v for k, v in found.items() if not k.startswith(_VARYING)}


def _mostly(answered_by: Mapping[str, int]) -> str | None:
    """Return the model that most answers name; None where they name none."""
    return next((name for name in answered_by if name != CACHE), None)


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: json.loads(json.dumps(value))}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}").items()}


def _unequal(found: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Return the fields whose values differ; a missing one is null.

    In virtual time ``model`` names the engine, which is under test as a live server's build is.
    """
    free = (*_VARYING, "model") if all(f.get("predicted") for f in found) else _VARYING
    names = sorted(k for k in set().union(*found) if not k.startswith(free))
    listed = (Setting(variable=name, values=[f.get(name) for f in found]) for name in names)
    return [
        s
        for s in listed
        if any(v != s.values[0] for v in s.values)
        and not (s.variable.startswith(_IF_KNOWN) and None in s.values)
    ]


def differences(runs: Sequence[Judged]) -> list[Setting]:
    """Return what must be equal in these runs and is not; [] where they are comparable."""
    found = [identity(run) for run in runs]
    other_tools = [(run.meta.get("imported") or {}).get("definitions") or [] for run in runs]
    ours = {d["what"]: d["ours"] for definitions in other_tools for d in definitions}
    for known, run, definitions in zip(found, runs, other_tools, strict=True):
        theirs = ours | {d["what"]: d["theirs"] for d in definitions}
        known |= {f"definition of {what}": text for what, text in theirs.items()}
        known["slos"] = sorted(s.text for s in run.summary.slos)
    settings, lengths = _unequal(found), [run.realised() for run in runs]
    for name in ("input_tokens", "output_tokens", "cached_token_share"):
        values = [x[name] or 0.0 for x in lengths]
        allowed = CACHED_POINTS if name == "cached_token_share" else LENGTHS_SHARE * min(values)
        if max(values) - min(values) > allowed:
            settings.append(Setting(f"realised.{name}", [x[name] for x in lengths]))
    return settings


def other_work(settings: Sequence[Setting], names: Sequence[str]) -> str:
    """Return in words how what was sent or came differs from the first; "" where it does not."""
    asked_alike = all(s.variable != "model" for s in settings)
    came = ("realised.", "answered_by") if asked_alike else ("realised.",)
    found, left = [], []
    for setting in [s for s in settings if s.variable.startswith(came)]:
        what, (base, *others) = _WHOSE.get(setting.variable), setting.values
        if not what or not base or None in others:
            left.append(setting)
            continue
        for name, value in zip(names[1:], others, strict=True):
            if abs(change := value / base - 1) > LENGTHS_SHARE / 2:
                longer = "longer" if change > 0 else "shorter"
                found.append(f"{name}'s {what} are {abs(change):.0%} {longer}")
    for what, values in by_option(left).items():
        found.append(f"{what}: {', '.join(map(' '.join, zip(names, values, strict=True)))}")
    return "; ".join(found)


def by_option(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return the formatted values by option.

    Of several fields of one option its text is taken, or the first.
    """
    found: dict[str, list[str]] = {}
    for setting in sorted(settings, key=lambda s: not s.variable.endswith(".text")):
        name = setting.variable
        known = (o for start, o in _OPTIONS.items() if f"{name}.".startswith(f"{start}."))
        option = next(known, name)
        for field, shown in _SHOWN.items():
            option = option.replace(field, shown)
        texts = [format_value(value) for value in _own_items(setting.values)]
        if len(set(texts)) == 1:
            texts = [json.dumps(value) for value in setting.values]
        found.setdefault(option, texts)
    return dict(sorted(found.items()))


def _own_items(values: Sequence[Any]) -> Sequence[Any]:
    """Return lists without the items that all of them have; other values as they are."""
    if not all(isinstance(value, list) for value in values):
        return values
    return [[item for item in held if any(item not in v for v in values)] for held in values]


def format_value(value: Any) -> str:
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
                own = "--seed" if run.meta.get("predicted") else "run directory"
                raise CompareError(
                    f"runs {i + 1} and {j + 1} ({run.run.path} and {other.run.path}) hold the same "
                    f"times to the nanosecond at {name}: they are one run and show no noise from "
                    f"run to run; give each its own {own}"
                )


def _times(judged: Judged, name: str) -> Floats:
    """Return when each request was due and ended, in ns after the first was due; shape (2, n)."""
    requests = judged.records.requests
    of_level = requests.stage == judged.levels()[name].index
    times = np.stack([requests.scheduled_ns[of_level], requests.ended_ns[of_level]])
    return np.asarray(times - times[0, :1], dtype=np.float64)


def check_same(base: Mapping[str, Any], run: Judged) -> None:
    """Raise CompareError where the run is another experiment than the baseline.

    Its ``identity`` differs, or the same plan resulted in other lengths or another cached share.
    """
    name = run.run.path
    if unequal := by_option(_unequal([identity(run), base["identity"]])):
        listed = [
            f"{k} is {ours}, in the baseline {theirs}" for k, (ours, theirs) in unequal.items()
        ]
        more = f"; and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise CompareError(
            f"{name} is another experiment than the baseline: {'; '.join(listed[:5])}{more}"
        )
    if not any(s.ok for s in run.summary.stages):
        return
    expected, found = base["realised"], run.realised()
    for side, remedy in _REMEDIES.items():
        if factor := lengths_apart(expected, found, side):
            raise CompareError(
                f"{name} had {factor:.3g} times the {side.replace('_', ' ')} of the baseline for "
                f"the same plan ({found[side]:.4g} a request on average, the baseline "
                f"{expected[side]:.4g}): other lengths, other latencies; {remedy}"
            )
    a, b = (x.get("cached_token_share") or 0.0 for x in (expected, found))
    if abs(a - b) > CACHED_POINTS:
        raise CompareError(
            f"{name} had {b:.0%} of its input tokens from the prefix cache, the baseline {a:.0%}: "
            "start both with a cold cache"
        )


def lengths_apart(base: Mapping[str, Any], other: Mapping[str, Any], side: str) -> float | None:
    """Return the factor by which the lengths of ``other`` differ; None if equal or unknown.

    Different: by more than LENGTHS_SHARE and LENGTHS_SURE standard errors; per planned token where
    both are known. Arguments as from ``Judged.realised``.
    """
    ratios = [x.get(f"{side}_per_planned") for x in (base, other)]
    se, other_se = (x.get(f"{side}_relative_se") for x in (base, other))
    a, b = (base.get(side), other.get(side)) if ratios == [None, None] else ratios
    if not a or not b or se is None or other_se is None:
        return None
    apart = abs(math.log(b / a))
    beyond = apart > math.log1p(LENGTHS_SHARE) and apart > LENGTHS_SURE * math.hypot(se, other_se)
    return float(b / a) if beyond else None
