"""The tool against llama.cpp, which no one here wrote: every figure is compared with what the
server itself said.
"""

import http.client
import json
import re
import subprocess
import time
import urllib.request
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.engines.command import RUN_LIMIT_S, Run, ampacity, ampacity_command, answered
from tests.engines.engine import MEAN_LENGTH_TOKENS, Engine, serve_llamacpp
from tests.engines.relay import Relay

OUTPUT_CAP_TOKENS = 24
INPUT_CAP_TOKENS = 128

Rows = list[tuple[str, int, int]]


def synthetic_rows(count: int = 40) -> Rows:
    """Bursty arrivals over about 14 s and heavy-tailed lengths, written as the Azure trace is."""
    rng = np.random.default_rng(7)
    at_s = np.cumsum(rng.gamma(0.5, 0.7, count))
    start_s = datetime(2023, 11, 16, 18, 15, 46).timestamp()
    times = [
        datetime.fromtimestamp(start_s + s).strftime("%Y-%m-%d %H:%M:%S.%f") + "0" for s in at_s
    ]
    context = rng.lognormal(6, 1, count).astype(int) + 1
    generated = rng.lognormal(4.5, 1, count).astype(int) + 1
    return list(zip(times, context.tolist(), generated.tolist(), strict=True))


def write_capped(rows: Rows, path: Path) -> Path:
    """The trace with its lengths cut to what a tiny model and a short test carry; its times stay."""
    lines = [f"{t},{min(i, INPUT_CAP_TOKENS)},{min(o, OUTPUT_CAP_TOKENS)}" for t, i, o in rows]
    path.write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]), encoding="utf-8"
    )
    return path


def trace_ns(text: str) -> int:
    """An Azure time with its seven digits of a second, in ns."""
    seconds, fraction = text.split(".")
    whole = datetime.strptime(seconds, "%Y-%m-%d %H:%M:%S") - datetime(2023, 1, 1)
    return int(whole.total_seconds()) * 10**9 + int(fraction.ljust(9, "0"))


def assert_counts_are_the_servers(run: Run, relay: Relay) -> None:
    """Each row says of tokens and chunks what the server's usage and events on the wire say."""
    wires = answered(run, relay)
    rows = run.requests
    assert [row["request_id"] for row in rows] == sorted(wires)
    for row in rows:
        wire = wires[row["request_id"]]
        assert wire.status == 200
        assert wire.done
        assert row["output_tokens"] == wire.usage["completion_tokens"]
        assert row["input_tokens"] == wire.usage["prompt_tokens"]
        assert row["cached_tokens"] == wire.usage["prompt_tokens_details"]["cached_tokens"]
        assert row["token_source"] == "usage"
        assert row["output_tokens_planned"] == wire.body["max_tokens"]
        assert len(row["chunk_at_us"]) == wire.text_events


def assert_times_are_in_order(rows: list[dict[str, Any]]) -> None:
    """What happens to a request happens in this order, and its stream was seen as a stream."""
    order = tuple(
        (
            "scheduled_ns dispatched_ns connected_ns started_ns sent_ns headers_ns first_event_ns "
            "first_token_ns last_token_ns ended_ns"
        ).split()
    )
    for row in rows:
        for earlier, later in pairwise(order):
            assert row[earlier] <= row[later], (earlier, later, row)
        assert row["chunk_at_us"] == sorted(row["chunk_at_us"])
        # the role chunk comes in one piece with the first token, so it is no earlier sign of life
        assert row["first_event_ns"] == row["first_token_ns"] == row["first_answer_ns"]
    # an answer takes 10 ms, so on a busy machine some arrive in one read
    in_pieces = [len(set(row["chunk_at_us"])) > 1 for row in rows if row["output_tokens"] >= 8]
    assert sum(in_pieces) > len(in_pieces) / 2


@pytest.fixture(params=["azure", "synthetic"])
def trace_rows(request: pytest.FixtureRequest) -> Rows:
    """The real trace where it is at hand, and one of the same form everywhere."""
    return request.getfixturevalue("azure_rows") if request.param == "azure" else synthetic_rows()


def test_trace_replay_keeps_the_times_and_counts_of_every_row(
    llamacpp: Engine, trace_rows: Rows, tmp_path: Path
) -> None:
    time_scale = 10
    trace = write_capped(trace_rows, tmp_path / "trace.csv")
    with Relay(llamacpp.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--trace",
            trace,
            "--time-scale",
            time_scale,
            "--slo ttft_p99=30s",
        )
        rows = run.requests
        assert Counter(row["status"] for row in rows) == {"ok": len(trace_rows)}
        assert_counts_are_the_servers(run, relay)
    assert {row["finish_reason"] for row in rows} == {"length"}
    for row, (_, context, generated) in zip(rows, trace_rows, strict=True):
        assert row["input_tokens_planned"] == min(context, INPUT_CAP_TOKENS)
        # llama.cpp honours ignore_eos: exactly what the trace asked for, one token a chunk
        assert row["output_tokens"] == min(generated, OUTPUT_CAP_TOKENS) == len(row["chunk_at_us"])

    first_ns = trace_ns(trace_rows[0][0])
    due_ns = np.array([(trace_ns(when) - first_ns) / time_scale for when, _, _ in trace_rows])
    scheduled_ns = np.array([row["scheduled_ns"] for row in rows])
    assert np.abs(scheduled_ns - scheduled_ns[0] - due_ns).max() < 1000
    assert_times_are_in_order(rows)

    assert run.meta["status"] == "complete"
    assert run.meta["locked"]["engine"] == "llamacpp"
    summary = run.summary
    assert summary["requests"] == len(trace_rows)
    assert not any(summary["errors"].values())
    realised = summary["workload"]["realised"]
    assert realised["token_source"] == {"usage": len(trace_rows)}
    assert realised["output_tokens"]["received"] == realised["output_tokens"]["planned"]
    assert summary["verdict"] in (run.path / "report.html").read_text(encoding="utf-8")
    assert run.server, "llama.cpp has /metrics, so it must have been sampled"


def test_other_code_gets_the_same_usage_under_any_name_of_the_model(
    llamacpp: Engine, tmp_path: Path
) -> None:
    """llama.cpp ignores the name: a wrong one cannot be found out by asking."""
    with Relay(llamacpp.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--model no-such-model --concurrency 2 --max-requests 6 --input-tokens 80",
            "--output-tokens 9",
        )
        wires = answered(run, relay)
    assert Counter(row["status"] for row in run.requests) == {"ok": 6}
    assert run.meta["endpoint"]["model"] == "no-such-model"
    parts = urlsplit(llamacpp.url)
    for row in run.requests:
        connection = http.client.HTTPConnection(parts.netloc, timeout=30)
        body = wires[row["request_id"]].body
        assert body["model"] == "no-such-model"
        connection.request(
            "POST",
            f"{parts.path}/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        lines = connection.getresponse().read().split(b"\n")
        connection.close()
        usages = [json.loads(line[6:])["usage"] for line in lines if b'"usage"' in line]
        assert len(usages) == 1
        assert usages[0]["prompt_tokens"] == row["input_tokens"]
        assert usages[0]["completion_tokens"] == row["output_tokens"] == 9


@pytest.mark.slow
def test_nothing_is_lost_where_the_server_closes_connections_unannounced(
    llamacpp: Engine, tmp_path: Path
) -> None:
    """This llama.cpp promises "Keep-Alive: max=100" and closes after each stream: the next request
    may be too late."""
    with Relay(llamacpp.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--concurrency 1 --max-requests 250 --duration 60s --input-tokens 20 --output-tokens 2",
        )
        assert Counter(row["status"] for row in run.requests) == {"ok": 250}
        assert_counts_are_the_servers(run, relay)
        sent = [wire for wire in relay.requests() if "probe" not in wire.id]
        lost = [wire for wire in sent if wire.status is None]
    # the client looks at a connection before it writes: few, if any, meet the close too late
    audits = [stage["audit"] or {} for stage in run.meta["stages"]]
    assert sum(audit.get("resent", 0) for audit in audits) == len(lost)
    # what is measured begins with the connection that was answered, after the connection that was
    # not
    assert all(
        row["dispatched_ns"] <= row["connected_ns"] <= row["started_ns"] for row in run.requests
    )
    assert run.meta["status"] == "budget"


def test_natural_ends_are_counted_as_the_server_counts_them(
    llamacpp: Engine, tmp_path: Path
) -> None:
    requests = 120
    with Relay(llamacpp.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--concurrency 8 --max-requests",
            requests,
            "--duration 60s --input-tokens 30 --output-tokens 1000 --extra-body",
            '{"ignore_eos":false}',
        )
        rows = run.requests
        assert len(rows) == requests
        answers = [row for row in rows if row["status"] == "ok"]
        # an answer may consist of the end token alone: usage counts it, so it is no empty answer
        assert len(answers) == requests
        assert_counts_are_the_servers(run, relay)
    assert {row["finish_reason"] for row in rows} == {"stop"}
    # the end token is counted by the server and has no text: a count of chunks would be one short
    assert all(len(row["chunk_at_us"]) == row["output_tokens"] - 1 for row in rows)
    tokens = np.array([row["output_tokens"] for row in rows])
    # geometric with mean m: standard deviation sqrt(m (m - 1)), here within 4 standard errors of
    # the mean
    error = np.sqrt(MEAN_LENGTH_TOKENS * (MEAN_LENGTH_TOKENS - 1) / requests)
    assert abs(tokens.mean() - MEAN_LENGTH_TOKENS) < 4 * error


@pytest.mark.real_time  # needs the machine to itself
def test_closed_loop_sweep_prints_json_alone(llamacpp: Engine, tmp_path: Path) -> None:
    run = ampacity(
        tmp_path / "run",
        "sweep",
        llamacpp.url,
        "--concurrency 1,4 --duration 1500ms --input-tokens 60 --output-tokens 12",
        "--slo ttft_p99=5s --json",
    )
    summary = json.loads(run.stdout)
    assert summary == run.summary
    one, four = summary["stages"]
    assert [one["concurrency_set"], four["concurrency_set"]] == [1, 4]
    for stage in (one, four):
        assert stage["kind"] == "closed"
        assert stage["ok"] == stage["requests"] > 0
        # closed loop without think time: all virtual users are in flight nearly always, and never
        # more
        assert 0.8 * stage["concurrency_set"] < stage["concurrency"] <= stage["concurrency_set"]
        assert stage["littles_law"]["ok"]
    assert "stage 1" in run.stderr  # people still see how it goes


def _requests_in_service(engine: Engine) -> float:
    with urllib.request.urlopen(f"{engine.root}/metrics", timeout=10) as page:
        text = page.read().decode()
    return float(re.search(r"^llamacpp:requests_processing (\S+)", text, re.M)[1])


@pytest.mark.real_time  # needs the machine to itself
def test_a_server_that_dies_in_mid_run_leaves_a_row_for_every_request(
    llamacpp: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ampacity_command(
        "run", "URL --rates 30 --duration 3s --input-tokens 40 --output-tokens 400 --out", out
    )
    with serve_llamacpp(tiny_model, tmp_path / "log") as engine:
        command[command.index("URL")] = engine.url
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as tool:
            give_up_s = time.monotonic() + RUN_LIMIT_S
            # probing requests come one at a time
            while _requests_in_service(engine) < 4 and time.monotonic() < give_up_s:
                time.sleep(0.02)
            engine.process.kill()
            _, stderr = tool.communicate(timeout=RUN_LIMIT_S)
    run = Run(out, tool.returncode, "", stderr)
    assert run.exit_status == 1, stderr  # an outage
    rows = run.requests
    assert [row["request_id"] for row in rows] == list(
        range(run.meta["stages"][0]["scheduled_requests"])
    )
    statuses = Counter(row["status"] for row in rows)
    assert statuses["truncated"] >= 1  # streams that had begun
    assert statuses["connect_error"] >= 1  # requests that came later
    assert not statuses["unfinished"]
    cut = [row for row in rows if row["status"] == "truncated" and row["chunk_at_us"]]
    assert cut
    assert all(0 < row["output_tokens"] < 400 and row["error"] for row in cut)
    assert run.summary["errors"]["connect_error"] == statuses["connect_error"]
