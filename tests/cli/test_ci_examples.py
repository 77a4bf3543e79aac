"""The examples of docs/ci.md, the action and the image: they parse, and their scripts run."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

from ampacity.cli.app import app
from ampacity.simulator.server.launch import Started
from tests.support.args import COMMAND

ROOT = Path(__file__).parents[2]

SHIM = """#!/bin/sh
# in place of a server: the same command in virtual time, with short answers; or what that gave
# before
if [ "$1" = run ]; then
  if [ -d "$MEASURED" ]; then
    for out; do :; done  # the last word
    mkdir -p "$(dirname "$out")" && exec cp -r "$MEASURED" "$out"
  fi
  shift 4
  set -- predict --preset linear:0.01,0 $(echo "$@" | sed 's/--workload chat/--input-tokens 10 --output-tokens 20/')
fi
exec {command} "$@"
"""


PLACE = "OWNER/REPOSITORY@REF"  # the one placeholder of the repository


def _block(language: str, number: int = 0, page: str = "docs/ci.md") -> str:
    text = (ROOT / page).read_text()
    return str(re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)[number])


def _job(text: str, name: str) -> Any:
    found = yaml.safe_load(text)
    return found.get("jobs", found)[name]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with base.json, and an ``ampacity`` that needs no server."""
    folder = tmp_path_factory.mktemp("ci")
    (folder / "bin").mkdir()
    shim = folder / "bin" / "ampacity"
    shim.write_text(SHIM.format(command=shlex.join(COMMAND)))
    shim.chmod(0o755)
    measure = next(
        s["run"] for s in _job(_block("yaml"), "gate")["steps"] if s.get("name") == "measure"
    )
    made = _shell(
        folder,
        measure.replace("runs/candidate", "first") + " && ampacity baseline first -o base.json",
    )
    assert made.returncode == 0, made.stderr
    return folder


def _shell(folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ENDPOINT": "U",
        "MODEL": "M",
        **env,
    }
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "Traceback" not in done.stderr
    return done


def test_github_example_with_the_action(workplace: Path) -> None:
    """The scripts of the action, one after another; what GitHub's own actions do is not run."""
    used = [s for s in _job(_block("yaml"), "gate")["steps"] if s.get("uses") == PLACE]
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = {step["id"]: step for step in action["runs"]["steps"]}
    assert steps["judge"]["if"] == "inputs.arguments != ''"
    assert "with" not in used[0]  # only installs
    given = used[1]["with"]
    assert set(given) <= set(action["inputs"])
    home = workplace / "ampacity" / "bin"
    home.mkdir(parents=True)
    (home / "ampacity").symlink_to(workplace / "bin" / "ampacity")
    env = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": "step.md",
        "GITHUB_OUTPUT": "output",
        "GITHUB_PATH": "path",
        "GITHUB_ACTION_PATH": "/nowhere",
        "RUNNER_TEMP": str(workplace),
        "PYTHON": "false",  # it is installed already
        "JUNIT": str(action["inputs"]["junit"]["default"]),
        "ARGUMENTS": given["arguments"].replace("runs/candidate", "first").replace("runs/", ""),
    }
    assert _shell(workplace, steps["install"]["run"], **env).returncode == 0
    assert (workplace / "path").read_text() == f"{home}\n"
    done = _shell(workplace, steps["judge"]["run"], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (workplace / "output").read_text() == "status=0\n"
    assert "ampacity gate" in (workplace / "step.md").read_text()
    assert ElementTree.parse(workplace / "ampacity.xml").getroot().get("failures") == "0"
    limit = "gate first --baseline base.json --slo ttft_p50=1ms"
    broken = _shell(workplace, steps["judge"]["run"], **{**env, "ARGUMENTS": limit})
    assert (workplace / "output").read_text() == "status=0\nstatus=1\n"
    assert "::error title=ampacity gate::ttft_p50=1ms" in broken.stdout
    for status, allowed, code in (("1", "true", 1), ("3", "false", 3), ("3", "true", 0)):
        answer = {"STATUS": status, "ALLOW_INCONCLUSIVE": allowed}
        assert _shell(workplace, steps["answer"]["run"], **answer).returncode == code


def test_gitlab_example(workplace: Path) -> None:
    pipeline = yaml.safe_load(_block("yaml", 1))
    script = "\n".join(pipeline["gate"]["script"]).replace("runs/", "gitlab/")
    done = _shell(workplace, script, MEASURED="first")
    assert done.returncode == 0, done.stdout + done.stderr
    junit = pipeline["default"]["artifacts"]["reports"]["junit"]
    assert ElementTree.parse(workplace / junit[1]).getroot().tag == "testsuites"
    assert f"--junit {junit[0]}" in pipeline["check"]["script"][0]


def test_shell_example(workplace: Path) -> None:
    done = _shell(workplace, _block("sh").replace("runs/", "shell/"), MEASURED="first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "pass"
    assert json.loads((workplace / "gate.json").read_text())["verdict"] == "pass"


@pytest.mark.real_time
def test_shell_example_of_a_check_on_a_simulated_server(tmp_path: Path, server: Started) -> None:
    """At ten times its rate, which decides in a tenth of the time."""
    shim = tmp_path / "bin" / "ampacity"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    shim.chmod(0o755)
    script = _block("sh", 1).replace("--slo", "--workload chat-short --slo")
    script = script.replace("--rates 5 ", "--rates 50 ")
    done = _shell(tmp_path, script, ENDPOINT=server.url, MODEL=server.model)
    assert (done.returncode, done.stdout.split()) == (0, ["met"]), done.stderr
    assert json.loads((tmp_path / "check.json").read_text())["verdict"] == "met"


def test_every_example_of_a_check_parses() -> None:
    """Each is a command line that the check takes."""
    job = yaml.safe_load(_block("yaml", 2))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = yaml.safe_load(_block("yaml"))["jobs"]["check"]["steps"][0]["with"]["arguments"].split()
    gitlab = shlex.split(yaml.safe_load(_block("yaml", 1))["check"]["script"][0])[1:]
    command = typer.main.get_command(app).commands["check"]
    for arguments in (container["args"], words, gitlab):
        assert arguments[0] == "check"
        command.make_context("check", arguments[1:])


def test_every_example_of_many_machines_parses() -> None:
    ray, job = (yaml.safe_load(_block("yaml", k, "docs/scale.md")) for k in (0, 1))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands = typer.main.get_command(app).commands
    parsed = []
    for name, *arguments in (shlex.split(ray["spec"]["entrypoint"])[1:], container["args"]):
        given = [word.replace("$(POD_NUMBER)", "3") for word in arguments]
        params = commands[name].make_context(name, given).params
        parsed.append(tuple(params[k] for k in ("rates", "workers", "ray", "seed", "out", "yes")))
    assert parsed == [
        ("20000,40000,60000,80000,95000", 288, "auto", None, Path("/runs/sweep"), True),
        ("5300", 16, None, 3, Path("/runs/load-3"), True),
    ]


def test_the_image_has_what_the_wheel_needs_and_runs_as_nobody() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM ")][1].endswith("slim")
    assert "USER 10001" in lines
    ignored = (ROOT / ".dockerignore").read_text().split()
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        name.split(".")[1] for name in config["tool"]["setuptools"]["packages"] if "." in name
    }
    needed = {*folders, "ampacity", "setup.py", "pyproject.toml", "constraints.txt", "README.md"}
    assert not needed & set(ignored)
