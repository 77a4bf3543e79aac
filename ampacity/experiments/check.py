"""The check: one load, until every SLO is decided or the time is used up."""

from typing import Any

from ampacity.analysis.change.engine import spent_at
from ampacity.analysis.change.results import Check, CheckResult
from ampacity.analysis.contract.stage import SloVerdict, Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import EXTREMES, GOODPUT, SHARES, parse_slo, verdict_word
from ampacity.analysis.verdict import off_plan
from ampacity.durations import duration_text, rounded_up
from ampacity.experiments.stages.rig import Rig, Watch
from ampacity.experiments.sweep import too_few
from ampacity.reports.render.figures import (
    counted,
    cut_off,
    failures,
    failures_by_cause,
)
from ampacity.settings import Settings
from ampacity.values import ConfigError

ALPHA = 0.05  # chance of a false "met", and of a false "violated", over all looks together
LOOKS = (0.01, 0.03, 0.1, 0.25, 0.5)  # few, so that enough is left for the last one
ALPHAS = spent_at(ALPHA, [*LOOKS, 1.0])


def refuse(settings: Settings) -> None:
    """Raise ConfigError if there is not one rate, or no SLO."""
    if len(settings.rates or ()) != 1:
        raise ConfigError("a check is made at one load: give it, as --rates 5 (requests/s)")
    if not settings.slos:
        raise ConfigError("a check needs a limit: give an SLO, as --slo ttft_p95=250ms")
    if extreme := next((slo for slo in settings.slos if slo.quantile in EXTREMES), None):
        raise ConfigError(
            f"--slo {extreme.text}: the extreme of a run depends on its length, which a check "
            "chooses itself: give a percentile, as p99.9"
        )


def decided(stage: Stage) -> str | None:
    """Return the verdict of a stage so far; None while it is inconclusive.

    No steady state is no verdict by itself before the stage's end: it may be the start-up.
    """
    verdicts = stage.slo_verdicts
    if violated := [v.slo for v in verdicts if v.verdict == "violated"]:
        return f"violated: {', '.join(violated)}"
    return "met" if verdicts and stage.slo_met else None


async def check(rig: Rig) -> None:
    """Run one stage of the settings' ``duration_s`` at most."""
    (rate_rps,) = rig.settings.rates or ()
    if warning := too_few(rig, "--max-duration"):
        rig.tell(warning)
    rig.repeats_left = 0  # the time is a limit, and each repetition would be a further look
    length_s = rig.settings.duration_s
    rig.tell(
        f"at most {duration_text(length_s)} (--max-duration), about {rate_rps * length_s:,.0f} "
        "requests; ends as soon as every SLO is decided"
    )
    await rig.open_stage(rate_rps, length_s, Watch(decided, LOOKS, ALPHAS))


def result_of(summary: Summary, run: str) -> CheckResult:
    """Return the result of a check from the summary of its run directory ``run``."""
    stage = summary.stages[-1] if summary.stages else None
    other = off_plan(summary)
    strangers = other.pop("strangers", None)  # an alias or a cache, by what the answers say
    checks = [] if stage is None else _checks(stage, " ".join(other.values()))
    verdict = verdict_word(stage.slo_met if stage and not other else None)
    found: dict[str, Any] = {
        "verdict": verdict,
        "sentence": _sentence(verdict, checks, stage),
        "alpha": ALPHA,
        "looks": len(ALPHAS),
        "run": run,
        "notes": [*_failures(summary), *other.values(), *filter(None, [summary.partial])],
        "untracked": {"load": strangers} if strangers else {},
        "checks": checks,
    }
    if stage is not None:
        found |= {"requests": stage.requests, "duration_s": stage.window.end_s}
        found["stage_s"] = {stage.name: stage.window.end_s}
    return CheckResult(**found)


def _failures(summary: Summary) -> list[str]:
    """Return how many requests had no whole answer, and why not; empty where all had one."""
    found = []
    if failed := failures(summary.errors):
        found.append(f"{failed:,} failed ({failures_by_cause(summary)})")
    if cut := cut_off(summary.errors):
        found.append(f"{cut:,} {'was' if cut == 1 else 'were'} cut off unfinished")
    return [f"Of {counted(summary.requests, 'request')} {' and '.join(found)}."] if found else []


def _checks(stage: Stage, other: str) -> list[Check]:
    """Return each SLO, and what else voids or fails the stage, as ``other`` load than planned."""
    checks = [
        Check(
            v.slo,
            "slo",
            stage.name,
            "inconclusive" if other else v.verdict,
            candidate=_measured(v),
            more_requests=v.more_requests,
            reason=_reason(v),
        )
        for v in stage.slo_verdicts
    ]
    spoilt = {
        "stability": stage.stable is False and ("violated", f"unstable: {stage.stable_reason}"),
        "load": other and ("inconclusive", other),
        "client": stage.client_limited and ("inconclusive", stage.client_limited_reason),
    }
    for name, found in spoilt.items():
        if found:
            checks.append(Check(name, "sanity", stage.name, found[0], reason=found[1]))
    return checks


def _measured(verdict: SloVerdict) -> float | None:
    """Return the percentile in s, the failed share of an error rate, the share of good requests."""
    metric, within = parse_slo(verdict.slo).metric, verdict.attainment
    if metric not in SHARES or within is None:
        return verdict.value_s
    return within if metric == GOODPUT else 1 - within


def _reason(verdict: SloVerdict) -> str:
    text = verdict.reason or f"{verdict.attainment:.2%} are within the limit"
    if verdict.value_s_ci and verdict.value_s_ci[1] is None:
        text += "; the measured figure is a lower bound, from too few requests"
    return text


def _sentence(verdict: str, checks: list[Check], stage: Stage | None) -> str:
    if stage is None:
        return "Inconclusive: no request was sent."
    named = ", ".join(c.name for c in checks if verdict == "met" or c.verdict == verdict)
    spent = f"after {stage.requests:,} requests in {duration_text(round(stage.window.end_s, 1))}"
    text = f"{verdict.capitalize()} at {stage.name}: {named}, {spent}."
    more = max((c.more_requests or 0 for c in checks if c.verdict == verdict), default=0)
    as_planned = all(c.name != "load" for c in checks)
    if verdict == "inconclusive" and more and as_planned and stage.offered_rps:
        longer = duration_text(rounded_up(stage.window.end_s + more / stage.offered_rps))
        text += f" About {more:,} more requests would decide: --max-duration {longer}."
    return text
