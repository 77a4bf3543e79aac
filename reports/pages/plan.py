"""A plan in words, with its arithmetic, for a terminal."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from ampacity.analysis.capacity.fleet import instances_text
from ampacity.analysis.capacity.levels import usd
from ampacity.analysis.contract.summary import Summary, Warned
from ampacity.analysis.decision.inputs import is_wide
from ampacity.analysis.decision.money import Hosted, Moved
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.tiers import TierPlan
from ampacity.reports.pages.findings import usable_rate
from ampacity.reports.pages.screen import NOTES
from ampacity.reports.render.figures import counted, gpu_price, interval, significant
from ampacity.reports.render.table import Cell, Column, Table
from ampacity.reports.render.terminal import Entry, Screen

HOSTED_SHOWN = 3

COSTS = {
    "fleet_cost_per_million_output_tokens": "a million output tokens",
    "fleet_cost_per_million_input_tokens": "a million input tokens",
    "fleet_cost_per_million_cached_tokens": "a million cached input tokens",
    "fleet_cost_per_million_tokens": "a million tokens of both",
    "fleet_cost_per_thousand_requests": "1,000 requests",
    "fleet_cost_per_thousand_good_requests": "1,000 good requests (within the SLOs)",
    "fleet_cost_per_thousand_accepted_results": "1,000 accepted results",
}


def headline(plan: Plan) -> str:
    """Return the answer: instances, GPUs and the cost of a year, each with its range."""
    text = f"{instances_text(plan.instances, plan.instances_ci)}, {counted(plan.gpus, 'GPU')}"
    return f"{text} for {plan.peak_rps:.4g} requests/s{year_text(plan)}"


def rate_text(
    rate_rps: float,
    ends: Sequence[float | None] | None,
    verified_rps: float | None = None,
    unit: str = " req/s",
) -> str:
    """Return a capacity with its interval; where that is wide, what is verified comes first."""
    text, between = f"{significant(rate_rps)}{unit}", interval(ends)
    if ends and tuple(ends) == (rate_rps, None):
        return f"at least {text}"
    text += f" ({between})" if between else ""
    if verified_rps and verified_rps < rate_rps and is_wide(rate_rps, ends):
        return f"{significant(verified_rps)} req/s verified, an estimated {text},"
    return text


def wrapped(text: str) -> str:
    """Return lines that fit the terminal; what follows is indented as its line is."""
    width = min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120)
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def _pieces(line: str, width: int) -> list[str]:
    found = re.match(r"[ \d]\d [A-Z].{15}|\s*", line)  # a step's number and title, or blanks
    if len(line) <= width or line.lstrip().startswith("→"):  # a command is pasted: it stays whole
        return [line]
    indent = " " * (len(found[0]) if found else 0)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def year_text(plan: Plan | TierPlan) -> str:
    """Return the cost of a year with its range; empty without a price."""
    if plan.cost_per_year is None:
        return ""
    low, high = plan.cost_per_year_ci or (None, None)
    ends = f" ({usd(low)} to {usd(high)})" if low and high and low != high else ""
    bound = "at most " if high and not low else "at least " if low and not high else ""
    return f"; {bound}{usd(plan.cost_per_year)} a year{ends}"


def plan_text(plan: Plan, summary: Summary) -> str:
    """Return the plan of one run, every input with its basis."""
    usable = usable_rate(summary)
    between = f" ({usable.interval})" if usable.interval else ""
    carries = "is predicted to carry" if plan.predicted else "carries"
    lines = [
        headline(plan),
        f"  one instance {carries} {usable.value}{between} at {', '.join(plan.slos) or 'no SLO'}; "
        f"{usable.note}",
        f"  peak {plan.peak_rps:.4g} requests/s ({_basis(plan, 'peak')})",
        f"  instances that carry the peak: {plan.instances_before_safety}, "
        f"× {plan.safety_factor:g} safety = {plan.instances}; "
        f"GPUs: × {plan.tensor_parallel} = {plan.gpus}",
        f"  safety {plan.safety_factor:g} ({_basis(plan, 'safety')})",
        f"  {_spare(plan)}",
        f"  {plan.gpu_hours_per_day:g} GPU-hours a day, utilisation {100 * plan.utilisation:.0f} %"
        f" at {plan.load_rps:.3g} requests/s ({_basis(plan, 'utilisation')})",
        f"  {pools_text(plan)}",
        *_costs(plan),
        *(line for hosted in plan.hosted for line in hosted_lines(hosted, plan)),
        *_indented(columns(sensitivity_rows(plan.sensitivity))),
        *_warned(plan.warnings),
    ]
    return "\n".join(lines)


def pools_text(plan: Plan) -> str:
    """Return prefill apart from decoding: the rate of an instance of each, and the P:D ratio."""
    pools = plan.pools
    if pools is None:
        return f"P:D ratio of prefill apart from decoding: {plan.pools_reason}"
    return (
        f"prefill apart from decoding, estimated from this run: P:D {pools.prefill_instances}:"
        f"{pools.decode_instances} (an instance computes the prompts of "
        f"{significant(pools.prefill_rps)} req/s at most, the answers of "
        f"{significant(pools.decode_rps)} at least)"
    )


def plan_screen(plan: Plan, summary: Summary) -> Screen:
    """Return the screen of a plan: the fleet, its cost, what it rests on, what moves it most."""
    usable, year = usable_rate(summary), year_text(plan).removeprefix("; ")
    between = [usable.interval] if usable.interval else []
    bases = {i.name: i.basis for i in plan.inputs}
    sized = (
        f"{counted(plan.instances_before_safety, 'instance')} of "
        f"{counted(plan.tensor_parallel, 'GPU')} for the peak ({bases['peak']}), "
        f"× {plan.safety_factor:g} safety ({bases['safety']})"
    )
    answers = [
        Entry("FLEET", headline(plan).partition(";")[0], state="good"),
        *([Entry("COST", year, _cost_aside(plan))] if year else []),
        Entry("CAPACITY", f"{usable.value} an instance", ", ".join([*between, *plan.slos])),
        Entry("SIZED", sized),
        Entry("SPARE", _spare(plan)),
    ]
    if pools := plan.pools:
        ratio = f"{pools.prefill_instances}:{pools.decode_instances} instances"
        why = "if prefill is apart from decoding; estimated from this run"
        answers.append(Entry("P:D", ratio, why))
    if plan.predicted:
        answers.append(Entry("PREDICTED", "nothing was measured", state="unsure"))
    hosted = [next(iter(hosted_lines(h, plan))).strip() for h in plan.hosted[:HOSTED_SHOWN]]
    following = summary.next_command or ""
    return Screen(
        answers,
        table_of(sensitivity_rows(plan.sensitivity)),
        drawn=[Entry("HOSTED", x.partition(", ")[0], x.rpartition("; ")[2]) for x in hosted],
        notes=_notes(plan.warnings),
        next_command=None if following.startswith("ampacity plan") else following,
    )


def tiers_screen(tiers: TierPlan) -> Screen:
    """Return the screen of a plan of tiers: the whole fleet, and each tier."""
    text = f"{instances_text(tiers.instances, tiers.instances_ci)}, {counted(tiers.gpus, 'GPU')}"
    answers = [Entry("FLEET", f"{text} for {tiers.peak_rps:.4g} requests/s", tiers.mode, "good")]
    if year := year_text(tiers).removeprefix("; "):
        answers.append(Entry("COST", year))
    if tiers.ratio is not None:
        answers.append(Entry("RATIO", f"P:D {tiers.ratio:.3g}"))
    rows = [["tier", "GPU", "instances", "GPUs", "req/s each", "peak, req/s"]]
    for tier in tiers.tiers:
        plan, each = tier.plan, significant(tier.plan.capacity_rps)
        figures = [f"{plan.instances:,}", f"{plan.gpus:,}", each, f"{plan.peak_rps:.4g}"]
        rows.append([tier.name, tier.gpu, *figures])
    warned = [*(w for tier in tiers.tiers for w in tier.plan.warnings), *tiers.warnings]
    return Screen(answers, table_of(rows), notes=_notes(warned))


def _notes(warnings: Sequence[Warned]) -> list[str]:
    """Return each warning in short, once."""
    return list(dict.fromkeys(filter(None, (NOTES.get(w.code, w.text) for w in warnings))))


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """Return rows of words as a table; the first has the heads."""
    heads = [Column(head, "", i, text=not i) for i, head in enumerate(rows[0])]
    return Table("", heads, [[Cell(text) for text in row] for row in rows[1:]])


def _cost_aside(plan: Plan) -> str:
    each = [line.strip() for line in _costs(plan)][1:3]
    return f"the same as {' or as '.join(each)} {plan.at_mean_load}" if each else ""


def tiers_text(tiers: TierPlan) -> str:
    """Return the plan of tiers: the whole, then each."""
    whole = (
        f"{instances_text(tiers.instances, tiers.instances_ci)}, {counted(tiers.gpus, 'GPU')} for "
    )
    whole += f"{tiers.peak_rps:.4g} requests/s ({tiers.mode}){year_text(tiers)}"
    if tiers.cost_per_thousand_requests is not None:
        whole += f", {usd(tiers.cost_per_thousand_requests)} for 1,000 requests"
    lines = [whole]
    for tier in tiers.tiers:
        plan = tier.plan
        rate = rate_text(plan.capacity_rps, plan.capacity_rps_ci, plan.verified_rps)
        lines += [
            f"  {tier.name}: {headline(plan)}",
            f"    {plan.run}: one instance of {plan.tensor_parallel} GPU"
            f"{'s' if plan.tensor_parallel > 1 else ''} ({tier.gpu}) carries "
            f"{rate} at {', '.join(plan.slos)}",
            f"    {plan.instances_before_safety} for the peak × {plan.safety_factor:g} safety "
            f"({_basis(plan, 'safety')})",
            *(f"  {line}" for hosted in plan.hosted for line in hosted_lines(hosted, plan)),
            *_indented(_warned(plan.warnings), "    "),
        ]
    if tiers.ratio is not None:
        first, second = (tier.plan.instances for tier in tiers.tiers)
        lines.append(f"  P:D ratio {first}:{second} = {tiers.ratio:.3g}")
    return "\n".join([*lines, *_warned(tiers.warnings)])


def sensitivity_rows(moved: Sequence[Moved]) -> list[list[str]]:
    """Return the table of what moves the answer: heads, then the input that moves it most."""
    rows = [["if this were 20 % lower / higher", "instances", "USD a year", "USD for 1,000"]]
    for one in moved:
        year = "–" if one.cost_per_year is None else _pair(one.cost_per_year, ",.0f")
        each = "–"
        if one.cost_per_thousand is not None:
            each = " / ".join(significant(end) for end in one.cost_per_thousand)
        rows.append([one.input, _pair(one.instances, ",d"), year, each])
    if all(row[2] == "–" for row in rows[1:]):  # no price
        return [row[:2] for row in rows]
    return rows


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def _pair(ends: tuple[float, float], form: str) -> str:
    return " / ".join(format(end, form) for end in ends)


def _costs(plan: Plan) -> Iterator[str]:
    if plan.cost_per_hour is None or plan.gpu_hour_usd is None:
        return
    costs = {what: v for name, what in COSTS.items() if (v := getattr(plan, name)) is not None}
    yield (
        f"  {gpu_price(plan.gpus, plan.gpu_hour_usd)} ({_basis(plan, 'GPU-hour')}) = "
        f"{usd(plan.cost_per_hour)} an hour; {len(costs)} ways to express the same cost "
        f"{plan.at_mean_load}:"
    )
    for what, value in costs.items():
        yield f"    {usd(value)} for {what}"


def hosted_lines(hosted: Hosted, plan: Plan) -> Iterator[str]:
    """Yield a hosted API against the fleet, and when its prompt cache pays."""
    own, cached = plan.fleet_cost_per_thousand_requests, "" if hosted.prefix else ", none cached"
    yield (
        f"  {hosted.model}: {usd(hosted.cost_per_thousand_requests)} for 1,000 requests"
        f"{cached}, {100 * hosted.output_share:.0f} % of it for output"
        + ("" if own is None else f"; this fleet: {usd(own)}")
    )
    gpu = f"at this load with GPUs below {usd(hosted.crossover_gpu_hour_usd)} an hour"
    crossing = f"{_against(hosted)}; " if hosted.crossover_utilisation is not None else ""
    yield f"    this fleet is {crossing or 'cheaper '}{gpu}"
    if even := hosted.break_even:
        yield (
            f"    its prompt cache pays from {even.exact_calls} calls with one prefix on (exactly "
            f"{even.exact:.3g}), by the cautious rule from {even.cautious_calls} "
            f"({even.cautious:.3g})"
        )
    if held := hosted.prefix:
        yield (
            f"    {held.tokens:,.0f} cached tokens × {held.calls_per_day:,.0f} calls a day, as one "
            "prefix that is written once a day (assumed): "
            f"{usd(held.usd_per_day_without_cache)} a day without the cache, "
            f"{usd(held.usd_per_day_with_cache)} with it"
        )


def _against(hosted: Hosted) -> str:
    """Return from which load on a fleet is cheaper than a hosted API."""
    use, rate = hosted.crossover_utilisation, hosted.crossover_rps
    if use is None or rate is None or use > 1:
        return f"dearer than {hosted.model} at any load that it carries"
    return f"cheaper than {hosted.model} from {rate:.3g} req/s on ({100 * use:.2g} % of the fleet)"


def _basis(plan: Plan, name: str) -> str:
    """Return the basis of an input, and where it comes from: ``stated: --gpu-hour``."""
    return next(f"{i.basis}: {i.source}" for i in plan.inputs if i.name == name)


def _spare(plan: Plan) -> str:
    """Return for example ``2 of 15 are spare: the peak is carried while one is down``."""
    spare, down = plan.instances - plan.instances_before_safety, plan.one_replica_down
    if spare:
        are = "are" if spare > 1 else "is"
        return f"{spare} of {plan.instances} {are} spare: the peak is carried while one is down"
    return (
        f"none is spare: to carry the peak while one is down, have {counted(down, 'instance')} "
        f"({counted(plan.one_replica_down_gpus, 'GPU')})"
    )


def _indented(lines: Sequence[str], by: str = "  ") -> list[str]:
    return [by + line for line in lines]


def _warned(warnings: Sequence[Warned]) -> list[str]:
    return [f"Warning: {warned.text}" for warned in warnings]
