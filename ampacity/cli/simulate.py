"""``ampacity simulate``: an OpenAI-compatible server in front of a simulated inference engine."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def simulate(
    preset: Annotated[
        str,
        typer.Option(
            "--preset", help="Model and hardware; 'list' shows them. Or linear:ALPHA_S,BETA_S[,PREFILL_S]."
        ),
    ] = "llama3-8b-a100",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    model: Annotated[
        str | None, typer.Option("--model", help="Name that it answers to. Default: the preset's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Sequences that are decoded together at most.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Token budget of one step.", min=1)
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the key that requests must carry.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Fixes which requests fail.")] = 0,
) -> None:
    """Serve a simulated engine at http://HOST:PORT/v1 until Ctrl-C.

    ampacity simulate --preset llama3-70b-4xh100 --port 8000
    """
    from simulator import SimulatorError
    from simulator.hardware import PRESETS
    from simulator.server import configured, serve

    if preset == "list":
        for name in PRESETS:
            typer.echo(name)
        return
    api_key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not api_key:
        raise SimulatorError(f"--api-key-env {api_key_env}: that environment variable is not set or empty")
    name = model or preset
    shown_host = f"[{host}]" if ":" in host else host
    serve(
        configured(preset, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        host=host,
        port=port,
        model_name=name,
        api_key=api_key,
        seed=seed,
        ready=lambda bound: print(f"listening on http://{shown_host}:{bound}/v1 model {name}", flush=True),
    )
