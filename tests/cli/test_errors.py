"""Bad input against a live endpoint: one line on stderr that names the culprit, exit 2, no
traceback.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ampacity.cli import main
from ampacity.cli.app import app
from ampacity.cli.synonyms import _TABLE
from ampacity.simulator.server.launch import Started, start_in_process
from tests.support.args import args_of

RIGHT_KEY, WRONG_KEY = "sk-right-4711", "sk-wrong-0815"


@dataclass(frozen=True)
class Result:
    returncode: object
    stdout: str
    stderr: str


Ampacity = Callable[..., Result]


@pytest.fixture
def ampacity(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ampacity:
    """The command line in this process: what it prints and its exit status."""
    monkeypatch.setenv("AMPACITY_TEST_KEY", RIGHT_KEY)
    monkeypatch.setenv("AMPACITY_WRONG_KEY", WRONG_KEY)

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["ampacity", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Result(ended.value.code, out, err)

    return call


@pytest.fixture(scope="module")
def server() -> Iterator[Started]:
    os.environ["AMPACITY_TEST_KEY"] = RIGHT_KEY
    with start_in_process("demo", api_key_env="AMPACITY_TEST_KEY") as started:
        yield started
    del os.environ["AMPACITY_TEST_KEY"]


KEY = ("--api-key-env", "AMPACITY_TEST_KEY")
BAD_TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.68,374,44\r\n2023-11-16 18:15:50.99,abc,109\r\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nope", *KEY], ["--model nope", "it serves: demo"]),
        (["--model", "demo"], ["wants an API key", "--api-key-env"]),
        (args_of("--model demo --api-key-env AMPACITY_WRONG_KEY"), ["refuses the API key", "401"]),
        (args_of("--model demo --api-key-env AMPACITY_NO_SUCH"), ["AMPACITY_NO_SUCH", "not set"]),
        ([*KEY, "--slo", "ttft_p99=2"], ["ttft_p99=2", "unit"]),
        ([*KEY, "--slo", "speed_p99=2s"], ["speed", "ttft"]),
        ([*KEY, "--slo", "ttft_p101=2s"], ["ttft_p101"]),
        (
            [*KEY, "--slo", "vip:ttft_p99=2s"],
            ["vip:ttft_p99=2s", "no class 'vip'", "it has default"],
        ),
        ([*KEY, "--workload", "chta"], ["chta", "did you mean chat"]),
        ([*KEY, "--rates", "1,x"], ["--rates x"]),
        ([*KEY, *args_of("--rates 1 --concurrency 2")], ["--rates", "--concurrency"]),
        (
            [*KEY, *args_of("--rates 1 --ramp 5s")],
            ["--ramp goes with --concurrency", "--arrivals ramp:from="],
        ),
        ([*KEY, "--ramp", "5s"], ["--ramp goes with --concurrency"]),
        ([*KEY, *args_of("--concurrency 2 --ramp 5")], ["--ramp 5", "unit"]),
        ([*KEY, "--duration", "30"], ["--duration 30", "unit"]),
        ([*KEY, "--input-tokens", "30"], ["--output-tokens"]),
        ([*KEY, "--extra-body", "{a}"], ["--extra-body", "JSON"]),
        ([*KEY, "--extra-body", '{"messages": []}'], ["messages"]),
        ([*KEY, "--header", "Authorization Bearer sk-wrong"], ["--header:", "'Name: value'"]),
        ([*KEY, "--header", "Authorization Basic sk-wrong:x"], ["--header:", "'Name: value'"]),
        (
            [*KEY, "--header", "Authorization:", "Bearer", "sk-wrong"],
            ["--header", "quotes", "'Name: value'"],
        ),
        (["--api-key-env", "sk-wrong"], ["--api-key-env:", "not the key"]),
        (["--api-key-env", "sk-wrong\x07"], ["--api-key-env:", "cannot be printed"]),
        ([*KEY, "--metrics-url", "http://u:sk-wrong@h/m"], ["--metrics-url:", "password"]),
        (
            [*KEY, "--metrics-url", "h:1/m?t=sk-wrong"],
            ["--metrics-url 'h:1/m'", "http://127.0.0.1:9400/metrics"],
        ),
        ([*KEY, "--metrics-url", "http://[::1"], ["--metrics-url 'http://[::1'"]),
        ([*KEY, "--api", "soap"], ["--api soap", "chat"]),
        ([*KEY, "--seed", "x"], ["--seed", "see ampacity sweep --help"]),
        ([*KEY, "--bogus"], ["--bogus", "see ampacity sweep --help"]),
        ([*KEY, "--max-requests", "0"], ["--max-requests 0"]),
        ([*KEY, "--tokenizer", "klingon"], ["klingon", "words"]),
    ],
)
def test_bad_option(
    ampacity: Ampacity, server: Started, arguments: list[str], named: list[str], tmp_path: Path
) -> None:
    result = ampacity("sweep", server.url, "--out", tmp_path / "run", *arguments)
    check_refusal(result, named)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "run U --qps 5",
            "no such option --qps; the rate is given by --rates; see ampacity run --help",
        ),
        (
            "sweep U --max-concurrency=3",
            "no such option --max-concurrency; the number in flight is given by --concurrency; "
            "see ampacity sweep --help",
        ),
        (
            "run U -u 3",
            "no such option -u; the number in flight is given by --concurrency; see ampacity run "
            "--help",
        ),
        (
            "search U --num-prompts 9",
            "no such option --num-prompts; the number of requests is given by --max-requests; see "
            "ampacity search --help",
        ),
        (
            "search U --run-time 3m",
            "no such option --run-time; the length of a stage is given by --max-duration; see "
            "ampacity search --help",
        ),
        (
            "search U --rates 3",
            "no such option --rates; the rate is not given to ampacity search (--rates is of "
            "other commands); see ampacity search --help",
        ),
        (
            "ab U U --request-rate 3",
            "no such option --request-rate; the rate is given by --rates; see ampacity ab --help",
        ),
        (
            "run --base-url U",
            "no such option --base-url; the server is given by URL; see ampacity run --help",
        ),
        (
            "run U --api-key sk-wrong",
            "no such option --api-key; the key is given by --api-key-env; see ampacity run --help",
        ),
        (
            "predict --host U",
            "no such option --host; the server is not given to ampacity predict (URL is of other "
            "commands); see ampacity predict --help",
        ),
        (
            "plan U --data x",
            "No such option: --data (Possible options: --tp); see ampacity plan --help",
        ),
        ("run U --rates", "Option '--rates' requires an argument; see ampacity --help"),
    ],
)
def test_options_of_other_tools_are_answered_by_ours(
    ampacity: Ampacity, command: str, said: str
) -> None:
    result = ampacity(*command.split())
    check_refusal(result, [])
    assert result.stderr == f"ampacity: {said}\n"


def test_every_name_of_ours_in_the_table_of_synonyms_is_an_option() -> None:
    commands: Any = get_command(app)
    known = {
        name for command in commands.commands.values() for p in command.params for name in p.opts
    }
    ours = {name for _, names, _ in _TABLE for name in names.split()} - {"URL"}
    assert ours <= known
    theirs = [name for _, _, names in _TABLE for name in names.split()]
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


def test_endpoint_down(ampacity: Ampacity) -> None:
    check_refusal(
        ampacity("sweep", "http://127.0.0.1:9/v1", "--model", "m"),
        ["http://127.0.0.1:9/v1", "refused"],
    )


def test_host_without_address(ampacity: Ampacity) -> None:
    check_refusal(ampacity("sweep", "http://no-such-host.invalid/v1"), ["no-such-host.invalid"])


def test_wrong_route(ampacity: Ampacity, server: Started) -> None:
    check_refusal(
        ampacity("sweep", f"{server.url}/nope", "--model", "demo", *KEY), ["/v1/nope", "404", "/v1"]
    )


def test_broken_trace_row(ampacity: Ampacity, server: Started, tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_bytes(BAD_TRACE.encode())
    result = ampacity("run", server.url, "--model", "demo", *KEY, "--trace", trace)
    check_refusal(result, [f"{trace}:3", "ContextTokens", "'abc'"])


def test_unreadable_trace(ampacity: Ampacity, server: Started, tmp_path: Path) -> None:
    result = ampacity("run", server.url, "--model", "demo", *KEY, "--trace", tmp_path / "none.csv")
    check_refusal(result, ["none.csv", "No such file"])


def test_trace_with_rates(ampacity: Ampacity, server: Started, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("timestamp,input_tokens,output_tokens\n1,5,5\n2,5,5\n")
    result = ampacity("run", server.url, *KEY, "--trace", tmp_path / "t.csv", "--rates", "3")
    check_refusal(result, ["--trace", "--rates"])
    # whether a file says when its requests arrive is known when it has been read
    (tmp_path / "t.csv").write_text("session_id,input_tokens,output_tokens\na,5,5\na,9,5\n")
    for more in ([], ["--rates", "3,4"]):
        result = ampacity("run", server.url, *KEY, "--trace", tmp_path / "t.csv", *more)
        check_refusal(result, ["does not say when", "--rates R", "--concurrency N"])


def test_out_is_not_empty(ampacity: Ampacity, server: Started, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    check_refusal(
        ampacity("sweep", server.url, *KEY, "--out", tmp_path),
        [str(tmp_path), "not an empty directory"],
    )
    assert (tmp_path / "precious").read_text() == "x"


def test_nothing_to_run(ampacity: Ampacity, server: Started) -> None:
    check_refusal(ampacity("run", server.url, *KEY), ["--rates", "--trace"])


def test_run_file(ampacity: Ampacity, tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("url: http://127.0.0.1:9/v1\nworklod: chat\n")
    check_refusal(ampacity("run", "-c", file), ["worklod", "workload"])
    file.write_text("- a\n- b\n")
    check_refusal(ampacity("run", "-c", file), [str(file), "mapping"])
    file.write_text("a: [\n")
    check_refusal(ampacity("run", "-c", file), [str(file), "YAML"])


def test_report_of_no_run(ampacity: Ampacity, tmp_path: Path) -> None:
    check_refusal(ampacity("report", tmp_path), [str(tmp_path), "no run directory"])


def test_plan_of_no_run(ampacity: Ampacity, tmp_path: Path) -> None:
    check_refusal(ampacity("plan", tmp_path, "--peak-rps", "5"), ["no run directory"])
    check_refusal(ampacity("plan", tmp_path), ["no run directory"])  # which may hold a peak


def test_simulate_without_preset(ampacity: Ampacity) -> None:
    check_refusal(ampacity("simulate", "--preset", "abacus"), ["abacus", "demo"])


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
    command = f"ulimit -n 256 && exec {sys.executable} -m ampacity run {server.url} --concurrency 500 --out {tmp_path / 'run'}"
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
