"""What ``workload sample`` writes, ``run --trace`` plays: classes, sessions, models, and who
leaves.
"""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ampacity.cli.app import app
from ampacity.config import make_settings
from ampacity.experiments.stages.replay import read_replay
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import Schedule, open_schedule
from ampacity.workloads.schedule_file import read_schedule
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import requests_to

MIX = """
arrivals: constant
extra_body: {temperature: 0.7}
classes:
  chat: {weight: 3, input_tokens: 100, output_tokens: 10, cancel: {share: 0.4, after_ms: 600}, slo: [ttft_p90=2s]}
  code: {weight: 1, input_tokens: 50, output_tokens: 5, adapters: {name: "lora-{}", count: 3}, priority: 2, headers: {X-Tenant: gold-key-1}}
"""
AGENT = """
input_tokens: {quantiles: {0: 60, 0.5: 100, 1: 300}}
output_tokens: 10
sessions: {turns: 2, think_ms: 500, limit_tokens: 400, summary_tokens: 30, on_failed_turn: continue, history: planned,
           message_tokens: 3, steps: {calls: 3, result_tokens: 40, branches: {share: 0.5, width: 2, task_tokens: 20}}}
prefixes: [{name: tools, tokens: 30, pool: 4, zipf: 1, share: 0.5}]
"""
USERS = """
input_tokens: 40
output_tokens: 5
clients: {count: 3, zipf: 1.2, arrivals: "gamma:cv=3"}
cancel: {share: 0.5, after_tokens: 2}
"""


def sampled(folder: Path, text: str, *arguments: str) -> tuple[Path, Path]:
    """(the workload file, its schedule as the command line writes it)."""
    workload, path = folder / "w.yaml", folder / "s.jsonl"
    workload.write_text(text)
    given = arguments or ("--rates", "8", "--duration", "10s")
    result = CliRunner().invoke(app, ["workload", "sample", str(workload), *given, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return workload, path


def columns(schedule: Schedule) -> dict[str, Any]:
    found = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    if schedule.shared is not None:
        found["shared"] = [schedule.shared.of(i) for i in range(len(schedule))]
    if schedule.model_index is not None:
        found["model_index"] = [schedule.model_name(i) for i in range(len(schedule))]
    found["scheduled_s"] = np.round(schedule.scheduled_s, 9)
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in found.items()
        if name not in ("numbers", "model_names")
    }


@pytest.mark.parametrize("text", [MIX, AGENT, USERS])
def test_every_column_of_the_schedule_comes_back(tmp_path: Path, text: str) -> None:
    workload, path = sampled(tmp_path, text)
    drawn = columns(
        open_schedule(load_workload(str(workload)), rate_rps=8, duration_s=10, seed=1, stage=0)
    )
    taken = columns(read_schedule(path).schedule)
    for name, value in drawn.items():
        if name in ("cancel_after_s", "cancel_after_tokens") and taken[name] is None:
            assert not np.nan_to_num(np.array(value or [0], dtype=float)).any()
        elif name == "class_index" and taken[name] is None:
            assert not any(value or [])
        else:
            np.testing.assert_equal(taken[name], value, err_msg=name)


def test_the_rules_of_classes_and_sessions_come_along(tmp_path: Path) -> None:
    url = {"url": "http://127.0.0.1:8000/v1"}
    workload, path = sampled(tmp_path, MIX)
    settings = make_settings({**url, "trace": str(path)})
    direct = make_settings({**url, "workload": str(workload)})
    assert settings.slos == direct.slos
    assert [slo.text for slo in settings.slos] == ["chat:ttft_p90=2s"]
    assert [k.body() for k in settings.workload.classes] == [
        k.body() for k in direct.workload.classes
    ]
    assert "gold-key-1" not in path.read_text()  # a header's value may be a secret
    expected = ("s.jsonl: the values of X-Tenant are not in a schedule: give --header",)
    assert read_replay(path, settings).notes == expected
    workload, path = sampled(tmp_path, AGENT)
    settings = make_settings({**url, "trace": str(path)})
    assert settings.workload.sessions == load_workload(str(workload)).sessions
    expected = "conversations that grow, shared prefixes as in the schedule"
    assert read_replay(path, settings).prompts == expected
    with pytest.raises(WorkloadError, match="a schedule is played as it is"):
        read_replay(path, dataclasses.replace(settings, trace_keep=0.5))


def test_the_same_bytes_go_over_the_wire(tmp_path: Path) -> None:
    """The schedule from the file and the one that is drawn, with one salt: every request is the
    same."""
    for text in (MIX, AGENT):
        workload, path = sampled(tmp_path, text)
        loaded = load_workload(str(workload))
        drawn = open_schedule(loaded, rate_rps=8, duration_s=10, seed=1, stage=0)
        settings = make_settings({"url": "http://127.0.0.1:8000/v1", "trace": str(path)})
        made = []
        for schedule, classes in (
            (drawn, loaded.classes),
            (read_schedule(path).schedule, settings.workload.classes),
        ):
            # of these only the names travel
            plain = [dataclasses.replace(kind, headers=()) for kind in classes]
            requests = requests_to(classes=plain, planned_histories=True)
            requests.prepare(schedule)
            bytes_of = []
            for i in range(len(schedule)):
                bytes_of.append(requests.make(i))
                requests.answered(i, "")
            made.append(bytes_of)
        assert made[0] == made[1]
        assert len(made[0]) > 20


def test_a_sampled_schedule_is_run_from_the_command_line(tmp_path: Path) -> None:
    _, path = sampled(
        tmp_path, AGENT.replace("think_ms: 500", "think_ms: 5"), "--rates", "40", "--duration", "1s"
    )
    out = tmp_path / "run"
    with FaultServer() as server:
        result = CliRunner().invoke(
            app, ["run", server.url, "--trace", str(path), "--out", str(out)]
        )
        assert result.exit_code == 0, result.output
        asked = [
            r
            for r in server.requests
            if r.headers.get("x-request-id", "").partition("-")[2].isdecimal()
        ]
    meta = json.loads((out / "run.json").read_text())
    schedule = read_schedule(path).schedule
    assert meta["stages"][0]["scheduled_requests"] == len(schedule) == len(asked)
    assert meta["workload"]["sessions"]["history"] == "planned"
    assert meta["workload"]["prompts"].startswith("conversations that grow")


def test_a_schedule_may_be_gzipped_and_what_is_broken_in_it_is_said(tmp_path: Path) -> None:
    _, path = sampled(tmp_path, AGENT)
    zipped = tmp_path / "z.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read_schedule(zipped).schedule) == len(read_schedule(path).schedule)
    settings = make_settings({"url": "http://127.0.0.1:8000/v1", "trace": str(zipped)})
    assert settings.workload.sessions is not None
    rows = path.read_text().splitlines()
    for line, wrong, said in (
        (2, {"after": [99]}, "column after"),
        (2, {"turn": "second"}, "column turn: give whole numbers"),
        (2, {"think_s": -5}, r":2: column think_s: give numbers of at least 0"),
        (2, {"Think_S ": -5}, r":2: column think_s: give numbers of at least 0"),
        (2, {"cancel_after_s": -1}, "column cancel_after_s: give numbers of at least 0"),
        (2, {"cancel_after_tokens": -3}, "column cancel_after_tokens: give whole numbers of at"),
        (2, {"session": -2}, "column session: give whole numbers of at least -1"),
        (2, {"shared": "x"}, "column shared: write it as"),
        (2, {"shared": [[2**70, 5]]}, "column shared: write it as"),
        (3, {"schedule_of": "a: 1"}, ":3: a second schedule begins here"),
        (2, {"class": "gold"}, "class 'gold' is not described"),
        (1, {"schedule_of": "a: ["}, "is no YAML text"),
    ):
        broken = [*rows]
        broken[line - 1] = json.dumps({**json.loads(rows[line - 1]), **wrong})
        path.write_text("\n".join(broken))
        with pytest.raises(WorkloadError, match=said):
            read_schedule(path)
