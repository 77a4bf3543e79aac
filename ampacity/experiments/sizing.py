"""Plan fleets from run directories, and from what is stated beside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from ampacity.analysis.capacity.fleet import Traffic, traffic_of_profile
from ampacity.analysis.capacity.fleet_figures import FleetError
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.money import Prices
from ampacity.analysis.decision.plan import Plan, Terms, plan_fleet
from ampacity.analysis.decision.tiers import Mode, Tier, TierPlan, plan_tiers, tier_traffic
from ampacity.analysis.slo import EXTREMES, Slo
from ampacity.analysis.summary import summarise
from ampacity.config import FLEET_OPTIONS, GPU_FACTS, fleet_inputs, gpus_named
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.settings import read_settings
from ampacity.values import SMALLEST, ConfigError
from ampacity.workloads.profile import read_yaml


def options_of_run(meta: Mapping[str, Any], profile: Path | None) -> dict[str, Any]:
    """Return the options that the run was given; the peak comes from a profile if there is one."""
    of_run = meta.get("fleet_inputs") or {}
    found = {
        FLEET_OPTIONS[name]: of_run[name] for name in FLEET_OPTIONS if of_run.get(name) is not None
    }
    if profile is not None:
        found.pop("peak_rps", None)
    return found


def gpus_measured(meta: Mapping[str, Any]) -> int:
    """Return the GPUs of the measured instance: from --tp, --lock or a prediction's preset."""
    given = int((meta.get("fleet_inputs") or {}).get("tensor_parallel") or 1)
    texts = [(meta.get("locked") or {}).get(name) for name in GPU_FACTS]
    texts += [(meta.get("endpoint") or {}).get("model")] if meta.get("predicted") else []
    return given if given > 1 else gpus_named(*texts) or 1


@dataclass(frozen=True)
class Sizing:
    """Facts that are stated beside the runs; ``raw``: peak_rps, tp, gpu_hour and safety as given."""

    raw: Mapping[str, Any]
    profile: Path | None = None
    mean_rps: float | None = None
    utilisation: float | None = None
    accepted: float | None = None
    prices: Mapping[str, Prices] = field(default_factory=dict)
    slos: Sequence[Slo] = ()


def read_judged(path: Path, slos: Sequence[Slo]) -> tuple[Run, Summary]:
    """Return (a run, its summary), judged by other SLOs than its own where some are given.

    The summary is computed from the records, as that of ``report`` is.
    """
    run = load_run(path)
    if not run.meta.get("stages"):
        raise ConfigError(f"{path}: the run has no stage: nothing was measured")
    if extreme := next((slo for slo in slos if slo.quantile in EXTREMES), None):
        raise ConfigError(
            f"--slo {extreme.text}: the extreme of a run depends on its length and sizes no fleet: "
            f"give a percentile, as {extreme.metric}_p99={extreme.limit_text}"
        )
    if slos:
        run = replace(run, meta={**run.meta, "slos": [slo.as_dict() for slo in slos]})
    return run, summarise(run)


def plan_run(
    path: Path, run: Run, summary: Summary, sizing: Sizing, traffic: Traffic | None = None
) -> Plan:
    """Return the plan for one run; ``traffic`` None: as it is stated, or was at the run.

    Raises FleetError, ConfigError.
    """
    given = fleet_terms(run, sizing)
    if traffic is None:
        traffic = traffic_of(given["peak_rps"], sizing)
    of_run = options_of_run(run.meta, sizing.profile).keys() - sizing.raw.keys()
    terms = Terms(
        given["tensor_parallel"],
        given["safety_factor"],
        given["gpu_hour_usd"],
        sizing.utilisation,
        sizing.accepted,
        sizing.prices,
        frozenset(name for name, flag in FLEET_OPTIONS.items() if flag in of_run),
        gpus_measured(run.meta),
    )
    return plan_fleet(str(path), summary, traffic, terms)


def fleet_terms(run: Run, sizing: Sizing) -> dict[str, Any]:
    """Return ``fleet_inputs`` of a run, what is stated in place of what the run was given."""
    own = options_of_run(run.meta, sizing.profile)
    return fleet_inputs(read_settings({**own, "tp": gpus_measured(run.meta), **sizing.raw}))


def plan_of_tiers(texts: Sequence[str], mode: str, sizing: Sizing) -> TierPlan:
    """Return the plan of tiers, each ``NAME=RUN,SHARE,GPU,PRICE``. Raises ConfigError."""
    if mode not in get_args(Mode):
        raise ConfigError(f"--mode {mode}: none of {', '.join(get_args(Mode))}")
    how = cast(Mode, mode)
    stated = [_tier(text) for text in texts]
    names = [name for name, *_ in stated]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--tier {twice}: the name stands twice")
    traffic = traffic_of(read_settings({**sizing.raw}).get("peak_rps"), sizing)
    parts = tier_traffic(traffic, [share for _, _, share, _, _ in stated], how)
    tiers = []
    for (name, path, share, gpu, price), part in zip(stated, parts, strict=True):
        run, summary = read_judged(path, sizing.slos)
        if summary.predicted:
            raise ConfigError(f"--tier {name}: {path} is predicted: a tier needs a measured run")
        raw = {**sizing.raw, "gpu_hour": price} | _gpus(gpu)
        try:
            plan = plan_run(path, run, summary, replace(sizing, raw=raw), part)
        except FleetError as error:
            raise FleetError(f"--tier {name}: {path}: {error}") from error
        tiers.append(Tier(name=name, share=share, gpu=gpu, plan=plan))
    return plan_tiers(how, traffic, tiers)


def _tier(text: str) -> tuple[str, Path, float, str, float]:
    """Return (name, run, share, GPU, price) of a ``--tier``."""
    name, equals, rest = text.partition("=")
    parts = [part.strip() for part in rest.rsplit(",", 3)]
    try:
        path, gpu, price = parts[0], parts[2], float(parts[3])
        share = float(parts[1].removesuffix("%")) / (100 if parts[1].endswith("%") else 1)
    except (IndexError, ValueError):
        equals = ""
    if not equals or not name.strip() or not path:
        raise ConfigError(
            f"--tier {text}: write NAME=RUN,SHARE,GPU,PRICE, as small=runs/small,0.8,h100,2.50"
        )
    if not 0 < share <= 1:
        raise ConfigError(f"--tier {name}: share {share:g} is not above 0 and at most 1")
    if not 0 < price < math.inf:
        raise ConfigError(f"--tier {name}: price {price:g}: give a number above 0")
    return name.strip(), Path(path), share, gpu, price


def _gpus(gpu: str) -> dict[str, int]:
    """Return the option that ``4xH100`` states; that of the run where no number is given."""
    number = gpus_named(gpu)
    if number is None and not gpu[:1].isalpha():
        raise ConfigError(f"--tier: GPU {gpu!r}: write a name, or a number of them, as 4xH100")
    return {} if number is None else {"tp": number}


def traffic_of(peak_rps: float | None, sizing: Sizing) -> Traffic:
    """Return the load of a fleet, from a peak or a profile. Raises ConfigError."""
    profile, mean_rps = sizing.profile, sizing.mean_rps
    if profile is None:
        if peak_rps is None:
            raise ConfigError(
                "give the load of the fleet: --peak-rps R, or --profile FILE of "
                "'ampacity workload fit'"
            )
        traffic = Traffic(peak_rps)
    else:
        try:
            traffic = traffic_of_profile(read_yaml(profile), peak_rps)
        except FleetError as error:
            raise ConfigError(f"--profile {profile}: {error}") from error
    if mean_rps is None:
        return traffic
    if sizing.utilisation is not None:
        raise ConfigError("--mean-rps and --utilisation exclude each other: give one of them")
    if not SMALLEST <= mean_rps <= traffic.peak_rps:
        raise ConfigError(
            f"--mean-rps {mean_rps:g}: give a number above 0 and at most the peak of "
            f"{traffic.peak_rps:g}"
        )
    return replace(traffic, mean_rps=mean_rps, mean_reason=None)
