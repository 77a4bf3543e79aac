"""Fit a simulated engine to a measured run: ``ampacity simulate --calibrate RUN``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.summary import summarise
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.calibrate import Calibration, calibrate
from ampacity.values import ConfigError

LEVELS_MIN = 3
POOR_R2 = 0.8
QUEUE_FREE = 0.7  # of max_num_seqs: above it requests may queue, which the model does not cover


def calibrate_to_run(path: Path, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """Fit bandwidth, compute and overhead to a run's ITL and TTFT by concurrency.

    Returns (config, lines to print). Raises ConfigError if the run has too few usable stages,
    RunDirError if it is not a run.
    """
    step_time = config.step_time
    if not isinstance(step_time, Roofline):
        raise ConfigError(f"--calibrate needs a preset with a roofline, {config.name} has none")
    run = load_run(path)
    levels = [
        level
        for stage in summarise(run).stages
        if (level := _level(run, stage, config)) is not None
    ]
    if len(levels) < LEVELS_MIN:
        raise ConfigError(
            f"{path}: {len(levels)} stages can be used, {LEVELS_MIN} are needed: stable, not "
            f"limited by the client, with at most {QUEUE_FREE:.0%} of {config.max_num_seqs} "
            "sequences in flight"
        )
    closed = {level["closed"] for level in levels}
    if len(closed) > 1:
        raise ConfigError(f"{path}: open and closed stages cannot be fitted together")
    concurrency, itl_s, ttft_s, inputs, outputs = (
        np.array([level[name] for level in levels], dtype=float)
        for name in ("concurrency", "itl_s", "ttft_s", "input", "output")
    )
    found = calibrate(
        step_time,
        concurrency,
        itl_s,
        ttft_s,
        inputs,
        outputs,
        closed_loop=closed.pop(),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return replace(config, step_time=found.step_time), _words(found, step_time, len(levels))


def _level(run: Run, stage: Stage, config: EngineConfig) -> dict[str, Any] | None:
    """Return one load level for the fit; None if it cannot be used."""
    concurrency = stage.concurrency_set or stage.concurrency
    if stage.stable is False or stage.client_limited or not concurrency:
        return None
    if concurrency > QUEUE_FREE * config.max_num_seqs or stage.ttft_s.mean is None:
        return None
    rows = run.requests.filter(
        pc.and_(
            pc.equal(run.requests["stage"], stage.index), pc.equal(run.requests["status"], "ok")
        )
    )
    itl_s = stage.itl_s.mean
    return {
        "closed": stage.kind == "closed",
        "concurrency": concurrency,
        "ttft_s": stage.ttft_s.mean,
        "itl_s": np.nan if itl_s is None else itl_s,
        "input": pc.mean(rows["input_tokens"]).as_py(),
        "output": pc.mean(rows["output_tokens"]).as_py(),
    }


def _words(found: Calibration, before: Roofline, levels: int) -> list[str]:
    after = found.step_time
    lines = [f"calibrated to {levels} load levels:"]
    for name, label, scale, unit in (
        ("bandwidth_bytes_s", "effective bandwidth", 1e-9, "GB/s"),
        ("compute_flops", "effective compute", 1e-12, "TFLOP/s"),
        ("overhead_s", "overhead a step", 1e3, "ms"),
    ):
        value, nominal = getattr(after, name) * scale, getattr(before, name) * scale
        known = (
            "not determined by this run"
            if name in found.unknown
            else f"± {found.relative_error[name]:.0%}"
        )
        lines.append(f"  {label}: {value:.4g} {unit} (preset {nominal:.4g}), {known}")
    lines.append(
        f"  fit: R² {found.r2_itl:.3f} for ITL, {found.r2_ttft:.3f} for TTFT; worst level off by "
        f"{np.expm1(found.worst_residual):.0%}"
    )
    if not (found.r2_itl > POOR_R2 and found.r2_ttft > POOR_R2) or found.unknown:
        lines.append(
            "  do not rely on it: run a closed-loop sweep with low concurrencies, answers of "
            "varied length, and once short and once long prompts, so that nothing queues and all "
            "three figures show"
        )
    return lines
