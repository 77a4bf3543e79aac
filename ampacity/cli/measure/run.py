"""``ampacity run``: one load level, a trace, or the experiment of a run file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from ampacity.cli import options as o
from ampacity.settings import SETTINGS


@o.shares(SETTINGS)
def run(
    raw: dict[str, Any],
    url: Annotated[
        str | None, o.arg("Base URL of an OpenAI-compatible server. Or 'url' in the run file.")
    ] = None,
    config: Annotated[
        Path | None,
        o.opt(
            "FILE",
            "YAML run file; its keys are the names of options. Options override it.",
            "-c",
            "--config",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Run one load level, a trace, or the experiment of a run file.

    ampacity run http://127.0.0.1:8000/v1 --rates 5 --slo ttft_p95=1s

    ampacity run http://127.0.0.1:8000/v1 --trace azure_conv.csv --time-scale 0.5
    """
    from functools import partial

    from ampacity.cli.experiment import run_experiment
    from ampacity.cli.measure.sweep import timed_sweep
    from ampacity.experiments.stages.rig import Rig
    from ampacity.run_file import in_run_file, read_run_file
    from ampacity.values import ConfigError

    if url is not None:
        raw["url"] = url
    located: Callable[[str], str] = str
    if config is not None:
        located = partial(in_run_file, config, frozenset(raw))
        raw = {**read_run_file(config), **raw}
    elif not {"trace", "rates", "concurrency"} & raw.keys():
        raise ConfigError(
            "give --rates R, --concurrency N, --trace FILE or -c FILE ('ampacity sweep' finds the "
            "rates itself)"
        )
    raw, drive = (raw, Rig.trace_stage) if raw.get("trace") else timed_sweep(raw)
    run_experiment(raw, experiment="run", drive=drive, as_json=json, located=located)
