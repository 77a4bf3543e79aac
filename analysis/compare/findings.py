"""The sentence of a comparison, and the notes below it."""

from collections.abc import Sequence

from ampacity.analysis.change.engine import ASSUMED_NOISE
from ampacity.analysis.change.results import Line, Shift
from ampacity.analysis.compare.figures import Runs
from ampacity.analysis.compare.pairs import NO_PAIR, ComparedRun, Pairing
from ampacity.analysis.compare.shift import NOTHING_COUNTS
from ampacity.analysis.warnings import of_endpoint

ONE_EACH = f"one run of each: {ASSUMED_NOISE:.1%} of noise from run to run is assumed"
RUNS_NOT_SYSTEMS = (
    "These are differences between runs. One run of each does not show by how much two runs of one "
    f"system differ: {ASSUMED_NOISE:.1%} of their speed is assumed (of a capacity none). On "
    "another day or machine it may be more; ampacity ab takes turns and measures it."
)
VIRTUAL = (
    f"Virtual time has no noise from run to run; {ASSUMED_NOISE:.1%} of speed is allowed for all "
    "the same."
)


def findings(
    runs: Runs, first: Pairing, lines: Sequence[Line], shifts: Sequence[Shift], level: str | None
) -> tuple[bool, str, list[str]]:
    """Return whether anything was compared, the sentence, and the notes."""
    compared = any(q.p is not None for s in shifts for q in s.quantiles)
    compared = compared or any(change for line in lines for change in line.changes)
    sentence = _sentence(runs, first, lines, shifts, level) if compared else ""
    if not sentence and first.rounds and not first.stages:
        sentence = f"Nothing is compared: {_pairs_left(runs, first)}"
    nothing = f"Nothing is compared: {first.unpaired or NOTHING_COUNTS}"
    sentence = sentence or f"{'; '.join(_winners(runs, lines, '')) or nothing}."
    notes = [_pairs_left(runs, first) if first.rounds and first.stages else ""]
    notes += [text for run in runs for text in _left_out(run, first.rounds)]
    if not first.rounds:
        if first.unpaired:
            notes.append(f"Latencies and failures are not compared: {first.unpaired}.")
        claimed = any(s.changed for s in shifts) or any(line.winner for line in lines)
        predicted = all(run.summary.predicted for run in runs)
        if compared or claimed:
            notes.append(VIRTUAL if predicted else RUNS_NOT_SYSTEMS)
        if claimed and not predicted:
            sentence = f"{sentence[:-1]} ({ONE_EACH})."
    return compared, sentence, [note for note in notes if note]


def is_aa(first: Pairing) -> bool:
    return first.rounds and bool(first.a.meta["ab"].get("aa"))


def pairs_planned(run: ComparedRun) -> int:
    """Return the pairs of stages of an A/B: two a round (A B B A)."""
    return 2 * int(run.meta["ab"]["rounds"])


def _pairs_left(runs: Runs, first: Pairing) -> str:
    """Return how many pairs of an A/B were lost, why, and the remedy; empty where none was."""
    planned, left = pairs_planned(first.a), len(first.stages)
    if left >= planned:
        return ""
    count = f"{left} of {planned} pairs of stages {'is' if left == 1 else 'are'} left"
    one_order = left > 1 and len({p.order for p in first.pairs}) == 1
    order = " All of them ran in one order: a drift looks like a difference." if one_order else ""
    if limited := [f"{len(run.limited)} of {run.name}" for run in runs if run.limited]:
        n = sum(len(run.limited) for run in runs)
        why = f"the client was the limit in {n} stage{'s' * (n != 1)} ({', '.join(limited)})"
        closed = any(s.kind == "closed" for s in first.a.summary.stages)
        remedy = f"a lower {'--concurrency' if closed else '--rates'}."
        remedy = f"Use a quieter or larger machine, or {remedy}"
    else:
        why = "the others ended early, were never sent or hold no request"
        remedy = "Let it run to its end, with stages long enough to hold requests (--duration)."
    return f"{count if left else NO_PAIR}: {why}.{order} {remedy}"


def _left_out(run: ComparedRun, rounds: bool) -> list[str]:
    """Return what of a run takes no part."""
    found = of_endpoint(run.summary)
    if families := ",".join(f.lengths for f in run.summary.families):
        found = [
            f"its stages at other lengths (--lengths {families}) are left out; "
            "only those of the workload itself are compared.",
            *found,
        ]
    if run.limited and not rounds:
        n, which = len(run.limited), ", ".join(map(str, run.limited))
        stages, them = ("1 stage is", "it") if n == 1 else (f"{n} stages are", "them")
        limit = f"{stages} left out, the client was the limit in {them} (index {which})."
        found = [limit, *found]
    return [f"{run.name}: {text}" for text in found]


def _winners(runs: Runs, lines: Sequence[Line], at: str) -> list[str]:
    """Return who failed ``at`` the load compared, if that differs, and what each winner wins."""
    found = []
    won: dict[str, list[str]] = {run.name: [] for run in runs}
    for line in lines:
        if line.winner and line.question == "errors":
            shares = zip(runs, line.values, strict=True)
            found.append(
                f"Failed or cut off{at}: {', '.join(f'{r.name} {x:.2%}' for r, x in shares)}"
            )
        elif line.winner:
            label = line.label.split(" (")[0].replace(", req/s", "")
            won[line.winner].append(label + at * line.name.startswith("ttft_p99"))
    better = [f"{name} is better in {', '.join(labels)}" for name, labels in won.items() if labels]
    return found + better


def _sentence(
    runs: Runs, first: Pairing, lines: Sequence[Line], shifts: Sequence[Shift], level: str | None
) -> str:
    """Return the winners and the quantiles that differ; where nothing does, that."""
    at = f" at {level}" if level else ""
    won = _winners(runs, lines, at)
    moved: dict[str, list[str]] = {}
    for shift in shifts:
        signs = {q.slower for q in shift.changed}
        infinite = {q.slower for q in shift.quantiles if len(q.infinite) == 1}
        if not signs:
            continue
        text = f"{shift.other} is faster than {runs[0].name}"
        if len(signs | infinite) > 1:  # none is faster whose tail has become infinite
            text += f" at some quantiles and slower{' or infinite' if infinite else ''} at others"
        elif True in signs:
            text = f"{runs[0].name} is faster than {shift.other}"
        moved.setdefault(text, []).append(shift.metric.upper())
    unknown = [s.metric.upper() for s in shifts if all(q.p is None for q in s.quantiles)]
    but = f"; {', '.join(dict.fromkeys(unknown))} could not be compared" if unknown else ""
    if is_aa(first):
        if not moved and not won:
            return f"A/A: no difference between the endpoint and itself{but}."
        unsteady = "it, or this rig, is not steady enough to compare with"
        return f"A/A: the endpoint differs from itself: {unsteady}."
    parts = won + [f"{who} in {', '.join(metrics)}{at}" for who, metrics in moved.items()]
    names = " and ".join(run.name for run in runs)
    nothing = f"No difference between {names} is shown{at and f', latencies{at}'}{but}"
    if shifts and len(unknown) == len(shifts):
        nothing = f"No latency could be compared; no other difference between {names} is shown"
    return f"{'; '.join(parts) or nothing}."
