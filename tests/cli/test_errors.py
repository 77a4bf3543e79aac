"""Bad input against a live endpoint: one line on stderr that names the culprit, exit 2, no
traceback.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ampacity.cli.app import app
from ampacity.cli.synonyms import _TABLE
from ampacity.simulator.server.launch import Started, start_in_process
from tests.support.args import Cli, Result

RIGHT_KEY, WRONG_KEY = "sk-right-4711", "sk-wrong-0815"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPACITY_TEST_KEY", RIGHT_KEY)
    monkeypatch.setenv("AMPACITY_WRONG_KEY", WRONG_KEY)


@pytest.fixture(scope="module")
def server() -> Iterator[Started]:
    os.environ["AMPACITY_TEST_KEY"] = RIGHT_KEY
    with start_in_process("demo", api_key_env="AMPACITY_TEST_KEY") as started:
        yield started
    del os.environ["AMPACITY_TEST_KEY"]


KEY = "--api-key-env AMPACITY_TEST_KEY"
BAD_TRACE = b"""TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.68,374,44\r
2023-11-16 18:15:50.99,abc,109\r
"""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--model nope {key}", ["--model nope", "it serves: demo"]),
        ("--model demo", ["wants an API key", "--api-key-env"]),
        ("--model demo --api-key-env AMPACITY_WRONG_KEY", ["refuses the API key", "401"]),
        ("--model demo --api-key-env AMPACITY_NO_SUCH", ["AMPACITY_NO_SUCH", "not set"]),
        ("{key} --slo ttft_p99=2", ["ttft_p99=2", "unit"]),
        ("{key} --slo speed_p99=2s", ["speed", "ttft"]),
        ("{key} --slo ttft_p101=2s", ["ttft_p101"]),
        ("{key} --slo vip:ttft_p99=2s", ["vip:ttft_p99=2s", "no class 'vip'", "it has default"]),
        ("{key} --workload chta", ["chta", "did you mean chat"]),
        ("{key} --rates 1,x", ["--rates x"]),
        ("{key} --rates 1 --concurrency 2", ["--rates", "--concurrency"]),
        ("{key} --rates 1 --ramp 5s", ["--ramp goes with --concurrency", "--arrivals ramp:from="]),
        ("{key} --ramp 5s", ["--ramp goes with --concurrency"]),
        ("{key} --concurrency 2 --ramp 5", ["--ramp 5", "unit"]),
        ("{key} --duration 30", ["--duration 30", "unit"]),
        ("{key} --rates 1,2 --duration 2s,3s,4s", ["3 lengths for 2 loads", "one for each load"]),
        ("{key} --input-tokens 30", ["--output-tokens"]),
        ("{key} --extra-body {a}", ["--extra-body", "JSON"]),
        ("{key} --extra-body '{\"messages\": []}'", ["messages"]),
        ("{key} --header 'Authorization Bearer sk-wrong'", ["--header:", "'Name: value'"]),
        ("{key} --header 'Authorization Basic sk-wrong:x'", ["--header:", "'Name: value'"]),
        ("{key} --header Authorization: Bearer sk-wrong", ["--header", "quotes", "'Name: value'"]),
        ("--api-key-env sk-wrong", ["--api-key-env:", "not the key"]),
        ("--api-key-env 'sk-wrong\x07'", ["--api-key-env:", "cannot be printed"]),
        ("{key} --metrics-url http://u:sk-wrong@h/m", ["--metrics-url", "leave"]),
        ("{key} --metrics-url h:1/m?t=sk-wrong", ["'h:1/m'", "http://127.0.0.1:9400/metrics"]),
        ("{key} --metrics-url http://[::1", ["--metrics-url 'http://[::1'"]),
        ("{key} --api soap", ["--api soap", "chat"]),
        ("{key} --seed x", ["--seed", "see ampacity sweep --help"]),
        ("{key} --bogus", ["--bogus", "see ampacity sweep --help"]),
        ("{key} --max-requests 0", ["--max-requests 0"]),
        ("{key} --tokenizer klingon", ["klingon", "words"]),
    ],
)
def test_bad_option(
    cli: Cli, server: Started, arguments: str, named: list[str], tmp_path: Path
) -> None:
    words = shlex.split(arguments.replace("{key}", KEY))
    result = cli("sweep", server.url, "--out", tmp_path / "run", *words)
    check_refusal(result, named)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run U --qps 5", "--qps; the rate is given by --rates"),
        (
            "sweep U --max-concurrency=3",
            "--max-concurrency; the number in flight is given by --concurrency",
        ),
        ("run U -u 3", "-u; the number in flight is given by --concurrency"),
        (
            "search U --num-prompts 9",
            "--num-prompts; the number of requests is given by --max-requests",
        ),
        ("search U --run-time 3m", "--run-time; the length of a stage is given by --max-duration"),
        (
            "search U --rates 3",
            "--rates; the rate is not given to ampacity search (--rates is of other commands)",
        ),
        ("ab U U --request-rate 3", "--request-rate; the rate is given by --rates"),
        (
            "report RUN --peak-rps 120",
            "--peak-rps; a fleet is sized by: ampacity plan RUN --peak-rps",
        ),
        ("run --base-url U", "--base-url; the server is given by URL"),
        ("run U --api-key sk-wrong", "--api-key; the key is given by --api-key-env"),
        (
            "predict --host U",
            "--host; the server is not given to ampacity predict (URL is of other commands)",
        ),
    ],
)
def test_options_of_other_tools_are_answered_by_ours(cli: Cli, command: str, said: str) -> None:
    result = cli(*command.split())
    check_refusal(result, [])
    name = command.split()[0]
    assert result.stderr == f"ampacity: no such option {said}; see ampacity {name} --help\n"


TWICE = "it stands 2 times: keep one"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "plan U --data x",
            "No such option: --data (Possible options: --tp); see ampacity plan --help",
        ),
        ("run U --rates", "Option '--rates' requires an argument; see ampacity --help"),
        (
            "run U --rates 5 --rates=9",
            f"Invalid value for '--rates': {TWICE}; see ampacity run --help",
        ),
        (
            "run U --rates 5 -o a --out b",
            f"Invalid value for '-o' / '--out': {TWICE}; see ampacity run --help",
        ),
        (
            "workload fit a.csv -o a -o b",
            f"Invalid value for '-o' / '--out': {TWICE}; see ampacity workload fit --help",
        ),
    ],
)
def test_other_wrong_options_are_answered_by_typer(cli: Cli, command: str, said: str) -> None:
    result = cli(*command.split())
    check_refusal(result, [])
    assert result.stderr == f"ampacity: {said}\n"


def test_every_name_of_ours_in_the_table_of_synonyms_is_an_option() -> None:
    commands: Any = get_command(app)
    known = {
        name for command in commands.commands.values() for p in command.params for name in p.opts
    }
    ours = {name for _, names, _ in _TABLE for name in names} - {"URL"}
    assert ours <= known
    theirs = [name for _, _, names in _TABLE for name in names]
    assert len(theirs) == len(set(theirs))


def check_refusal(result: Result, named: list[str]) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    for part in named:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert "sk-right" not in result.stderr
    assert "sk-wrong" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("sweep http://127.0.0.1:9/v1 --model m", ["http://127.0.0.1:9/v1", "refused"]),
        ("sweep http://no-such-host.invalid/v1", ["no-such-host.invalid"]),
        ("sweep URL/nope --model demo {key}", ["/v1/nope", "404", "/v1"]),
        ("run URL --model demo {key} --trace bad.csv", ["bad.csv:3", "ContextTokens", "'abc'"]),
        ("run URL --model demo {key} --trace none.csv", ["none.csv", "No such file"]),
        ("run URL {key}", ["--rates", "--trace"]),
        ("sweep URL {key} --out .", [".", "not an empty directory"]),
        ("report .", [".", "no run directory"]),
        ("plan . --peak-rps 5", ["no run directory"]),
        ("plan .", ["no run directory"]),  # which may hold a peak
        ("simulate --preset abacus", ["abacus", "demo"]),
    ],
)
def test_a_command_that_cannot_be_run(
    cli: Cli,
    server: Started,
    arguments: str,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_bytes(BAD_TRACE)
    words = arguments.replace("URL", server.url).replace("{key}", KEY)
    check_refusal(cli(*words.split()), named)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


def test_trace_with_rates(cli: Cli, server: Started, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("timestamp,input_tokens,output_tokens\n1,5,5\n2,5,5\n")
    result = cli("run", server.url, *KEY.split(), "--trace", tmp_path / "t.csv", "--rates", "3")
    check_refusal(result, ["--trace", "--rates"])
    # whether a file says when its requests arrive is known when it has been read
    (tmp_path / "t.csv").write_text("session_id,input_tokens,output_tokens\na,5,5\na,9,5\n")
    for more in ([], ["--rates", "3,4"]):
        result = cli("run", server.url, *KEY.split(), "--trace", tmp_path / "t.csv", *more)
        check_refusal(result, ["does not say when", "--rates R", "--concurrency N"])


def test_run_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("url: http://127.0.0.1:9/v1\nworklod: chat\n")
    check_refusal(cli("run", "-c", file), ["worklod", "workload"])
    file.write_text("- a\n- b\n")
    check_refusal(cli("run", "-c", file), [str(file), "mapping"])
    file.write_text("a: [\n")
    check_refusal(cli("run", "-c", file), [str(file), "YAML"])


def test_the_installed_command(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("ampacity")
    result = subprocess.run(
        [command, "report", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    check_refusal(Result(result.returncode, result.stdout, result.stderr), ["no run directory"])


def test_more_connections_than_open_files_are_refused_before_the_start(
    server: Started, tmp_path: Path
) -> None:
    """Elsewhere the first 1,000 succeed and the rest fail with an obscure error."""
    run = f"run {server.url} --concurrency 500 --out {tmp_path / 'run'}"
    command = f"ulimit -n 256 && exec {sys.executable} -m ampacity {run}"
    done = subprocess.run(
        ["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ampacity: --concurrency 500 needs 564 open files and the limit is 256 in each process: "
        "raise it (ulimit -n 564), "
        "or spread the load with --workers"
    ]
    assert not (tmp_path / "run").exists()
