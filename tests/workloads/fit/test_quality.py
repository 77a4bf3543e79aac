"""The quality gate: answers kept on request, judged by a command, and goodput per accepted answer."""

import json
import re
import shlex
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.stage.goodput import LabelsError
from ampacity.checker import check_answers
from ampacity.config import make_settings
from ampacity.experiments.stages.conduct import conduct, run_event_loop
from ampacity.experiments.sweep import sweep
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.kept_answers import KeptAnswers
from ampacity.loadgen.rundir.files import RunDirError, load_run, read_answers
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.progress import Progress
from ampacity.reports.render.tables import accepted_table
from ampacity.simulator.server.launch import Started
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request
from tests.support.waiting import gone, wait_until

DOCUMENT = Path(__file__).parents[3] / "docs" / "quality.md"
QUESTIONS = ["6 x 7?", "What is 2 + 2?", "Name a prime."]


def measured(**raw: object) -> Path:
    """A run directory, without a report."""
    progress = Progress(Console(file=StringIO()))
    settings = make_settings({"warmup": 0, **raw})
    return run_event_loop(
        conduct(
            settings, experiment="run", drive=sweep, command_line=["ampacity"], progress=progress
        )
    )


@pytest.fixture(scope="module")
def asked(server: Started, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of real prompts whose answers were kept."""
    folder = tmp_path_factory.mktemp("asked")
    prompts = folder / "questions.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": q}], "max_tokens": 5}) + "\n"
            for q in QUESTIONS
        )
    )
    return measured(
        url=server.url,
        prompts=str(prompts),
        rates="30",
        duration="2s",
        slo="ttft_p50=10s",
        keep_answers=1,
        out=str(folder / "run"),
    )


def test_every_good_answer_is_kept_with_its_prompt(asked: Path) -> None:
    rows = {r["request_id"]: r for r in pq.read_table(asked / "requests.parquet").to_pylist()}
    kept = {number: json.loads(line) for number, line in read_answers(asked)}
    assert kept.keys() == {n for n, r in rows.items() if r["status"] == "ok"}
    assert len(kept) > 20
    for number, line in kept.items():
        assert line["request_id"] == number
        assert line["prompt"][0]["content"] in QUESTIONS
        # the simulator says a word for each token
        assert len(line["answer"].split()) == rows[number]["output_tokens"]


def test_the_documented_checker_judges_a_run(
    asked: Path, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """check.py of docs/quality.md accepts answers with a digit; what is counted is worked out here
    anew."""
    text = DOCUMENT.read_text()
    script = tmp_path / "check.py"
    script.write_text(text.split("```python\n")[1].split("```")[0])
    command = shlex.join([sys.executable, str(script)])
    assert ampacity("report", asked, "--checker", command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    accepted = [stage["accepted"] for stage in found["stages"]]  # a disturbed stage is run again
    answers = [json.loads(line)["answer"] for _, line in read_answers(asked)]
    good = sum(re.search(r"\d", answer) is not None for answer in answers)
    assert sum(stage["requests"] for stage in accepted) == good
    assert sum(stage["unlabelled"] for stage in accepted) == found["requests"] - len(answers)
    assert '"answer"' not in (asked / "report.html").read_text()
    shown = json.loads(
        next(line for line in text.splitlines() if line.startswith('    {"request_id"'))
    )
    assert shown.keys() == json.loads(next(read_answers(asked))[1]).keys()


def test_no_text_is_kept_unless_asked_for_and_a_stage_says_its_lengths(
    server: Started, tmp_path: Path
) -> None:
    measured(
        url=server.url,
        input_tokens="lognormal:p50=10,p99=40",
        output_tokens="3",
        rates="20",
        duration="1s",
        lengths="p99",
        out=str(tmp_path / "run"),
    )
    assert not list((tmp_path / "run").glob("answers*"))
    run = load_run(tmp_path / "run")
    lengths = [stage["lengths"] for stage in run.meta["stages"]]  # a disturbed stage is run again
    assert list(dict.fromkeys(lengths)) == [None, "p99"]
    assert {r["input_tokens_planned"] for r in run.requests.to_pylist() if lengths[r["stage"]]} == {
        40
    }
    (family,) = summarise(run)["families"]
    assert (family["lengths"], family["input_tokens"]) == ("p99", 40)


def judged_run(folder: Path, answers: int = 4) -> Path:
    """A run of 10 requests in 10 s; the answers of the first ones were kept."""
    make_run(
        folder / "run",
        [Stage([request(i, float(i)) for i in range(10)], 10.0)],
        ["ttft_p50=1s"],
        warmup_requests=0,
    )
    with (folder / "run" / "answers-0.jsonl").open("w") as file:
        for i in range(answers):
            file.write(json.dumps({"request_id": i, "answer": "yes" if i < 3 else "no"}) + "\n")
        file.write('{"request_id": 9, "ans')  # torn by a kill
    return folder / "run"


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", f"import sys, json, time, os\n{code}"])


YES = python(
    "for line in sys.stdin:\n d = json.loads(line)\n print(json.dumps({'request_id': d['request_id'], 'accepted': d['answer'] == 'yes'}))"
)


def test_accepted_answers_are_counted_and_shown(tmp_path: Path) -> None:
    run = judged_run(tmp_path)
    labels = check_answers(run, YES, 60)
    assert labels == {0: True, 1: True, 2: True, 3: False}
    summary = summarise(load_run(run), labels)
    accepted = summary["stages"][0]["accepted"]
    assert (accepted["requests"], accepted["rps"], accepted["unlabelled"]) == (
        3,
        pytest.approx(0.3),
        6,
    )
    table = accepted_table(read_summary(summary))
    assert [cell.text for cell in table.rows[0]][1:4] == ["3", "30.0%", "0.300"]
    assert table.columns[-1].unit == "USD"
    priced = accepted_table(
        read_summary(
            summary | {"fleet": summary["fleet"] | {"tensor_parallel": 2, "gpu_hour_usd": 2.5}}
        )
    )
    assert priced.columns[-1].unit == "USD at that load, 2 GPUs × $2.50/h"
    assert accepted_table(read_summary(summarise(load_run(run)))) is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            python("print('working'); sys.exit('no model found')"),
            "ended with status 1: no model found",
        ),
        (python("sys.exit(3)"), "ended with status 3: it printed no error"),
        (python("pass"), "--checker printed: the file is empty"),
        (
            python("print(json.dumps({'request_id': 1, 'accepted': True}))"),
            "nothing of 3 of 4 answers, as of request 0",
        ),
        (
            python("print('loading'); print(json.dumps({'request_id': 1, 'accepted': True}))"),
            "printed:1: the header must name request_id and accepted, it is 'loading'",
        ),
        (
            python("print('{\"request_id\": 0}')"),
            "printed:1: needs request_id, a whole number, and accepted",
        ),
        (
            python("[print(json.dumps({'request_id': i, 'accepted': 'yes'})) for i in range(5)]"),
            "printed request 4, which has no kept answer",
        ),
        (
            python("sys.stdout.buffer.write(bytes(range(256)))"),
            "--checker printed:1: the header must name",
        ),
        (
            "/no/such/checker --fast",
            "'/no/such/checker --fast' cannot be run: [Errno 2] No such file",
        ),
        ("'unbalanced", "cannot be run: No closing quotation"),
        ("", "--checker '' cannot be run: give a command, as in --checker 'python check.py'"),
        (
            python("print(json.dumps({'request_id': 10**30, 'accepted': True}))"),
            f"printed request {10**30}, which has no kept answer",
        ),
    ],
)
def test_a_checker_that_does_not_do_its_job_is_refused_in_one_line(
    tmp_path: Path, command: str, message: str
) -> None:
    run = judged_run(tmp_path)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(LabelsError, match=re.escape(message)) as refused:
        check_answers(run, command, 60)
    assert "\n" not in str(refused.value)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_checker_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    run, mark = judged_run(tmp_path), tmp_path / "child"
    script = f"sh -c 'echo $$ > {mark}; exec sleep 300' & sleep 300"
    began = time.monotonic()
    with pytest.raises(LabelsError, match="took more than 1 s"):
        check_answers(run, shlex.join(["sh", "-c", script]), 1.0)
    assert time.monotonic() - began < 60
    wait_until(lambda: gone(int(mark.read_text())))


def test_what_a_checker_leaves_behind_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    """The leader prints all and ends with 0; its child holds the standard output open."""
    run, mark = judged_run(tmp_path), tmp_path / "child"
    script = f"sh -c 'echo $$ > {mark}; exec sleep 300' & while [ ! -s {mark} ]; do :; done; {YES}"
    began = time.monotonic()
    found = check_answers(run, shlex.join(["sh", "-c", script]), 250)
    assert found == dict(enumerate([True, True, True, False]))
    assert time.monotonic() - began < 120
    wait_until(lambda: gone(int(mark.read_text())))


def test_runs_without_answers_and_damaged_ones_are_refused(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    run = judged_run(tmp_path)
    assert ampacity("report", run, "--checker", "cat", "--labels", run / "run.json") == 2
    assert "cat" not in (said := capsys.readouterr().err)
    assert "--labels" in said
    (run / "answers-1.jsonl").write_text("[]\n")
    with pytest.raises(RunDirError, match=r"answers-1.jsonl:1: this is no kept answer"):
        check_answers(run, YES, 60)
    for path in run.glob("answers*"):
        path.unlink()
    assert ampacity("report", run, "--checker", "cat") == 2
    assert "run it again with --keep-answers" in capsys.readouterr().err
    assert not (run / "summary.json").exists()


def ended(request_id: int, text: str, status: str = "ok") -> Exchange:
    record = RequestRecord(request_id, 0, 0, status)
    exchange = Exchange(
        record, b'POST / HTTP/1.1\r\n\r\n{"prompt": "why sk-secret-key?"}', lambda _: None, Answer
    )
    exchange.keep_text()
    exchange._answer.texts = [("reasoning", "let me think"), ("answer", text)]
    return exchange


def test_what_is_kept_is_bounded_and_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "answers-0.jsonl"
    keep = KeptAnswers(path, 250, prompts=True, secrets=lambda: ("sk-secret-key",)).keep
    keep(ended(1, "you sent sk-secret-key"))
    keep(ended(2, "failed", status="timeout"))
    keep(ended(3, "x" * 250))  # no room for it, and none is made for later ones
    keep(ended(4, "short"))
    assert [json.loads(line) for _, line in read_answers(tmp_path)] == [
        {"request_id": 1, "class": "default", "prompt": "why ***?", "answer": "you sent ***"}
    ]
    path.unlink()
    # they stand in JSON otherwise, or in a line's own words
    secrets = ('pass"\\word', "1000", "request", "prompt")
    exchange = ended(1000, 'you sent pass"\\word in your request')
    asked = [{"role": "user", "content": [{"type": "text", "text": 'pass"\\word?', "n": 1000}]}]
    exchange.request = b"POST / HTTP/1.1\r\n\r\n" + json.dumps({"messages": asked}).encode()
    KeptAnswers(path, 1000, prompts=True, secrets=lambda: secrets).keep(exchange)
    content = [{"type": "text", "text": "***?", "n": 1000}]
    assert [json.loads(line) for _, line in read_answers(tmp_path)] == [
        {
            "request_id": 1000,
            "class": "default",
            "prompt": [{"role": "user", "content": content}],
            "answer": "you sent *** in your ***",
        }
    ]
    keep = KeptAnswers(tmp_path / "no" / "disk.jsonl", 10_000, prompts=False, secrets=tuple).keep
    keep(ended(5, "nowhere to go"))  # the run goes on
