"""``ampacity workload``: fit a log, draw the profile, write the schedule; and every wrong word in
one line.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ampacity.cli import main
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule
from ampacity.workloads.schedule_file import read_schedule
from tests.support.args import Command, args_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.2, 600))
    rows = "".join(f"{at:.6f},{rng.integers(10, 900)},{rng.integers(1, 90)}\r\n" for at in times)
    path = tmp_path / "log.csv"
    path.write_text("timestamp,input_tokens,output_tokens\r\n" + rows.rstrip())
    return path


def test_from_a_log_to_a_schedule_that_a_run_takes_back(
    log: Path, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, page, schedule = tmp_path / "p.yaml", tmp_path / "p.html", tmp_path / "s.jsonl"
    command("workload fit", log, "-o", profile, "--html", page)
    said = capsys.readouterr().out
    assert said.rstrip().endswith(str(profile))
    for words in (
        "Input tokens: mean",
        "P95",
        "P99",
        "Index of dispersion",
        "Families, input",
        "Correlation",
    ):
        assert words in said
    command("workload show", profile)
    assert "fitted to log.csv" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg") >= 2
    own = re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)  # not the charts' runtime
    assert "https://" not in own
    command("workload sample", profile, "-n 300 -o", schedule, "--seed 7")
    assert "300 requests at 5." in capsys.readouterr().out  # the rate is the log's
    taken = read_schedule(schedule).schedule
    drawn = open_schedule(load_workload(str(profile)), rate_rps=5, duration_s=200, seed=7, stage=0)
    assert len(taken) == 300
    assert taken.input_tokens.tolist() == drawn.input_tokens[:300].tolist()
    rows = [json.loads(line) for line in schedule.read_text().splitlines() if "scheduled_s" in line]
    assert taken.scheduled_s.tolist() == [row["scheduled_s"] for row in rows]  # to the last bit
    command("workload sample", profile, "-n 300 -o", tmp_path / "again.jsonl", "--seed 7")
    assert (tmp_path / "again.jsonl").read_bytes() == schedule.read_bytes()


def test_shared_prefixes_and_cancellation_come_back(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text(
        "input_tokens: {lognormal: {p50: 100, p99: 300}}\noutput_tokens: 3\nprefixes: "
        "{cached_share: 0.3, pool: 4}\n"
    )
    command("workload sample", workload, "--rates 20 --duration 5s -o", tmp_path / "s.jsonl")
    taken = read_schedule(tmp_path / "s.jsonl").schedule
    drawn = open_schedule(load_workload(str(workload)), rate_rps=20, duration_s=5, seed=1, stage=0)
    assert taken.shared is not None
    assert drawn.shared is not None
    assert [taken.shared.of(i) for i in range(len(taken))] == [
        drawn.shared.of(i) for i in range(len(drawn))
    ]
    assert np.abs(taken.scheduled_s - drawn.scheduled_s).max() <= 0.5e-9


def test_a_built_in_workload_to_stdout(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command("workload sample chat -n 5 --rates 2")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 5
    assert rows[0].keys() >= {"scheduled_s", "input_tokens", "output_tokens"}
    command("workload show chat")
    assert "Azure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fit", "none.csv"], "none.csv cannot be read"),
        (["fit", "LOG", "--column", "when=x"], "role 'when' is not known"),
        (["fit", "LOG", "--column", "time"], "write it as role=name"),
        (["fit", "LOG", "--column", "time=x"], "no column 'x' for time"),
        (args_of("fit LOG --column time=a --column time=b"), "stands there twice"),
        (["fit", "LOG", "--time-unit", "min"], "choose one of s, ms, us, ns"),
        (["fit", "LOG", "--context", "0"], "give 1 or more"),
        (["fit", "LOG", "--context", "10"], "log.csv:2: column input_tokens"),
        (["fit", "LOG", "-o", "no/such/folder.yaml"], "cannot be written"),
        (["fit", "LOG", "-o", "LOG"], "exists already"),
        (["sample", "chat"], "give -n N requests"),
        (args_of("sample chat -n 5 --duration 5s"), "give -n N requests"),
        (["sample", "chat", "-n", "0"], "give 1 or more"),
        (args_of("sample chat --rates -1 --duration 5s"), "above 0"),
        (args_of("sample chat --rates 0 -n 5"), "above 0"),
        (["sample", "chatt", "-n", "5"], "did you mean chat?"),
        (["show", "none.yaml"], "cannot be read"),
    ],
)
def test_wrong_words_are_one_line(
    log: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    command("workload", *[str(log) if a == "LOG" else a for a in arguments], status=2)
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no rows"),
        ("timestamp,input_tokens\n1,2\n", "no column with the output tokens"),
        (
            "timestamp,input_tokens,output_tokens\n1,-2,3\n",
            "bad.csv:2: column input_tokens: -2 is a negative",
        ),
        (
            "timestamp,input_tokens,output_tokens\n1,0,3\n",
            "bad.csv:2: column input_tokens: 0 is too few",
        ),
        (
            "timestamp,input_tokens,output_tokens\r\n1,2,3\r\n,2,3",
            "bad.csv:3: column timestamp: the value is missing",
        ),
        (
            "timestamp,input_tokens,output_tokens\n1,2,3\n2023-01-01 00:00:00.1234567,2,3\n",
            "bad.csv:3: column timestamp: this time is",
        ),
    ],
)
def test_bad_logs_are_one_line_with_row_and_column(
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    content: str,
    complaint: str,
) -> None:
    (tmp_path / "bad.csv").write_text(content)
    command("workload fit", tmp_path / "bad.csv", "-o", tmp_path / "x.yaml", status=2)
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x.yaml").exists()


def test_a_schedule_that_a_run_cannot_take_back_is_refused(tmp_path: Path) -> None:
    for more in (
        {"after": [1]},
        {"class": "batch"},
        {"shared": [[1]]},
        {"cancel_after_s": "soon"},
        {"turn": 1.5},
    ):
        rows = [
            {"scheduled_s": 0.5, "input_tokens": 5, "output_tokens": 1, **extra}
            for extra in ({}, more)
        ]
        path = tmp_path / "s.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=r"s\.jsonl:(2| class 'batch' is not)"):
            read_schedule(path)


def test_replay_flags_go_with_a_trace_and_rates_do_not(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9/v1"
    for flags, complaint in (
        (["--trace", log, "--rates", "5"], "--trace brings its own arrival times"),
        (args_of("--rates 5 --trace-keep 0.5"), "--trace-keep goes with --trace"),
        (["--rates", "5", "--skip-bad-rows"], "--skip-bad-rows goes with --prompts or --trace"),
        (
            ["--trace", log, *args_of("--trace-from 9s --trace-to 5s")],
            "give an end behind the start",
        ),
        (["--trace", log, "--trace-loop", "0"], "--trace-loop 0"),
        (["--trace", log, "--trace-from", "1h"], "no request arrives from 3600 s"),
    ):
        monkeypatch.setattr(sys, "argv", ["ampacity", "run", url, *map(str, flags)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def test_an_edited_profile_is_one_line(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for measured in (
        "{arrivals: {gap_cv: 1}}",
        "{arrivals: 5}",
        "{sessions: [1]}",
        "{correlation: high}",
    ):
        (tmp_path / "w.yaml").write_text(
            f"input_tokens: 5\noutput_tokens: 5\nmeasured: {measured}\n"
        )
        command("workload show", tmp_path / "w.yaml", status=2)
        error = capsys.readouterr().err
        assert "is not as 'ampacity workload fit' wrote it" in error
        assert len(error.splitlines()) == 1
