"""Gather the inputs of a fleet: the options of the run, its GPUs, and the traffic to carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampacity.analysis.capacity.fleet import FleetError, Traffic, traffic_of_profile
from ampacity.config import GPU_FACTS, gpus_named
from ampacity.values import ConfigError
from ampacity.workloads.profile import read_yaml

FLAGS = {"peak_rps": "peak_rps", "safety_factor": "safety", "gpu_hour_usd": "gpu_hour"}
"""Options whose defaults are ``fleet_inputs`` of run.json, by their name there."""


def options_of_run(meta: Mapping[str, Any], profile: Path | None) -> dict[str, Any]:
    """Return the options that the run was given; the peak comes from a profile if there is one."""
    of_run = meta.get("fleet_inputs") or {}
    found = {FLAGS[name]: of_run[name] for name in FLAGS if of_run.get(name) is not None}
    if profile is not None:
        found.pop("peak_rps", None)
    return found


def gpus_measured(meta: Mapping[str, Any]) -> int:
    """Return the GPUs of the measured instance: from --tp, --lock or a prediction's preset."""
    given = int((meta.get("fleet_inputs") or {}).get("tensor_parallel") or 1)
    texts = [(meta.get("locked") or {}).get(name) for name in GPU_FACTS]
    texts += [(meta.get("endpoint") or {}).get("model")] if meta.get("predicted") else []
    return given if given > 1 else gpus_named(*texts) or 1


def traffic_of(peak_rps: float | None, mean_rps: float | None, profile: Path | None) -> Traffic:
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
    if not 0 < mean_rps <= traffic.peak_rps:
        raise ConfigError(
            f"--mean-rps {mean_rps:g}: give a number above 0 and at most the peak of "
            f"{traffic.peak_rps:g}"
        )
    return replace(traffic, mean_rps=mean_rps)
