"""The server in its own process: it starts or reports why not, and exits with its parent."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ampacity.cli import main
from ampacity.simulator import SimulatorError
from ampacity.simulator.server.launch import start_in_process
from ampacity.simulator.server.server import main as serve_from_argv
from tests.support.args import args_of
from tests.support.waiting import wait_until


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_starts_answers_and_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A folder of the same name where the user stands does not get in the way.
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIM_KEY", "k")
    with start_in_process(
        "linear:0.001,0", model_name="my model", api_key_env="SIM_KEY"
    ) as started:
        assert started.model == "my model"
        assert started.url.startswith("http://127.0.0.1:")
        request = urllib.request.Request(
            f"{started.url}/completions",
            json.dumps({"model": "my model", "prompt": "a b", "max_tokens": 3}).encode(),
            {"Authorization": "Bearer k"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3
    assert started.process.returncode == 0  # SIGTERM ends it cleanly
    started.stop()


def test_says_why_it_did_not_start() -> None:
    with pytest.raises(SimulatorError, match="unknown preset 'no-such'") as caught:
        start_in_process("no-such")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "demo,max_num_batched_tokens=8"}, "at least max_num_seqs"),
        (
            {"api_key_env": "NOT_SET_ANYWHERE"},
            "--api-key-env: no environment variable of that name is set",
        ),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"face": {"done": 3}}, r"Expected `bool`, got `int` - at `$.face.done`"),
        ({"faults": {"errors": {"500": 2}}}, r"<= 1.0 - at `$.faults.errors"),
        ({"replicas": 3}, "unknown field `replicas`"),
    ],
)
def test_a_server_says_in_one_line_why_it_does_not_start(
    options: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["server", json.dumps(options)])
    assert serve_from_argv() == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_sigint_ends_it_with_streams_under_way() -> None:
    with start_in_process("linear:0.01,0") as started:
        body = json.dumps({"prompt": "a", "max_tokens": 5000, "stream": True}).encode()
        with urllib.request.urlopen(f"{started.url}/completions", body, timeout=10) as response:
            response.readline()
            started.process.send_signal(signal.SIGINT)
            assert started.process.wait(10) == 0


def test_child_ends_when_its_parent_is_killed() -> None:
    script = """
        import os, signal
        from ampacity.simulator.server.launch import start_in_process
        print(start_in_process("linear:0.01,0").process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL
    child = int(parent.stdout)
    wait_until(lambda: not alive(child), 10)


def test_the_command_line_sets_face_and_faults(tmp_path: Path) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text('{"errors": {"503": 1.0}}')
    options = [*args_of("--preset linear:0.001,0 --port 0 --model base --adapters"), "sql, legal"]
    options += args_of("--chunk-tokens 5 --natural-tokens 7 --usage none --no-done --flush-ms 1")
    options += ["--prefix-caching", "--faults", str(plan), "--control"]
    command = [sys.executable, "-c", "from ampacity.cli import main; main()", "simulate", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline().decode()
            url = line.split()[2]
            assert line.strip().endswith("model base")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{url}/completions", b'{"prompt": "a"}', timeout=10)
            assert caught.value.code == 503
            caught.value.close()
            control = url.removesuffix("/v1") + "/control/faults"
            with urllib.request.urlopen(control, b"{}", timeout=10) as response:
                assert json.load(response)["faults"]["errors"] == {}
            body = b'{"model": "sql", "prompt": "a", "stream": true, "max_tokens": 11, '
            body += b'"ignore_eos": true}'
            with urllib.request.urlopen(f"{url}/completions", body, timeout=10) as response:
                chunks = [one for one in response.read().decode().split("\n\n") if one]
            texts = [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in chunks]
            assert [len(text) // 5 for text in texts] == [1, 5, 5]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(10)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--faults", '{"errors": {"x": 1}}'], "errors has no kind 'x'"),
        (["--faults", "no-such-file.json"], "give a file or a JSON object"),
        (["--adapters", "a,a"], "different names"),
        (["--flush-ms", "-1"], r"`float` >= 0.0 - at `$.flush_ms`"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["ampacity", "simulate", "--port", "0", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
