"""The command that would settle what a run leaves open, made of the run's own."""

import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ampacity.analysis.contract.burst import Burst
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.slo import SLO_SETS
from ampacity.analysis.stage_warnings import IDLE_CPU_FRACTION
from ampacity.durations import duration_text, exact_text, read_duration, rounded_up
from ampacity.loadgen.rundir.meta import stages_of

ROOM = 1.1  # over the requests that decide: arrivals are random
LOADS_OF = {"open": ("--rates", "offered_rps"), "closed": ("--concurrency", "concurrency")}
OF_LOADS = ("--rates", "--concurrency", "--duration", "--max-duration")
OF_SEARCH = ("--precision", "--max-duration", "--repeats", "--ramp")
OF_BURST = (
    *("--base-rps", "--factor", "--shape", "--max-recovery"),
    *("--base-duration", "--burst-duration", "--recovery-duration"),
)
OF_DEMO = ("--rates", "--duration", "--seed")
OF_FLEET = ("--peak-rps", "--tp", "--safety", "--gpu-hour")
OF_SOAK = ("--rps", "--window", "--duration")
BUDGETS = ("--max-cost", "--max-tokens", "--max-requests")
OF_OUTPUT, FLAGS_OF_OUTPUT = ("--out", "-o", "--summary"), ("--json", "--quiet", "-q")
FLAGS_OF_SEARCH = ("--closed", "--search")
OF_LOAD = ("run", "sweep", "search", "burst")  # commands that a client can limit
LONGER = ("never_settled", "drift", "too_short")  # warnings that ask for a longer --duration
FEW_CORES = 4  # of fewer none is left to be the client's own
CHECK_LIMIT = "10m"  # of a check's stage, which ends as soon as it knows
ENOUGH_APART = 1.1  # violated over verified rate: a search would not find more


def again(words: Sequence[str], changes: Mapping[str, str | None], drop: Sequence[str] = ()) -> str:
    """Return a command line with other values of some options, without what is about its output.

    A change to None, and ``drop`` (flags without a value), remove an option. A demo has few.
    """
    if words[1:2] == ["demo"]:
        changes = {name: changes[name] for name in OF_DEMO if name in changes}
    gone, kept, rest = {*changes, *OF_OUTPUT}, [], iter(words)
    drop = (*drop, *FLAGS_OF_OUTPUT)
    for word in rest:
        if word in gone:
            next(rest, None)
        elif word not in drop and word.partition("=")[0] not in gone:
            kept.append(word)
    given = [part for name, value in changes.items() if value for part in (name, value)]
    return shlex.join([*kept, *given])


def same_stages(words: Sequence[str], meta: Mapping[str, Any]) -> str | None:
    """Return the command that plays the stages of a run again whose loads it chose itself.

    The same loads in the same order, each as long as it was, by the same seed: requests, their
    lengths and times are the same. None where the loads were given, or one option cannot name them.
    ``meta``: run.json.
    """
    last = {s.index if s.schedule is None else s.schedule: s for s in stages_of(meta)}
    stages = last.values()  # of repeats
    kinds = {s.kind for s in stages}
    given = any(_text(words, option) for option in OF_LOADS[:2])
    chosen = meta.get("experiment") in ("demo", "sweep", "search", "predict") and not given
    if not chosen or len(kinds) != 1 or len(words) < 2 or any(s.lengths for s in stages):
        return None
    (kind,) = kinds
    option, load = LOADS_OF[kind]
    ramps = [s.ramp_s or 0.0 for s in stages]
    lengths_s = [(s.end_ns - s.start_ns) / 1e9 for s in stages]
    loads = {
        option: ",".join(f"{getattr(s, load):.15g}" for s in stages),
        "--duration": ",".join(exact_text(s - r) for s, r in zip(lengths_s, ramps, strict=True)),
        **({} if (seed := meta.get("seed")) is None else {"--seed": str(seed)}),
    }
    words = [words[0], "sweep" if words[1] == "search" else words[1], *words[2:]]
    return again(words, {**dict.fromkeys((*OF_LOADS, *OF_SEARCH)), **loads}, FLAGS_OF_SEARCH)


def check_command(summary: Summary, meta: Mapping[str, Any]) -> str | None:
    """Return the command that passes or fails a release: a load that this run shows to hold.

    The highest that met the SLOs by itself, else by all stages together. None where no option can
    name it.
    """
    words, capacity = _recorded(meta), summary.capacity
    together = (s.offered_rps or 0.0 for s in summary.stages if s.slo_met_by_all)
    held_rps = capacity.verified_rps or max(together, default=0.0)
    if not (words and summary.slos and held_rps) or {"-c", "--config", "--trace"} & {*words}:
        return None
    if words[1] == "demo":
        words = [words[0], "check", "http://YOUR-SERVER/v1", *_demo_load(summary)]
    elif words[1] not in ("run", "sweep", "search"):
        return None
    gone = dict.fromkeys((*OF_LOADS, *OF_SEARCH, *OF_FLEET, "--lengths", "--think-time"))
    rates = {**gone, "--rates": f"{held_rps:g}", "--max-duration": CHECK_LIMIT}
    return again([words[0], "check", *words[2:]], rates, FLAGS_OF_SEARCH)


def ab_command(metas: Sequence[Mapping[str, Any]], stage: Stage) -> str | None:
    """Return the A/B of the endpoints of two runs at the load of a stage, by the first's options.

    None for runs of one endpoint or of two models, or whose workload no option of ``ab`` names.
    ``metas``: their run.json.
    """
    ends = [meta.get("endpoint") or {} for meta in metas]
    urls = [str(end["url"]) for end in ends if end.get("url")]
    words = _recorded(metas[0])
    measured = not any(meta.get("predicted") or meta.get("ab") for meta in metas)
    if len({*urls}) != 2 or len({end.get("model") for end in ends}) > 1 or not measured:
        return None
    if words[1:2] not in [["run"], ["sweep"], ["search"]] or {"-c", "--config", "--trace"} & {
        *words
    }:
        return None
    gone = dict.fromkeys(
        (*OF_LOADS, *OF_SEARCH, "--lengths", "--checker", "--prometheus", "--otlp")
    )
    kept = [word for word in words[2:] if word not in urls]
    option, _ = LOADS_OF[stage.kind]
    at = f"{stage.offered_rps:.6g}" if option == "--rates" else str(stage.concurrency_set)
    return again(["ampacity", "ab", *urls, *kept], {**gone, option: at}, FLAGS_OF_SEARCH)


def decide_command(summary: Summary, meta: Mapping[str, Any]) -> str | None:
    """Return the command that decides every load within the interval that a run leaves open.

    None where there is none, where one option cannot name them, or a trace sets the load.
    """
    words, open_ = _recorded(meta), _open_stages(summary)
    repeats = words[1:2] in (["demo"], ["run"], ["sweep"])
    if not repeats or not open_ or summary.workload.get("trace") or summary.families:
        return None
    if {stage.kind for stage, _ in open_} != {"open"}:
        return None
    return _deciding(summary, words, sorted(open_, key=lambda one: one[0].offered_rps or 0.0))


def _demo_load(summary: Summary) -> list[str]:
    """Return the SLOs and the workload of a demo as options."""
    slos = [part for slo in summary.slos for part in ("--slo", slo.text)]
    name = summary.workload.get("name")
    return [*slos, *(["--workload", str(name)] if name else [])]


def next_command(summary: Summary, meta: Mapping[str, Any], path: str) -> str | None:
    """Return the next command; None where nothing is open, or the run cannot be repeated.

    ``meta``: run.json; ``path``: the run's directory.
    """
    words, quota = _recorded(meta), summary.quota
    if not words or summary.imported or (quota and quota.binds):
        return None
    if words[1] == "demo":  # it needs most of two cores; a prediction needs no real time
        slos = shlex.join(part for slo in summary.slos for part in ("--slo", slo.text))
        if summary.audit.client_limited:
            return f"ampacity predict --preset demo-l40s --workload chat-short {slos}"
        return f"ampacity sweep http://YOUR-SERVER/v1 {slos}"
    if str(summary.partial or "").startswith(("interrupted", "killed")):
        return resume_command(words, path) or again(words, {})
    if str(summary.partial or "").startswith("ended by its budget"):
        return _with_more_budget(words, meta.get("planned") or {})
    if words[1] in OF_LOAD and summary.audit.client_limited and not _bounded(summary):
        return relieved(words, meta, summary.audit.cpu_fraction)
    if summary.burst:
        return _after_burst(summary.burst, words)
    if not summary.slos:
        limits = " ".join(f"--slo {slo}" for slo in SLO_SETS["interactive"][0])
        short = any(warned.code in LONGER for warned in summary.warnings)
        longer = short and _value(words, "--duration")
        length = {"--duration": duration_text(2 * longer)} if longer else {}
        return f"{again(words, {'--slo': None, **length})} {limits}"
    if words[1] not in ("run", "sweep", "search", "predict") or not summary.stages:
        return None
    if summary.workload.get("trace"):
        return _plan(summary, path)
    return _after_stages(summary, words) or _plan(summary, path)


def resume_command(words: Sequence[str], path: str) -> str | None:
    """Return the command that goes on with the run in ``path``; None where that cannot be."""
    if words[1:2] == ["ab"]:  # the run is one of two
        path = str(Path(path).parent) if Path(path).name else ".."
    known = len(words) > 1 and words[0] == "ampacity" and words[1] in (*OF_LOAD, "soak", "ab")
    return shlex.join([*words[:2], "--resume", path]) if known else None


def _with_more_budget(words: Sequence[str], planned: Mapping[str, float]) -> str | None:
    """Return the command with budgets for all that was planned, in two digits, rounded up.

    Twice a budget where that is not known, or fitted in. None where it was another's.
    """
    more = {}
    for name in BUDGETS:
        if (text := _text(words, name)) and text[0].isdigit():
            needed, given = planned.get(name.removeprefix("--max-")) or 0.0, float(text)
            fits = needed <= given
            more[name] = f"{2 * given if fits else _two_digits_up(needed):.15g}"
    return again(words, more) if more else None


def budgets_times(words: Sequence[str], times: float) -> dict[str, str]:
    """Return the budgets of a command for so many times its load, in two digits, rounded up."""
    given = {name: text for name in BUDGETS if (text := _text(words, name)) and text[0].isdigit()}
    times = max(times, 1.0)
    return {name: f"{_two_digits_up(times * float(text)):.15g}" for name, text in given.items()}


def _two_digits_up(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(round(value / step, 6)) * step


def relieved(
    words: Sequence[str], meta: Mapping[str, Any], cpu_fraction: float | None
) -> str | None:
    """Return the run's command with what helps a client that was the limit.

    That is twice the workers, or, for one whose CPU was idle, the upper half of the machine's
    cores: which of them are free is not recorded. None where only a quieter machine helps.
    """
    if cpu_fraction is None or cpu_fraction >= IDLE_CPU_FRACTION:
        return again(words, {"--workers": str(2 * int(meta.get("workers") or 1))})
    cores = int((meta.get("host") or {}).get("cpus") or 1)
    few = cores < FEW_CORES
    return None if few else again(words, {"--cpus": f"{cores // 2}-{cores - 1}"})


def _bounded(summary: Summary) -> bool:
    """Return whether the stages with a client that kept up show where the capacity ends."""
    capacity, search = summary.capacity, summary.search
    if capacity.lower_loads:
        return True
    found = bool(capacity.capacity_rps) and capacity.crossing != "lower_bound"
    return found and (not search or bool(search.reached))


def _recorded(meta: Mapping[str, Any]) -> list[str]:
    """Return the words of the run's command; none where it cannot be repeated."""
    words = [str(word) for word in meta.get("command_line") or []]
    hidden = any("***" in word for word in words)  # values of some options are not recorded
    return [] if hidden or len(words) < 2 or words[0] != "ampacity" else words


def _after_stages(summary: Summary, words: Sequence[str]) -> str | None:
    search, capacity = summary.search, summary.capacity
    rps, limit = capacity.capacity_rps, _value(words, "--max-duration")
    if search and not search.reached:
        more = (search.more_requests or 0) / rps if rps else 0.0
        longer_s = max(2 * limit, ROOM * (limit + more)) if limit else 0.0
        longer = duration_text(rounded_up(longer_s)) if limit else None
        times = longer_s / limit if limit else 1.0
        return again(words, {"--max-duration": longer, **budgets_times(words, times)})
    if search:
        return None
    steady = dict.fromkeys(OF_SEARCH)
    if loads := capacity.lower_loads:
        option = "--rates" if capacity.c_max_basis == "open" else "--concurrency"
        lower = {option: ",".join(f"{load:g}" for load in loads)}
        return again(words, {**dict.fromkeys(OF_LOADS[:2]), **steady, **lower}, FLAGS_OF_SEARCH)
    if rps and capacity.crossing == "lower_bound" and capacity.c_max_basis == "open":
        higher = f"{2 * rps:.3g},{4 * rps:.3g}"
        return again(words, {**steady, "--rates": higher}, FLAGS_OF_SEARCH)
    verified, violated = capacity.verified_rps, capacity.violated_rps
    if verified and violated and violated <= ENOUGH_APART * verified:
        return None
    if not (open_ := _least_open(summary)):
        finds = capacity.c_max_basis != "closed" and not {"-c", "--config"} & {*words}
        return _search(words) if finds else None
    return _deciding(summary, words, [open_])


Open = tuple[Stage, int]  # an inconclusive stage, and how many more requests decide it


def deciding_s(stage: Stage, more: int) -> float | None:
    """Return how long a new stage of that load has to be, in s, if it takes ``more`` requests.

    None where the rate is not known.
    """
    rate = stage.offered_rps or stage.achieved_rps
    if not rate:
        return None
    return rounded_up(stage.window.start_s + ROOM * (stage.requests + more) / rate)


def _deciding(summary: Summary, words: Sequence[str], open_: Sequence[Open]) -> str:
    """Return the command that plays stages of one loop again, each long enough to be decided."""
    lengths, needed = [], 0.0
    for stage, more in open_:
        needed += ROOM * (stage.requests + more)
        lengths.append(duration_text(deciding_s(stage, more) or 0.0))
    if open_[0][0].offered_rps:
        load = {"--rates": ",".join(f"{stage.offered_rps:g}" for stage, _ in open_)}
    else:
        load = {"--concurrency": ",".join(str(stage.concurrency_set) for stage, _ in open_)}
    budgets = budgets_times(words, needed / max(summary.requests, 1))
    changes = {**dict.fromkeys((*OF_LOADS, *OF_SEARCH)), **load, "--duration": ",".join(lengths)}
    return again(words, {**changes, **budgets}, FLAGS_OF_SEARCH)


def _open_stages(summary: Summary) -> list[Open]:
    """Return the inconclusive stages within the interval that more requests would decide."""
    capacity = summary.capacity
    low, high = capacity.capacity_rps_ci or (capacity.verified_rps, capacity.violated_rps)
    low, high = low or 0.0, high or float("inf")
    return [
        (stage, more)
        for stage in summary.stages
        if stage.slo_met is None and not stage.client_limited and stage.achieved_rps
        if low <= (stage.offered_rps or stage.achieved_rps) <= high
        if (more := max((v.more_requests or 0 for v in stage.slo_verdicts), default=0))
    ]


def _least_open(summary: Summary) -> Open | None:
    """Return the open stage that lacks least."""
    found = _open_stages(summary)
    # above the estimate a stage is likely to show a violation, and the capacity lies below it
    rps = summary.capacity.capacity_rps or float("inf")
    below = [one for one in found if (one[0].offered_rps or 0.0) <= rps]
    return min(below or found, key=lambda one: one[1], default=None)


def _search(words: Sequence[str]) -> str:
    """Return the search with the options of a run or a sweep."""
    virtual = words[1] == "predict"
    command = [words[0], "predict", "--search"] if virtual else [words[0], "search"]
    return again([*command, *words[2:]], dict.fromkeys((*OF_LOADS, "--lengths")))


def _plan(summary: Summary, path: str) -> str | None:
    """Return the plan of a fleet, where the run names none; its peak is an example."""
    rps = summary.capacity.capacity_rps
    if not rps or summary.fleet.instances is not None:
        return None
    peak = f"{float(f'{10 * rps:.2g}'):g}"
    return shlex.join(["ampacity", "plan", path, "--peak-rps", peak])


def _after_burst(burst: Burst, words: Sequence[str]) -> str | None:
    if burst.base_too_short:
        return again(words, {"--base-duration": _doubled(words, "--base-duration", 60.0)})
    if burst.recovery_s is None and not burst.harm.base:
        return again(words, {"--recovery-duration": _doubled(words, "--recovery-duration", 120.0)})
    if burst.headroom.enough:
        factor = 2 * float(_text(words, "--factor") or 3.0)
        return again(words, {"--factor": f"{factor:g}"})
    return _sweep(words)


def _sweep(words: Sequence[str]) -> str | None:
    """Return the sweep with the options of a burst: the capacity, and what limits it."""
    if {"-c", "--config"} & {*words}:
        return None
    return again([words[0], "sweep", *words[2:]], dict.fromkeys((*OF_BURST, *OF_SOAK)))


def sweep_instead(meta: Mapping[str, Any]) -> str | None:
    """Return the sweep that a burst's or soak's report asks for; None where it cannot be made."""
    words = _recorded(meta)
    return _sweep(words) if words else None


def _doubled(words: Sequence[str], option: str, default_s: float) -> str:
    return duration_text(2 * (_value(words, option) or default_s))


def _value(words: Sequence[str], option: str) -> float | None:
    """Return the seconds of an option, if it was given."""
    text = _text(words, option)
    return read_duration(text) if text else None


def _text(words: Sequence[str], option: str) -> str | None:
    after = [b for a, b in pairwise(words) if a == option]
    after += [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]
    return after[-1] if after else None
