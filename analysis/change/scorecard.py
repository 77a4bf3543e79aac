"""The scorecard of two or more runs: are they comparable, what does each deliver and cost, which differences are real?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.change.arms import NO_PAIR, RATES, Arm, Pairing, pairings
from ampacity.analysis.change.change import ALPHA, ASSUMED_NOISE, Change, holm, log_change
from ampacity.analysis.change.comparable import (
    CACHED_POINTS,
    LENGTHS_SHARE,
    CompareError,
    identity,
    level_name,
    realised,
    unlike_keys,
)
from ampacity.analysis.change.samples import METRICS
from ampacity.analysis.change.shift import NOTHING_COUNTS, QUANTILES, as_dict
from ampacity.analysis.change.usable_figures import NO_PRICE, Row, scorecard_row, usable_rows
from ampacity.analysis.warnings import of_endpoint
from ampacity.loadgen.rundir.records import FAILED_STATUSES

COMPARE_SCHEMA_VERSION = 1
FIXED_LOAD = (
    "no winner: a run's figures at a load that it carried are those of that load, not what it can carry; find the capacity "
    "of each first (--slo and --rates up to a load that breaks it, or ampacity search); of tokens/s a load without a steady state, offline the --concurrency above which tokens/s do not grow"
)
SLOWER_MEDIAN = (
    "no winner: a slower median lowers it as well; where the tail differs stands with the quantiles"
)
ONE_EACH = f"one run of each: {ASSUMED_NOISE:.1%} of noise from run to run is assumed"
RUNS_NOT_SYSTEMS = (
    f"These are differences between runs. One run of each does not show by how much two runs of one system differ: {ASSUMED_NOISE:.1%} of their "
    "speed is assumed (of a capacity none). On another day or machine it may be more; ampacity ab takes turns and measures it."
)
VIRTUAL = f"Virtual time has no noise from run to run; {ASSUMED_NOISE:.1%} of speed is allowed for all the same."
BETWEEN = "no winner: what the others carry is only known to lie in an interval, which is too wide for this line: closer --rates, or ampacity search"


@dataclass(frozen=True)
class Figure:
    """A line of the scorecard: the arm's ``factor`` times its ``basis``, or over it where ``power`` is -1."""

    question: str
    name: str
    label: str
    higher: bool | None  # None: no run wins it
    basis: str  # see Pairing.value
    factor: Callable[[Arm], float | None] = lambda arm: 1.0
    power: int = 1


def _usd(times: float) -> Callable[[Arm], float | None]:
    return lambda arm: None if arm.usd_per_s is None else arm.usd_per_s * times


FIGURES = (
    Figure("errors", "error_rate", "failed or cut off, where compared", False, "failed"),
    Figure("capacity", "goodput_rps", "goodput per instance, req/s", True, "good"),
    Figure(
        "capacity",
        "goodput_rps_per_gpu",
        "goodput per GPU, req/s",
        True,
        "good",
        lambda arm: 1 / arm.gpus,
    ),
    Figure(
        "capacity",
        "output_tokens_per_s_per_gpu",
        "output tokens/s per GPU",
        True,
        "tokens",
        lambda arm: 1 / arm.gpus,
    ),
    Figure(
        "cost",
        "usd_per_million_output_tokens",
        "USD per million output tokens",
        False,
        "tokens",
        _usd(1e6),
        -1,
    ),
    Figure(
        "cost",
        "usd_per_thousand_good_requests",
        "USD per 1,000 good requests",
        False,
        "good",
        _usd(1e3),
        -1,
    ),
    Figure(
        "cost",
        "usd_per_thousand_accepted_requests",
        "USD per 1,000 accepted requests",
        False,
        "accepted",
        _usd(1e3),
        -1,
    ),
    Figure(
        "cost",
        "ttft_p99_s_x_usd_per_hour",
        "TTFT p99 in s × USD/h (lower is better)",
        False,
        "ttft_p99",
        _usd(3600.0),
    ),
    Figure("tail", "ttft_p99_over_p50", "TTFT p99 / p50", None, "ttft_tail"),
    Figure("tail", "e2e_p99_over_p50", "E2E p99 / p50", None, "e2e_tail"),
)


def differences(arms: Sequence[Arm]) -> list[Row]:
    """What must be equal and is not: ``variable`` and the ``values`` of the runs; [] where they are comparable."""
    found = [identity(a.judged) for a in arms]
    told = [
        (a.judged.run.meta.get("imported") or {}).get("definitions") or [] for a in arms
    ]  # by other tools
    ours = {d["what"]: d["ours"] for definitions in told for d in definitions}
    for known, arm, definitions in zip(found, arms, told, strict=True):
        theirs = {**ours, **{d["what"]: d["theirs"] for d in definitions}}
        known |= {f"definition of {what}": text for what, text in theirs.items()}
        known["slos"] = sorted(s["text"] for s in arm.judged.summary["slos"])
    rows = [{"variable": k, "values": [f.get(k) for f in found]} for k in unlike_keys(found)]
    lengths = [realised(a.judged) for a in arms]
    for name in ("input_tokens", "output_tokens", "cached_token_share"):
        values = [x[name] or 0.0 for x in lengths]
        allowed = CACHED_POINTS if name == "cached_token_share" else LENGTHS_SHARE * min(values)
        if max(values) - min(values) > allowed:
            rows.append({"variable": f"realised.{name}", "values": [x[name] for x in lengths]})
    return rows


def compare(arms: list[Arm]) -> dict[str, Any]:
    """The whole comparison (docs/compare.md). Raises CompareError where there are not two different runs."""
    if len(arms) < 2:
        raise CompareError("give two run directories or more")
    if len({a.judged.run.path.resolve() for a in arms}) < len(arms):
        raise CompareError(
            "a run is given twice: compare different runs (or one endpoint with itself: ampacity ab --aa)"
        )
    made = pairings(arms)
    first = made[0, 1]
    aa = first.rounds and bool(arms[0].judged.run.meta["ab"].get("aa"))
    shift = _shift(arms, made)
    failed, *figures = _figure_rows(arms, made)
    usable = [] if first.rounds else usable_rows(arms)
    at_usable = {
        r["name"]: r for r in usable if r["question"] == "cost" and None not in r["values"]
    }
    rows = [
        failed,
        *(r for r in usable if r["question"] != "cost"),
        *(at_usable.get(r["name"], r) for r in figures),
        *_burst_rows(arms),
    ]
    against = [made[0, j] for j in range(1, len(arms))]
    compared = any(
        [q["p"] is not None for t in shift for q in t["quantiles"]]
        + [any(r["changes"]) for r in rows]
    )
    level = level_name(first.stages[0][0]) if first.stages else None
    sentence = _sentence(rows, shift, arms, aa, f" at {level}" if level else "") if compared else ""
    sentence = sentence or _nothing(rows, arms, first)
    notes = [
        _pairs_left(arms, first) if first.rounds and first.stages else "",
        *_left_out(arms, first),
    ]
    if not first.rounds and first.unpaired:
        notes.append(f"Latencies and failures are not compared: {first.unpaired}.")
    moved = any(q["verdict"] == "differs" for t in shift for q in t["quantiles"])
    claimed = moved or any(r["winner"] for r in rows)
    if not first.rounds and (compared or claimed):
        predicted = all(a.judged.summary["predicted"] for a in arms)
        notes.append(VIRTUAL if predicted else RUNS_NOT_SYSTEMS)
        sentence = f"{sentence[:-1]} ({ONE_EACH})." if claimed and not predicted else sentence
    return {
        "schema_version": COMPARE_SCHEMA_VERSION,
        "sentence": sentence,
        "notes": [n for n in notes if n],
        "assumed_run_noise": None if first.rounds else ASSUMED_NOISE,
        "compared": compared,
        "aa": aa,
        "level": level,
        "interleaved_pairs": len(first.pairs) if first.rounds else None,
        "interleaved_pairs_planned": _planned(arms) if first.rounds else None,
        "same_schedule": bool(first.stages)
        and all(p.same_schedule for pairing in against for p in pairing.pairs),
        "slos": [s["text"] for s in arms[0].judged.summary["slos"]],
        "runs": [_origin(a) for a in arms],
        "differences": differences(arms),
        "scorecard": rows,
        "shift": shift,
        "curves": [{"run": a.name, "stages": _curve(a)} for a in arms],
    }


def _planned(arms: Sequence[Arm]) -> int:
    """Pairs of stages of an A/B: two a round (A B B A)."""
    return 2 * int(arms[0].judged.run.meta["ab"]["rounds"])


def _pairs_left(arms: Sequence[Arm], first: Pairing) -> str:
    """How many pairs of an A/B were lost, and why; empty where none was."""
    planned, left = _planned(arms), len(first.stages)
    if left >= planned:
        return ""
    limited = [f"{len(a.limited)} of {a.name}" for a in arms if a.limited]
    why = "the others ended early, were never sent or hold no request"
    if limited:
        why = f"the client was the limit in {sum(len(a.limited) for a in arms)} stages ({', '.join(limited)})"
    what = (
        f"{left} of {planned} pairs of stages {'is' if left == 1 else 'are'} left"
        if left
        else NO_PAIR
    )
    one = (
        " All of them ran in one order: a drift looks like a difference."
        if left > 1 and len({p.order for p in first.pairs}) == 1
        else ""
    )
    return f"{what}: {why}.{one} {_remedy(arms)}"


def _remedy(arms: Sequence[Arm]) -> str:
    if not any(a.limited for a in arms):
        return "Let it run to its end, with stages long enough to hold requests (--duration)."
    closed = any(s["kind"] == "closed" for s in arms[0].judged.summary["stages"])
    return f"Use a quieter or larger machine, or a lower {'--concurrency' if closed else '--rate'}."


def _left_out(arms: Sequence[Arm], first: Pairing) -> list[str]:
    """What of each run takes no part."""
    found = []
    for arm in arms:
        if arm.limited and not first.rounds:
            n, which = len(arm.limited), ", ".join(map(str, arm.limited))
            stages, them = ("1 stage is", "it") if n == 1 else (f"{n} stages are", "them")
            found.append(
                f"{arm.name}: {stages} left out, the client was the limit in {them} (index {which})."
            )
        families = [f["lengths"] for f in arm.judged.summary["families"]]
        if families:
            found.append(
                f"{arm.name}: its stages at other lengths (--lengths {','.join(families)}) are left out; only those of the workload itself are compared."
            )
        found += [f"{arm.name}: {text}" for text in of_endpoint(arm.judged.summary)]
    return found


def _nothing(rows: Sequence[Row], arms: Sequence[Arm], first: Pairing) -> str:
    """The sentence where no figure has a test."""
    won = "; ".join(_won(rows, arms, ""))
    if first.rounds and not first.stages:
        return f"Nothing is compared: {_pairs_left(arms, first)}"
    return f"{won or f'Nothing is compared: {first.unpaired or NOTHING_COUNTS}'}."


def _origin(arm: Arm) -> Row:
    meta, summary = arm.judged.run.meta, arm.judged.summary
    locked = {
        k: (meta.get("locked") or {}).get(k)
        for k in ("engine", "engine_version", "hardware", "quantization")
    }
    return {
        "name": arm.name,
        "path": str(arm.judged.run.path),
        "run_id": meta.get("run_id"),
        "started_utc": meta.get("started_utc"),
        "seed": meta.get("seed"),
        **{k: (meta.get("endpoint") or {}).get(k) for k in ("model", "url")},
        **locked,
        "gpus": arm.gpus,
        "gpu_hour_usd": arm.gpu_hour_usd,
        "requests": summary["requests"],
        "failed": sum(summary["errors"].get(k, 0) for k in FAILED_STATUSES),
        "unfinished": summary["errors"]["unfinished"],
        "best_stage": level_name(arm.best) if arm.best else None,
        "predicted": summary["predicted"],
        "client_limited_stages": arm.limited,
        "other_lengths": [f["lengths"] for f in summary["families"]],
        **realised(arm.judged),
    }


def _curve(arm: Arm) -> list[Row]:
    found = [
        {
            "load": level_name(s),
            "achieved_rps": s["achieved_rps"],
            "stable": s["stable"],
            **{f"ttft_{p}_s": s["ttft_from_schedule_s"].get(p) for p in ("p50", "p99")},
            "ttft_p99_ci": s["ttft_from_schedule_s"].get("p99_ci"),
        }
        for s in arm.stages
    ]
    return sorted(found, key=lambda s: float(s["achieved_rps"]))


def _shift(arms: Sequence[Arm], made: Mapping[tuple[int, int], Pairing]) -> list[Row]:
    """Every run against the first, by metric and quantile; 5 % false findings over all of them together (Holm)."""
    cells = [
        (j, m, q, made[0, j].quantile(m, q))
        for j in range(1, len(arms))
        for m in METRICS
        for q in QUANTILES
    ]
    tested = [found.change.p for *_, found in cells if not isinstance(found.change, str)]
    real = iter(holm(tested, ALPHA))
    tables: dict[tuple[int, str], list[Row]] = {}
    for j, metric, q, found in cells:
        is_real = not isinstance(found.change, str) and next(real)
        tables.setdefault((j, metric), []).append(as_dict(q, found, is_real, len(tested)))
    return [
        {"metric": m, "reference": arms[0].name, "other": arms[j].name, "quantiles": rows}
        for (j, m), rows in tables.items()
    ]


def _figure_rows(arms: Sequence[Arm], made: Mapping[tuple[int, int], Pairing]) -> list[Row]:
    """The best of a line wins where it differs from every other; 5 % false winners over all lines together (Holm)."""
    rows, tests = [], []
    at_best = (
        "one instance at the load of the A/B"
        if made[0, 1].rounds
        else "one instance at its best stage"
    )
    one_load = made[0, 1].rounds or len({a.best and level_name(a.best) for a in arms}) == 1
    for f in FIGURES:
        values = [
            _figure(
                f, arm, made[0, 1].value(f.basis, 0) if i == 0 else made[0, i].value(f.basis, 1)
            )
            for i, arm in enumerate(arms)
        ]
        basis = (
            at_best if f.basis in RATES else "one instance at the load where latencies are compared"
        )
        row = scorecard_row(
            arms,
            f.question,
            f.name,
            f.label,
            f.higher,
            values,
            note=basis if f.question == "cost" else None,
        )
        row["lower_bound"] = [
            made[0, max(i, 1)].at_least(f.basis, min(i, 1)) for i in range(len(arms))
        ]
        rows.append(row)
        if f.higher is None:
            row["reason"] = SLOWER_MEDIAN
        if f.higher is None or None in row["values"]:
            continue
        changes = {(i, j): _change(f, pairing) for (i, j), pairing in made.items()}
        row["changes"][1:] = [_plain(changes[0, j]) for j in range(1, len(arms))]
        best = row["values"].index((max if f.higher else min)(row["values"]))
        against = [change for pair, change in changes.items() if best in pair]
        row["reason"] = next((c for c in against if isinstance(c, str)), None)
        alike = f.question != "cost" and len({f.factor(a) for a in arms}) == 1
        if not row["reason"] and not (alike and (one_load or f.basis not in RATES)):
            # else load, price or number of GPUs win
            row["reason"] = _may_carry_more(f, arms, best, changes, one_load)
        if row["reason"]:
            row["verdict"], row["best"] = "unknown", None
        else:
            tests.append((row, [c for c in against if not isinstance(c, str)]))
    real = iter(holm([c.p for _, tested in tests for c in tested], ALPHA))
    for row, tested in tests:
        verdicts = {c.verdict(is_real) for c, is_real in zip(tested, real, strict=False)}
        row["verdict"] = verdicts.pop() if len(verdicts) == 1 else "open"
        row["winner"] = row["best"] if row["verdict"] == "differs" else None
        seen = [c.smallest_seen(len(tests) * len(tested)) for c in tested]
        row["smallest_seen"] = None if None in seen else max(x for x in seen if x is not None)
    return rows


def _may_carry_more(
    f: Figure,
    arms: Sequence[Arm],
    best: int,
    changes: Mapping[tuple[int, int], Change | str],
    one_load: bool,
) -> str | None:
    """Why the best is no winner: another may carry so much more than at its best stage (its own more only helps it), or None."""
    for i, arm in enumerate(arms):
        times = 1.0 if i == best and f.basis in RATES else arm.missing(f.basis, one_load=one_load)
        change = changes.get((min(i, best), max(i, best)))
        near = (
            min((0.0 if end is None else abs(math.log1p(end)) for end in change.ci), default=0.0)
            if isinstance(change, Change)
            else 0.0
        )
        if times > 1 and near < math.log(times):
            return FIXED_LOAD if math.isinf(times) else BETWEEN
    return None


def _figure(f: Figure, arm: Arm, basis: float | str) -> float | str:
    factor = f.factor(arm)
    if isinstance(basis, str) or factor is None:
        return basis if isinstance(basis, str) else NO_PRICE
    return NOTHING_COUNTS if basis == 0 and f.power < 0 else factor * basis**f.power


def _change(f: Figure, pairing: Pairing) -> Change | str:
    found, a, b = pairing.change(f.basis), f.factor(pairing.a), f.factor(pairing.b)
    if isinstance(found, str) or not a or not b:
        return found if isinstance(found, str) else NO_PRICE
    if f.power == 1 and a == b:
        return found
    change = log_change(f.power * found.log_ratio + math.log(b / a), found.se, found.df)
    shown = found.change
    return change if shown is None else change.beside(a, b * (1 + shown) ** f.power)


def _plain(change: Change | str) -> Row | None:
    if isinstance(change, str):
        return None
    return {
        "change": change.change,
        "change_ci": list(change.ci),
        "tested_change": change.tested,
        "p": change.p,
    }


def _burst_rows(arms: Sequence[Arm]) -> list[Row]:
    bursts = [a.judged.summary.get("burst") or {} for a in arms]
    if not all(bursts):
        return []
    values = [b["recovery_reason"] if b["recovery_s"] is None else b["recovery_s"] for b in bursts]
    label, note = "got over after the burst, s", "one burst each: no interval"
    return [scorecard_row(arms, "burst", "recovery_s", label, False, values, note=note)]


def _won(rows: Sequence[Row], arms: Sequence[Arm], at: str) -> list[str]:
    """What fails ``at`` the load compared, where that differs; then ``A is better in goodput per GPU``, once for each winner."""
    failed = [
        f"Failed or cut off{at}: {', '.join(f'{a.name} {x:.2%}' for a, x in zip(arms, r['values'], strict=True))}"
        for r in rows
        if r["question"] == "errors" and r["winner"]
    ]
    won = {
        a.name: [
            r["label"].split(" (")[0].replace(", req/s", "") + at * r["name"].startswith("ttft_p99")
            for r in rows
            if r["winner"] == a.name and r["question"] != "errors"
        ]
        for a in arms
    }
    return failed + [
        f"{name} is better in {', '.join(labels)}" for name, labels in won.items() if labels
    ]


def _sentence(
    rows: Sequence[Row], shift: Sequence[Row], arms: Sequence[Arm], aa: bool, at: str
) -> str:
    """The winners; where no difference is real, that. ``at``: the load where latencies are compared."""
    won = _won(rows, arms, at)
    moved: dict[str, list[str]] = {}
    for table in shift:
        signs = {q["slower"] for q in table["quantiles"] if q["verdict"] == "differs"}
        endless = {q["slower"] for q in table["quantiles"] if len(q["infinite"]) == 1}
        if signs:
            word = "slower" if True in signs else "faster"
            said = f"is {word} than {arms[0].name}"
            if len(signs | endless) > 1:  # none is faster whose tail has become infinite
                said = f"is faster than {arms[0].name} at some quantiles and slower{' or infinite' if endless else ''} at others"
            moved.setdefault(f"{table['other']} {said}", []).append(table["metric"].upper())
    if aa and (moved or won):
        return "A/A: the endpoint differs from itself: it, or this rig, is not steady enough to compare with."
    unknown = [t["metric"].upper() for t in shift if all(q["p"] is None for q in t["quantiles"])]
    but = f"; {', '.join(dict.fromkeys(unknown))} could not be compared" if unknown else ""
    if aa:
        return f"A/A: no difference between the endpoint and itself{but}."
    parts = won + [f"{who} in {', '.join(metrics)}{at}" for who, metrics in moved.items()]
    nothing = f"No difference between {' and '.join(a.name for a in arms)} is shown{at and f', latencies{at}'}{but}"
    return f"{'; '.join(parts) or nothing}."
