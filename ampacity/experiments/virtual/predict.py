"""Predict a run: the simulated engine alone in virtual time, with the same run directory."""

import contextlib
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ampacity.experiments.stages.conduct import ENDING, close_run, end_signals
from ampacity.experiments.stages.provenance import out_path, run_meta
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.sweep import sweep
from ampacity.experiments.virtual.player import Stopped, VirtualPlayer, stage_s
from ampacity.loadgen.probe.results import Calibration, ProbeResult, Served
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.values import ConfigError

Drive = Callable[[Rig], Awaitable[None]]


async def predict(
    settings: Settings,
    engine: EngineConfig | Deployment,
    command_line: list[str],
    progress: Progress,
    drive: Drive = sweep,
    experiment: str = "predict",
) -> Path:
    """Run an experiment on an engine in virtual time, and return its run directory."""
    _check(settings, experiment)
    out = out_path(settings, experiment)
    deployment = Deployment(engine) if isinstance(engine, EngineConfig) else engine
    meta = _meta(settings, deployment.config, experiment, command_line)
    if any(kind.cancel is not None for kind in settings.workload.classes):
        progress.note("users who cancel are not simulated: every answer runs to its end")
    began_s = time.monotonic()
    with RunWriter(out, meta) as writer:
        player = VirtualPlayer(settings, deployment, writer, progress)
        rig = Rig(settings, writer, progress, player)
        with _interruptible(rig, player, progress):
            await drive(rig)
        close_run(writer, rig.ended, player.server())
    virtual_s = sum((s["drained_ns"] - s["start_ns"]) / 1e9 for s in writer.meta["stages"])
    elapsed_s = time.monotonic() - began_s
    progress.note(f"{virtual_s:,.0f} s of engine time in {elapsed_s:.1f} s")
    return out


def _check(settings: Settings, experiment: str) -> None:
    if settings.workload.prompts is not None:
        raise ConfigError(
            f"workload {settings.workload.name} has real prompts, which virtual time does not "
            "play: practise on 'ampacity simulate', with 'ampacity sweep URL'"
        )
    if settings.workload.sessions is not None and experiment == "search":
        raise ConfigError(
            "a search looks at stages that are shorter than sessions: predict a workload of "
            "sessions without --search, with --rates"
        )
    for rate_rps in settings.rates or ():
        stage_s(settings, rate_rps)


def _meta(
    settings: Settings, config: EngineConfig, experiment: str, command_line: list[str]
) -> dict[str, Any]:
    served = Served(
        models=(config.name,),
        engine="ampacity simulator, predicted",
        max_model_len=config.max_model_len,
    )
    nothing = RequestRecord(-1, -1, 0, "ok")
    shape = RequestShape("chat", config.name)
    probe = ProbeResult(served, shape, Calibration(measured=True), nothing)
    meta = run_meta(settings, probe, secrets.token_hex(6), "", experiment, command_line, None)
    meta["predicted"] = True
    meta["endpoint"] |= {"url": f"predicted: {config.name}", "api": "chat", "server": None}
    return meta


@contextlib.contextmanager
def _interruptible(rig: Rig, player: VirtualPlayer, progress: Progress) -> Iterator[None]:
    """End the run cleanly at the first of ``end_signals``, immediately at the second."""
    names = end_signals()

    def on_signal(number: int, _: Any) -> None:
        if rig.ended and rig.ended[0] == "interrupted":
            raise KeyboardInterrupt
        progress.note(ENDING.format(names[number]))
        rig.ended = ("interrupted", f"interrupted by {names[number]}")
        player.stop()

    before = {number: signal.signal(number, on_signal) for number in names}
    try:
        with contextlib.suppress(Stopped):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
