"""``ampacity simulate``: an OpenAI-compatible server with a simulated inference engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.engine_options import Preset, full_preset, make_face, with_engine, with_face

if TYPE_CHECKING:
    from ampacity.simulator.server.faults import Plan


Calibrate = Annotated[
    Path | None,
    o.opt(
        "RUN", "Fit the engine's bandwidth, compute and overhead to a measured sweep, then serve."
    ),
]
Host = Annotated[str, o.opt("ADDRESS", "Address to listen on.")]
Port = Annotated[int, o.opt("N", "Port; 0 picks a free one.")]
Model = Annotated[str | None, o.opt("NAME", "Name of the model. Default: the preset's.")]
ApiKeyEnv = Annotated[
    str | None,
    o.opt("NAME", "Environment variable that holds the API key. Requests without it are refused."),
]
Seed = Annotated[
    int, o.opt("N", "Seed of what is random: words and lengths of requests without a seed.")
]
Faults = Annotated[
    str | None,
    o.opt("JSON|FILE", "Faults to inject. See docs/simulator.md; times count from the start."),
]


@with_engine
@with_face
def simulate(
    engine: dict[str, Any],
    face: dict[str, Any],
    preset: Preset = "llama3-8b-a100",
    calibrate: Calibrate = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: Model = None,
    api_key_env: ApiKeyEnv = None,
    seed: Seed = 0,
    faults: Faults = None,
) -> None:
    """Serve a simulated engine at http://HOST:PORT/v1, with metrics at /metrics.

    ampacity simulate --preset qwen3-32b@2xh200,weights=fp8 --replicas 2

    ampacity simulate --faults '{"errors": {"503": 0.02}}'
    """
    from dataclasses import replace

    from ampacity.simulator.models.hardware import PRESETS, find_deployment
    from ampacity.simulator.server.server import Start, serve

    if preset == "list":
        typer.echo("\n".join(PRESETS))
        return
    plan, name, key = _plan(faults), model or preset, api_key_env
    start = Start(full_preset(preset, engine), host, port, name, key, make_face(face), plan, seed)
    deployment = find_deployment(start.preset)
    if calibrate is not None:
        from ampacity.experiments.virtual.calibrate import calibrate_to_run

        config, lines = calibrate_to_run(calibrate, deployment.config)
        prefill = None if deployment.prefill is None else config
        deployment = replace(deployment, config=config, prefill=prefill)
        print("\n".join(lines), flush=True)
    serve(start, deployment)


def _plan(faults: str | None) -> Plan:
    from ampacity.files import read_bytes
    from ampacity.simulator import SimulatorError
    from ampacity.simulator.server.face import read_options
    from ampacity.simulator.server.faults import Plan

    if faults is None:
        return Plan()
    try:
        text = (
            faults.encode("utf-8", "replace")
            if faults.lstrip().startswith("{")
            else read_bytes(faults)
        )
    except OSError as error:
        raise SimulatorError(
            f"--faults {faults}: {error.strerror}; give a file or a JSON object"
        ) from error
    return read_options(text, Plan, "faults")
