"""The summary of a soak, from those of its windows: nothing here reads a record.

Each window is judged once, so a summary costs the same after hours as after minutes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import structs

from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.change.engine import ALPHA, holm
from ampacity.analysis.contract.soak import Soak, SoakChange
from ampacity.analysis.contract.stage import SloVerdict, Stage, Verdict
from ampacity.analysis.contract.summary import Audit, Seam, Summary, Warned
from ampacity.analysis.limits.table import find_limits
from ampacity.analysis.metrics.odd_answers import OddAnswers, models_asked, strangers_of
from ampacity.analysis.slo import EXTREMES, Slo, parse_slo
from ampacity.analysis.soak.change_point import WINDOWS_MIN, ChangePoint, find_change
from ampacity.analysis.soak.sentence import soak_command, soak_sentence
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.stats.intervals import CONFIDENCE, MEMORIES, few_by_chance, many_by_chance
from ampacity.analysis.summary import audit_of, partial_of
from ampacity.analysis.warnings import OF_A_RUN, OF_A_SWEEP, RULES
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.meta import ClientAudit, StageMeta, stages_of

Value = Callable[[Stage, StageMeta], float | None]
Unit = Literal["s", "share", "req/s", "tokens/s", "bytes", "requests"]


@dataclass(frozen=True)
class Figure:
    """A figure of each window; a change smaller than ``least`` of it, or ``least_by``, is none."""

    name: str
    unit: Unit
    value: Value
    least: float = 0.05
    least_by: float = 0.0

    def matters(self, change: ChangePoint) -> bool:
        """Return whether a change is large enough."""
        before, after = change.ends or change.step
        size = abs(after - before)
        return size >= max(self.least * max(abs(before), abs(after)), self.least_by) and size > 0


def _percentiles() -> list[Figure]:
    def of(metric: str, p: str) -> Value:
        return lambda stage, _: getattr(getattr(stage, metric), p)

    least_s = {"ttft_from_schedule": 1e-3, "itl": 1e-4, "e2e_from_schedule": 1e-3}
    return [
        Figure(f"{metric.partition('_')[0].upper()} {p}", "s", of(f"{metric}_s", p), 0.05, least)
        for metric, least in least_s.items()
        for p in ("p50", "p95", "p99")
    ]


def _gauge(name: str) -> Value:
    return lambda stage, _: None if stage.server is None else getattr(stage.server, name)


def _client(of: Callable[[ClientAudit], float | None]) -> Value:
    return lambda _, meta: None if meta.audit is None else of(meta.audit)


FIGURES = (
    *_percentiles(),
    Figure("answered", "req/s", lambda s, _: s.carried_rps, 0.02),
    Figure("output tokens", "tokens/s", lambda s, _: s.output_tokens_per_s, 0.02),
    Figure("KV cache used, most", "share", _gauge("kv_cache_usage_max"), 0.05, 0.01),
    Figure("running", "requests", _gauge("running"), 0.05, 0.2),
    Figure("queued", "requests", _gauge("waiting"), 0.05, 0.2),
    Figure("client memory", "bytes", _client(lambda a: a.rss_bytes), 0.01),
    Figure("client lag p99", "s", _client(lambda a: a.loop_lag_p99_s), 0.25, 1e-3),
    Figure("client CPU", "share", _client(lambda a: a.cpu_fraction), 0.1, 0.02),
)


def join_windows(parts: Sequence[Summary], run: Run) -> Summary:
    """Return the summary of a soak; ``run``: its run.json, with the records of any window.

    ``parts``: the summaries of its windows, in their order. What is no sum or list over the windows
    is that of the last one. Curves are left out: they would be most of it.
    """
    metas = run.stages[: len(parts)]
    stages = [
        structs.replace(stage, name=f"window {stage.index}", curves={})
        for part in parts
        for stage in part.stages
    ]
    slos = [parse_slo(slo.text) for slo in parts[-1].slos]
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    found = structs.replace(
        parts[-1],
        partial=partial_of(run),
        stages=stages,
        requests=sum(part.requests for part in parts),
        retries=sum(part.retries for part in parts),
        errors={kind: errors[kind] for kind in parts[-1].errors},
        error_examples={k: text for part in parts for k, text in part.error_examples.items()},
        seams=tuple(msgspec.convert(run.meta.get("seams") or (), tuple[Seam, ...])),
        goodput=peak_goodput(stages, slos),
        traffic=[one for part in parts for one in part.traffic],
        sharing=[one for part in parts for one in part.sharing or ()] or None,
        audit=_audit(metas, stages),
        spent_usd=run.meta.get("spent_usd"),
        quota=next((part.quota for part in reversed(parts) if part.quota), None),
        soak=soak_of(run.meta, stages, slos),
        limits=(),
    )
    found = structs.replace(found, warnings=_warnings(found, parts, run.meta))
    found = structs.replace(found, limits=find_limits(found), verdict=soak_sentence(found))
    return structs.replace(found, next_command=soak_command(found, run.meta, str(run.path)))


def _audit(metas: Sequence[StageMeta], stages: Sequence[Stage]) -> Audit:
    """Return the client's audit; no window repeats another one."""
    found = audit_of(metas, stages, imported=False)
    limited = 2 * len(found.client_limited_stages) >= len(stages)
    return structs.replace(found, repeated_stages=[], client_limited=limited)


def _warnings(whole: Summary, parts: Sequence[Summary], meta: Mapping[str, Any]) -> list[Warned]:
    """Return those of the whole run, and the first of each kind of the windows with their number.

    ``meta``: run.json.
    """
    names = sum((Counter(p.workload["realised"]["answered_by"]) for p in parts), Counter[str]())
    odd = OddAnswers(names.total(), strangers=strangers_of(names, models_asked(meta)))
    facts = Facts(whole, odd=odd, events=meta.get("events") or ())
    first = dict[str, Warned]()
    found = [(code, RULES[code](facts)) for code in OF_A_RUN]
    left = (*OF_A_RUN, *OF_A_SWEEP)
    of_windows = [{w.code: w for w in part.warnings if w.code not in left} for part in parts]
    counts = Counter(code for of in of_windows for code in of)
    for of in reversed(of_windows):
        first |= of
    return [
        *(Warned(code=code, text=text) for code, text in found if text),
        *(
            Warned(code=code, text=f"{w.text} (In {counts[code]} of {len(parts)} windows.)")
            for code, w in first.items()
        ),
    ]


def soak_of(meta: Mapping[str, Any], stages: Sequence[Stage], slos: Sequence[Slo]) -> Soak:
    """Return the verdict over all windows, and the changes of their figures.

    Windows in which the client was the limit count for neither; where they are half of all, nothing
    is decided. A window that was cut short shows no change.
    """
    planned, metas = meta["soak"], stages_of(meta)[: len(stages)]
    counted = [i for i, s in enumerate(stages) if not s.client_limited and s.requests]
    verdicts = [_over_windows(slo, [stages[i] for i in counted]) for slo in slos]
    words, limited = {v.verdict for v in verdicts}, [s.index for s in stages if s.client_limited]
    verdict: Verdict = "violated" if "violated" in words else "inconclusive"
    reason = None
    if 2 * len(limited) >= len(stages):
        verdict = "inconclusive"
        reason = f"this machine was the limit in {len(limited)} of {len(stages)} windows"
    elif words == {"met"}:
        verdict = "met"
    begin_s = [m.from_s or 0.0 for m in metas]
    whole = [i for i in counted if not metas[i].ended_early]
    figures = [*FIGURES, *_errors(stages)]
    series = {f.name: [f.value(s, m) for s, m in zip(stages, metas, strict=True)] for f in figures}
    return Soak(
        rate_rps=planned["rate_rps"],
        window_s=planned["window_s"],
        planned_s=planned["duration_s"],
        duration_s=begin_s[-1] + stages[-1].window.end_s,
        windows=len(stages),
        verdict=verdict,
        reason=reason,
        slo_verdicts=verdicts,
        client_limited_windows=limited,
        changes=_changes(figures, series, begin_s, whole),
        begin_s=begin_s,
        series=series,
    )


def _errors(stages: Sequence[Stage]) -> list[Figure]:
    """Return the share of each kind of error that any window has."""

    def share(kind: str) -> Value:
        return lambda s, _: s.errors.get(kind, 0) / s.requests if s.requests else None

    kinds = dict.fromkeys(kind for s in stages for kind, n in s.errors.items() if n)
    return [Figure(f"errors: {kind}", "share", share(kind), 0.05, 1e-3) for kind in kinds]


def _over_windows(slo: Slo, stages: Sequence[Stage]) -> SloVerdict:
    """Return the verdict on an SLO over windows: their misses and effective samples, pooled.

    Each window counts by its requests. Misses come in clusters: as large as in the windows, as the
    memory of their queue makes likely, and as the windows differ. Met, too, where every window is.
    """
    held = [(s.requests, v) for s in stages for v in s.slo_verdicts if v.slo == slo.text]
    held = [(n, v) for n, v in held if v.attainment is not None and v.requests_effective]
    requests = sum(n for n, _ in held)
    effective = sum(v.requests_effective or 0 for _, v in held)
    if not held:
        why = "no window measured it"
        return _verdict(slo, "inconclusive", None, None, why)
    missed, apart = _pooled([(n, 1 - (v.attainment or 0.0) - v.undecided) for n, v in held])
    # with what was cut off before the limit
    at_most, at_most_apart = _pooled([(n, 1 - (v.attainment or 0.0)) for n, v in held])
    words = {v.verdict for _, v in held}
    if slo.quantile in EXTREMES:
        worst = next(w for w in ("violated", "inconclusive", "met") if w in words)
        return _verdict(slo, worst, (missed, at_most), effective, "by its worst window")
    allowed, chance = 1 - slo.quantile, 1 - CONFIDENCE
    n, within = max(requests, effective), max(1.0, requests / effective)
    tau = max(within, at_most_apart)
    cluster = max(tau, _likely_cluster(stages))
    few = float(few_by_chance(at_most * n, n, allowed, tau, cluster))
    many = float(many_by_chance(missed * n, n, allowed, max(within, apart)))
    word: Verdict = "violated" if many <= chance else "inconclusive"
    if few <= chance or words == {"met"}:
        word = "met"
    why = f"{100 * missed:.3g} % missed it, {100 * allowed:.3g} % may"
    if at_most > missed:
        why += (
            f"; {100 * (at_most - missed):.3g} % were cut off, or gave no token, before the limit"
        )
    if word == "inconclusive":
        why += f"; slow requests come in groups: {n:,} tell as much as {n / cluster:,.0f} alone"
    return _verdict(slo, word, (missed, at_most), effective, why)


def _pooled(shares: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the share over (requests, share) of each window, and how the windows differ.

    That is their variance over the one of independent requests.
    """
    requests = sum(n for n, _ in shares)
    pooled = max(0.0, round(sum(n * share for n, share in shares) / requests, 12))
    apart = sum(n * (share - pooled) ** 2 for n, share in shares) / max(len(shares) - 1, 1)
    return pooled, apart / (pooled * (1 - pooled)) if 0 < pooled < 1 else 1.0


def _likely_cluster(stages: Sequence[Stage]) -> float:
    """Return the likely requests in a cluster, by the median window's requests in flight.

    Their memory follows from the standard error of the mean, whose variance is taken for Poisson's.
    """
    memories = [
        s.concurrency_se**2 * s.requests / s.concurrency
        for s in stages
        if s.concurrency_se and s.concurrency
    ]
    return 1 + MEMORIES * max(median(memories or [1.0]) - 1, 0.0)


def _verdict(
    slo: Slo, word: Verdict, missed: tuple[float, float] | None, effective: int | None, why: str
) -> SloVerdict:
    """Return an entry of ``slo_verdicts``; ``missed``: the share that did, and that may have."""
    return SloVerdict(
        slo=slo.text,
        verdict=word,
        value_s=None,
        attainment=None if missed is None else 1 - missed[1],
        undecided=0.0 if missed is None else missed[1] - missed[0],
        requests_effective=effective,
        more_requests=None,
        reason=why,
        cause=why if word == "inconclusive" else None,
    )


def _changes(
    figures: Sequence[Figure],
    series: Mapping[str, list[float | None]],
    begin_s: Sequence[float],
    whole: Sequence[int],
) -> list[SoakChange]:
    """Return the change of each figure that was measured; 5 % false ones over all (Holm).

    The level of a percentile is that of windows which have all percentiles of its metric, if any.
    """
    n = len(begin_s)
    lack = "count" + ": the others were cut, or limited by this machine" * (len(whole) < n)
    known = {f: [i for i in whole if series[f.name][i] is not None] for f in figures}

    def level(figure: Figure) -> Collection[int]:
        metric = figure.name.partition(" p")[0]
        others = [i for f, i in known.items() if i and f.name.startswith(f"{metric} p")]
        return set(known[figure]).intersection(*others) or known[figure]

    tested = {
        figure: find_change([series[figure.name][i] or 0.0 for i in windows])
        for figure, windows in known.items()
        if len(windows) >= WINDOWS_MIN
    }
    real = dict(zip(tested, holm([c.p for c in tested.values()], ALPHA), strict=True))
    found = []
    for figure, windows in known.items():
        if not windows:
            continue
        point = tested.get(figure)
        change = SoakChange(
            name=figure.name,
            unit=figure.unit,
            verdict="no change" if point else "inconclusive",
            before=median([series[figure.name][i] or 0.0 for i in level(figure)]),
            p=point.p if point else None,
            reason=None if point else f"needs {WINDOWS_MIN} windows, {len(windows)} of {n} {lack}",
        )
        if point and real[figure] and figure.matters(point):
            first = 0 if point.ends else point.first
            change = structs.replace(
                change,
                verdict="drift" if point.ends else "step",
                **dict(zip(("before", "after"), point.ends or point.step, strict=True)),
                since_s=begin_s[windows[first]],
                window=windows[first],
            )
        found.append(change)
    return found
