"""Prompts that do not fit the model's context: said before the run, cut where that is asked for,
and nobody's failure."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ampacity.experiments.stages.context import fit_context
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.send.protocols import exceeds_context
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import Schedule, open_schedule
from tests.support.args import Cli, args_of
from tests.support.servers.odd_tokenizer import OddTokenizer

# refusals of fifteen servers, with the HTTP status
SAID = """
400 This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049
400 request (33010 tokens) exceeds the available context size (2048 tokens), try increasing it
400 The input (33010 tokens) is longer than the model's context length (4096 tokens).
400 litellm.ContextWindowExceededError: litellm.BadRequestError: ContextWindowExceededError: Hosted
400 prompt is too long: 210000 tokens > 200000 maximum
400 input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000
422 Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs`
422 Input validation error: `inputs` must have less than 1024 tokens. Given: 2000
400 The input token count (1100000) exceeds the maximum number of tokens allowed (1048576).
400 Prompt length (5000) exceeds maximum input length (4096). Set log level to info
400 Please reduce the length of the messages or completion. Current length is 9000 while limit is
400 This model's maximum prompt length is 131072 but the request contains 537812 tokens.
400 Request prompt has 5000 tokens in total, larger than the model input length limit 4096.
400 Range of input length should be [1, 30720]
413 Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context
"""
NOT_SO = """
400 temperature must be <= 2
400 max_tokens must be at least 1, got -5.
400 unknown model
429 This model's maximum context length is 2048 tokens
500 context length exceeded
413 Request Entity Too Large
400 The prompt is empty
"""


@pytest.mark.parametrize(("said", "ours"), [(SAID, True), (NOT_SO, False)])
def test_a_refusal_that_names_the_context_is_ours(said: str, ours: bool) -> None:
    for line in said.strip().splitlines():
        assert exceeds_context(int(line[:3]), line[4:]) is ours, line


def test_prompts_beyond_a_context_that_was_not_known_are_left_out_and_named(
    cli: Cli, tmp_path: Path
) -> None:
    """Half of the prompts have 100 tokens, half 1,000, where 600 fit: half of the requests are
    nobody's failure."""
    with OddTokenizer(tokenize="ids", context=600, listed=False) as server:
        load = args_of("--rates 60 --duration 1s --input-tokens points:100=0.5,1000=0.5")
        load += args_of("--output-tokens 2 --slo e2e_p50=5s")
        done = cli("run", server.url, *load, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert {row["status"] for row in rows if row["input_tokens_planned"] == 1000} == {"too_long"}
    assert {row["status"] for row in rows if row["input_tokens_planned"] == 100} == {"ok"}
    too_long = sum(row["status"] == "too_long" for row in rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["errors"]["too_long"] == too_long > 10
    assert f"{too_long} of {len(rows)} requests" in summary["verdict"]
    assert "longer than the model's context" in summary["verdict"]
    # a stage that a busy machine disturbed is played twice
    assert {stage["slo_attainment"] for stage in summary["stages"]} == {1.0}
    codes = {w["code"] for w in summary["warnings"]}
    assert codes & {"errors", "too_long"} == {"too_long"}
    assert "longer than the model's context" in (tmp_path / "run" / "report.html").read_text()


def test_a_workload_that_does_not_fit_is_refused_before_the_run_and_cut_where_asked(
    cli: Cli, tmp_path: Path
) -> None:
    """Chat's p50 is 1,020 tokens of input: at 2,048 about one request in seven is too long."""
    with OddTokenizer(tokenize="ids", context=2048) as server:
        load = ("run", server.url, "--rates", "40", "--duration", "1s", "--max-tokens", "60000")
        refused = cli(*load, "--out", tmp_path / "none")
        assert not any(len(prompt.split()) > 1500 for prompt in server.asked)
        cut = cli(*load, "--fit-context", "--out", tmp_path / "run")
    assert refused.returncode == 2
    assert not (tmp_path / "none").exists()
    planned, _ = refused.stderr.strip().splitlines()
    assert "tokens are planned" in planned
    shortened = "% of the requests are shortened"
    for words in ("workload chat does not fit", "2,048 tokens", "--fit-context", shortened):
        assert words in refused.stderr
    assert cut.returncode == 0, cut.stderr
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    of_it = [note for note in meta["notes"] if "workload chat: " in note]
    assert any("of the requests are shortened, to fit" in note for note in of_it)
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert 0 < meta["workload"]["clipped_to_context"] < 0.5 * len(rows)


def test_sessions_that_never_begin_begin_shorter(cli: Cli, tmp_path: Path) -> None:
    """Agentic at 2,048: every first turn is longer, so nothing would be sent."""
    with OddTokenizer(tokenize="ids", context=2048) as server:
        load = ["run", server.url]
        load += args_of("--workload agentic --rates 60 --duration 2s --seed 1")
        refused = cli(*load, "--out", tmp_path / "none")
        cut = cli(*load, "--fit-context", "--out", tmp_path / "run")
    assert refused.returncode == 2
    said = r"([0-9.]+)% of the requests are shortened and ([0-9.]+)% of the turns"
    shares = re.search(said, refused.stderr)
    # each first turn is, and all others
    assert sum(map(float, shares.groups())) == pytest.approx(100, abs=0.2)
    assert "--fit-context" in refused.stderr
    assert cut.returncode == 0, cut.stderr
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert len(rows) > 0
    assert {row["status"] for row in rows} == {"ok"}
    assert max(row["input_tokens"] + row["output_tokens"] for row in rows) <= 2048


# -- fit_context, by hand -------------------------------------------------------------------------


def chain(inputs: list[int], outputs: list[int], continues: list[int]) -> Schedule:
    n = len(inputs)
    after = [c for c in continues if c >= 0]
    start = np.cumsum([0, *(c >= 0 for c in continues)])
    return Schedule(
        scheduled_s=np.zeros(n),
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        first_request_id=0,
        session=np.zeros(n, dtype=np.int64),
        turn=np.arange(n, dtype=np.int32),
        think_s=np.zeros(n),
        continues=np.array(continues),
        after=np.array(after),
        after_start=start,
        new_tokens=np.array(
            [inputs[0], *(b - a - o for a, b, o in zip(inputs, inputs[1:], outputs, strict=False))]
        ),
    )


def test_a_first_turn_is_shortened_and_what_follows_loses_as_much() -> None:
    """Context 1,000: 1,200 in, 700 out → 500 out, 500 in (spare 0); the second, 700 + 200 less, is
    1,950 - 900 = 1,050: out."""
    schedule = chain([1200, 1950], [700, 50], [-1, 0])
    fitting, counts = fit_context(schedule, 1000, begin_shorter=True)
    assert (fitting.input_tokens.tolist(), fitting.output_tokens.tolist()) == ([500], [500])
    assert counts == {"clipped_to_context": 1, "turns_beyond_context": 1}
    assert fit_context(schedule, 1000)[1] == {"clipped_to_context": 0, "turns_beyond_context": 2}


def trace_file(folder: Path, rows: Iterable[object]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SESSIONS = [("a", 0.0, 900), ("a", 0.2, 950), ("b", 0.1, 700), ("b", 0.3, 990)]
MANY_WORDS = [{"role": "user", "content": "word " * 900}]


@pytest.mark.parametrize(
    "columns",
    [
        ["session_id"],  # no session can begin in 600 tokens
        [],  # lone requests would all be shortened: another load
        ["messages"],  # prompts as recorded cannot be shortened
    ],
)
def test_a_trace_of_which_nothing_fits_is_refused(
    cli: Cli, tmp_path: Path, columns: list[str]
) -> None:
    path = trace_file(
        tmp_path,
        (
            {"timestamp": t, "input_tokens": n, "output_tokens": 5}
            | {k: v for k, v in (("session_id", s), ("messages", MANY_WORDS)) if k in columns}
            for s, t, n in SESSIONS
        ),
    )
    with OddTokenizer(tokenize="ids", context=600) as server:
        refused = cli("run", server.url, "--trace", path, "--out", tmp_path / "run")
    assert refused.returncode == 2
    assert not (tmp_path / "run").exists()
    expected = "not one of its 4 requests can be sent as it is, within the model's context of 600"
    assert expected in refused.stderr
    assert "they begin with 705 and more" in refused.stderr
    assert ("--fit-context" in refused.stderr) is (not columns)


def test_recorded_prompts_that_do_not_fit_are_left_out_and_counted(
    cli: Cli, tmp_path: Path
) -> None:
    """Of three with messages one is too long, and of two that have counts alone one is shortened."""
    said = [{"role": "user", "content": "word " * 100}]
    rows = [
        {
            "timestamp": 0.1 * k,
            "input_tokens": n,
            "output_tokens": 5,
            **({} if text is None else {"messages": text}),
        }
        for k, (n, text) in enumerate(
            [(100, said), (900, MANY_WORDS), (100, said), (100, None), (900, None)]
        )
    ]
    path = trace_file(tmp_path, rows)
    with OddTokenizer(tokenize="ids", context=600) as server:
        done = cli(
            "run", server.url, "--trace", path, "--time-scale", "2", "--out", tmp_path / "run"
        )
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["workload"]["clipped_to_context"] == meta["workload"]["turns_beyond_context"] == 1
    notes = " ".join(meta["notes"])
    expected = "the trace: 20.0% of the requests are shortened and 20.0% of the turns are left out"
    assert expected in notes
    expected = "t.jsonl: arrivals are played 2 times as fast as recorded (--time-scale): arrivals over 0.4 s come within 0.2 s"
    assert expected in notes
    statuses = pq.read_table(tmp_path / "run" / "requests.parquet")["status"].to_pylist()
    assert statuses == ["ok"] * 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (warned,) = [w["text"] for w in summary["warnings"] if w["code"] == "beyond_context"]
    assert warned.startswith(
        "1 of 5 planned turns were left out and 1 of 4 requests were shortened"
    )


def test_whatever_is_left_out_of_a_trace_is_said(cli: Cli, tmp_path: Path) -> None:
    """One of 200 turns: half a percent, of which a workload of one's own would not be told. Then
    of the 199 but 50 are sent."""
    rows = [
        {
            "session_id": f"s{k}",
            "timestamp": 0.001 * k,
            "input_tokens": 900 if k == 7 else 20,
            "output_tokens": 2,
        }
        for k in range(200)
    ]
    path = trace_file(tmp_path, rows)
    with OddTokenizer(tokenize="ids", context=600) as server:
        done = cli(
            "run", server.url, "--trace", path, "--max-requests", "50", "--out", tmp_path / "run"
        )
    assert done.returncode == 0, done.stderr
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    expected = "the trace: 0.5% of the turns are left out, to fit the model's context of 600 tokens"
    assert expected in notes
    assert any(
        note.startswith("t.jsonl: the limit of 50 requests leaves 50 of 199 requests")
        for note in notes
    )


def test_what_fits_is_left_alone() -> None:
    schedule = chain([300, 500], [100, 100], [-1, 0])
    fitting, counts = fit_context(schedule, 700, begin_shorter=True)
    assert counts == {"clipped_to_context": 0, "turns_beyond_context": 0}
    assert fitting.input_tokens.tolist() == [300, 500]


@pytest.mark.parametrize("name", ["agentic", "chat", "mooncake-conversation"])
@pytest.mark.parametrize("context", [512, 2048, 8192])
def test_whatever_is_left_fits(name: str, context: int) -> None:
    schedule = open_schedule(load_workload(name), rate_rps=2, duration_s=100, seed=1, stage=0)
    fitting, _ = fit_context(schedule, context, 10.5, begin_shorter=True)
    assert len(fitting) > 0
    assert (fitting.input_tokens + fitting.output_tokens + 10.5 <= context).all()
    assert fitting.input_tokens.min() >= 1


@pytest.mark.parametrize(
    ("found", "tokens", "margin"),
    [
        (Calibration(1.0, 9.0, True, "usage", 0.0, 0.0), 1009, 0.5),  # exact, but for rounding
        # half a word of 3, three errors of 0.5
        (Calibration(3.0, 9.0, True, "tokenize", 0.5, 0.0), 1009, 3.0),
        # 900 words: 3 x 0.8 x 30, and 1
        (Calibration(2.0, 9.0, True, "usage", 0.0, 0.8), 1809, 73.0),
    ],
)
def test_the_margin_is_three_standard_errors_and_half_a_word(
    found: Calibration, tokens: int, margin: float
) -> None:
    assert found.margin_tokens(tokens) == pytest.approx(margin)
    assert found.margin_tokens(np.full(2, tokens)) == pytest.approx(np.full(2, margin))
