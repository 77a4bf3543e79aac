"""``ampacity ab``: load two endpoints alternately, and compare them."""

import shlex
import sys
from typing import Annotated, Any

import typer

from ampacity.cli import options as o

ROUNDS_MOST = 1000

Urls = Annotated[
    list[str], o.arg("Base URLs of both endpoints; one URL with --aa.", metavar="URL_A [URL_B]")
]
Rounds = Annotated[
    int,
    o.opt(
        "N", "Repetitions of A B B A; each letter is a stage of --duration.", min=2, max=ROUNDS_MOST
    ),
]
Aa = Annotated[
    bool,
    o.opt(
        None,
        "Compare one endpoint with itself: the smallest difference this setup can detect.",
        "--aa",
    ),
]
ModelB = Annotated[str | None, o.opt("NAME", "Model of B. Default: A's.")]
ApiKeyEnvB = Annotated[
    str | None, o.opt("NAME", "Environment variable with B's API key. Default: A's.")
]
TpB = Annotated[int | None, o.opt("N", "GPUs per instance of B. Default: A's.")]
GpuHourB = Annotated[
    float | None, o.opt("USD", "Price of one of B's GPUs for one hour. Default: A's.")
]


@o.shares(but=("lengths", "prometheus", "otlp"), rates=False)
def ab(
    raw: dict[str, Any],
    urls: Urls,
    rounds: Rounds = 5,
    aa: Aa = False,
    model_b: ModelB = None,
    api_key_env_b: ApiKeyEnvB = None,
    tp_b: TpB = None,
    gpu_hour_b: GpuHourB = None,
    json: o.Json = False,
) -> None:
    """Load two endpoints alternately with the same requests, and compare them.

    A B B A makes drift affect both equally. Needs one load level, --rates or --concurrency.
    Exit status 3: they did not do the same work.

    ampacity ab http://a:8000/v1 http://b:8000/v1 --rates 4 --slo ttft_p99=2s

    ampacity ab http://a:8000/v1 --aa --rates 4 --rounds 3
    """
    from ampacity.analysis.compare.pairs import compared_run
    from ampacity.analysis.compare.rounds import deciding_rounds
    from ampacity.analysis.compare.scorecard import compare
    from ampacity.analysis.next_run import again
    from ampacity.cli import EXIT_INTERRUPTED
    from ampacity.cli.experiment import finish
    from ampacity.cli.judge.compare import show
    from ampacity.cli.output import shown
    from ampacity.cli.stub import left_at_once, no_stub
    from ampacity.config import KEY_SOURCES, make_settings
    from ampacity.experiments.ab import NAMES, arms, run_ab
    from ampacity.experiments.rerun import command_line
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.loadgen.rundir.files import write_json
    from ampacity.progress import Progress
    from ampacity.values import ConfigError

    if len(urls) != (1 if aa else 2):
        raise ConfigError("give one URL with --aa" if aa else "give two URLs, or one with --aa")
    of_b = {"model": model_b, "api_key_env": api_key_env_b, "tp": tp_b, "gpu_hour": gpu_hour_b}
    shared = raw if api_key_env_b is None else {k: raw[k] for k in raw if k not in KEY_SOURCES}
    raw_b = shared | {name: value for name, value in of_b.items() if value is not None}
    settings = (make_settings({**raw, "url": urls[0]}), make_settings({**raw_b, "url": urls[-1]}))
    a, b = arms(*settings)
    assert a.out
    with left_at_once(a.out.parent, "ab --resume", run="a"):
        words = command_line(sys.argv)
        with no_stub(a.out, b.out), Progress(quiet=shown.quiet) as progress:
            out = run_event_loop(run_ab(a, b, rounds, aa, words, progress, shown.resume))
        ends = [finish(out / name, as_json=False, quiet=True) for name in NAMES]
    if partial := next((summary.partial for _, summary in ends if summary.partial), None):
        each = "; limits hold for each endpoint" * any(status == "budget" for status, _ in ends)
        print(f"PARTIAL   {partial}{each}", file=sys.stderr)
    if any(status == "interrupted" for status, _ in ends):
        left = f"'ampacity ab --resume {shlex.quote(str(out))}' goes on"
        print(f"ampacity: nothing is compared: {left}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    result = compare([compared_run(name.upper(), out / name) for name in NAMES])
    write_json(out / "compare.json", result.as_dict())
    more = deciding_rounds(result, rounds, ROUNDS_MOST)
    secret = any("***" in word for word in words)
    following = again(words, {"--rounds": str(more)}) if more and not secret else None
    try:
        show(result, out / "compare.html", None, None, as_json=json, next_command=following)
    finally:
        if not json:
            print(out)
