"""``ampacity simulate``: an OpenAI-compatible server in front of a simulated inference engine."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from simulator.faults import Plan

ENGINE = "Engine"
ANSWERS = "How answers look and are cut into chunks"
FAULTS = "Faults"


class Policy(StrEnum):
    fcfs = "fcfs"
    prefill = "prefill-priority"
    decode = "decode-priority"


class ReasoningField(StrEnum):
    reasoning = "reasoning"
    reasoning_content = "reasoning_content"


class Usage(StrEnum):
    full = "full"
    end = "end"
    none = "none"


def simulate(
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            help="Model and hardware; 'list' shows them. Or MODEL@[Nx]HARDWARE[,SETTING=VALUE...], "
            "or linear:ALPHA_S,BETA_S[,PREFILL_S].",
        ),
    ] = "llama3-8b-a100",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Fit effective bandwidth, compute and overhead to a measured sweep, say how well, then serve.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    model: Annotated[
        str | None, typer.Option("--model", help="Name that it answers to. Default: the preset's.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the key that requests must carry.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of words and lengths, where a request brings no seed.")
    ] = 0,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs", help="Sequences decoded together at most.", min=1, rich_help_panel=ENGINE
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", help="Token budget of one step.", min=1, rich_help_panel=ENGINE
        ),
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option("--policy", help="How the scheduler shares steps.", rich_help_panel=ENGINE),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching", help="Keep KV blocks for equal prefixes.", rich_help_panel=ENGINE),
    ] = False,
    adapters: Annotated[
        str | None,
        typer.Option(
            "--adapters",
            metavar="A,B",
            help="LoRA adapters, served as models of these names.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_loras: Annotated[
        int | None,
        typer.Option(
            "--max-loras",
            help="Adapters on the device at once. Default: adapters cost nothing.",
            min=1,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    adapter_load_s: Annotated[
        float | None,
        typer.Option("--adapter-load-s", help="Time to bring an adapter in.", min=0, rich_help_panel=ENGINE),
    ] = None,
    natural_tokens: Annotated[
        float | None,
        typer.Option(
            "--natural-tokens",
            help="Mean length at which answers end by themselves (geometric). Default: they run to max_tokens.",
            min=1,
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens", help="Tokens in one chunk, after the first.", min=1, rich_help_panel=ANSWERS
        ),
    ] = 1,
    flush_ms: Annotated[
        float,
        typer.Option(
            "--flush-ms", help="Write chunks at multiples of this, as a gateway.", rich_help_panel=ANSWERS
        ),
    ] = 0.0,
    early_role: Annotated[
        bool,
        typer.Option("--early-role", help="Send the role chunk before the prefill.", rich_help_panel=ANSWERS),
    ] = False,
    reasoning_share: Annotated[
        float,
        typer.Option(
            "--reasoning-share",
            help="Share of a chat's tokens that are reasoning, ahead of the answer.",
            min=0,
            max=1,
            rich_help_panel=ANSWERS,
        ),
    ] = 0.0,
    reasoning_field: Annotated[
        ReasoningField,
        typer.Option("--reasoning-field", help="Where reasoning stands.", rich_help_panel=ANSWERS),
    ] = ReasoningField.reasoning,
    usage: Annotated[
        Usage,
        typer.Option(
            "--usage",
            help="In streams: full as asked for; end without continuous_usage_stats; none.",
            rich_help_panel=ANSWERS,
        ),
    ] = Usage.full,
    done: Annotated[
        bool, typer.Option("--done/--no-done", help="End streams with [DONE].", rich_help_panel=ANSWERS)
    ] = True,
    prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--prompt-tokens-details", help="Say cached_tokens in the usage.", rich_help_panel=ANSWERS
        ),
    ] = False,
    error_rate: Annotated[
        float,
        typer.Option(
            "--error-rate",
            help="Share of requests answered with status 500.",
            min=0,
            max=1,
            rich_help_panel=FAULTS,
        ),
    ] = 0.0,
    faults: Annotated[
        str | None,
        typer.Option(
            "--faults",
            metavar="JSON|FILE",
            help="Plan of faults, see docs/simulator.md; its times count from the start.",
            rich_help_panel=FAULTS,
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Let POST /control/faults change the plan while it runs.",
            rich_help_panel=FAULTS,
        ),
    ] = False,
) -> None:
    """Serve a simulated engine at http://HOST:PORT/v1 until Ctrl-C; its metrics are at /metrics.

    A 70B on 4 H100: ampacity simulate --preset llama3-70b-4xh100 --port 8000

    One answer in fifty fails: ampacity simulate --faults '{"errors": {"503": 0.02}}'
    """
    from simulator import SimulatorError
    from simulator.face import Face
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
    face = Face(
        adapters=tuple(part.strip() for part in adapters.split(",")) if adapters else (),
        natural_tokens=natural_tokens,
        chunk_tokens=chunk_tokens,
        flush_s=flush_ms / 1000,
        early_role=early_role,
        reasoning_share=reasoning_share,
        reasoning_field=reasoning_field.value,
        usage=usage.value,
        done=done,
        prompt_details=prompt_tokens_details,
        control=control,
    )
    config = configured(
        preset,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy.value if policy else None,
        prefix_caching=prefix_caching or None,
        max_loras=max_loras,
        adapter_load_s=adapter_load_s,
    )
    if calibrate is not None:
        from ampacity.experiments.calibrate import calibrate_to_run

        config, lines = calibrate_to_run(calibrate, config)
        for line in lines:
            print(line, flush=True)
    serve(
        config,
        host=host,
        port=port,
        model_name=name,
        api_key=api_key,
        face=face,
        faults=_plan(faults, error_rate),
        seed=seed,
        ready=lambda bound: print(f"listening on http://{shown_host}:{bound}/v1 model {name}", flush=True),
    )


def _plan(faults: str | None, error_rate: float) -> Plan:
    from simulator import SimulatorError
    from simulator.faults import Plan, read_plan

    if faults is None:
        return Plan(errors={"500": error_rate} if error_rate else {})
    if error_rate:
        raise SimulatorError("--error-rate and --faults: give the share in --faults, as errors.500")
    if faults.lstrip().startswith("{"):
        return read_plan(faults.encode("utf-8", "replace"))
    try:
        return read_plan(Path(faults).read_bytes())
    except OSError as error:
        raise SimulatorError(f"--faults {faults}: {error.strerror}; give a file or a JSON object") from error
