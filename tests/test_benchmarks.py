"""The benchmark's own pieces: matching by hand-made numbers, and one short run through the real
command line.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

from benchmarks.load.bench import cpu_ratio  # noqa: E402
from benchmarks.load.clients import Load, ampacity, read_run  # noqa: E402
from benchmarks.load.matching import DoctorResult, compare, load_seen_by_server  # noqa: E402
from benchmarks.load.mock import Served, mock_server, read_truth, unavailable  # noqa: E402
from benchmarks.studies.search_cost import QUEUE, brackets, put_at, search_server  # noqa: E402
from tests.support.args import COMMAND  # noqa: E402

needs_mock = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
MS = 1_000_000


def _ms(*values: float) -> np.ndarray:
    return np.array([round(v * MS) for v in values], dtype=np.int64)


def test_errors_are_client_minus_server_in_ms() -> None:
    # server: arrival 1.0 ms, tokens at 51, 61, 71 -> TTFT 50, gaps 10, 10
    # client: started 0.9 ms, read at 51.2, 61.1, 71.5 -> TTFT 50.3, gaps 9.9, 10.4
    served = {"a": [Served(1 * MS, 3, _ms(51, 61, 71))]}
    seen = {"a": DoctorResult(round(0.9 * MS), _ms(51.2, 61.1, 71.5), scheduled_ns=round(0.5 * MS))}
    found = compare(seen, served)
    assert found["ttft_error_ms_p50"] == pytest.approx(0.3)
    assert found["itl_error_ms_p50"] == pytest.approx((0.1 + 0.4) / 2)
    assert found["token_lag_ms_p50"] == pytest.approx(0.2)  # of 0.2, 0.1, 0.5
    assert found["arrival_late_ms_p99"] == pytest.approx(0.5)
    assert (found["never_arrived"], found["arrived_twice"], found["tokens_differ"]) == (0, 0, 0)


def test_lost_doubled_and_uneven_requests_are_counted_not_averaged() -> None:
    one = Served(0, 2, _ms(50, 60))
    served = {"twice": [one, one], "uneven": [one]}
    seen = {name: DoctorResult(0, _ms(50), 0) for name in ("twice", "uneven", "lost")}
    found = compare(seen, served)
    assert (found["never_arrived"], found["arrived_twice"], found["tokens_differ"]) == (1, 1, 1)
    assert found["ttft_error_ms_p50"] is None


def test_rates_at_the_server_leave_out_the_ramp() -> None:
    # arrivals at 0, 1, 2, 3, 4 s, each with 100 tokens in the 0.99 s after it: 100 tokens/s from 0
    # s to 4 s
    served = [
        Served(k * 1000 * MS, 100, k * 1000 * MS + np.arange(100, dtype=np.int64) * 10 * MS)
        for k in range(5)
    ]
    found = load_seen_by_server(served, settle_s=1.0)
    assert found["tokens_per_s"] == pytest.approx(100.0)
    assert found["arrivals_per_s"] == pytest.approx(1.0)
    assert found["arrival_gap_cv"] == pytest.approx(0.0)
    assert (found["arrivals"], found["tokens"]) == (5, 500)


def test_truth_file_with_an_unfinished_and_a_repeated_request(tmp_path: Path) -> None:
    path = tmp_path / "truth.tsv"
    path.write_text("a\t1000\t3\t0\t5 7\na\t2000\t1\t2100\t9\nb\t3000\t4\t0\t\n")
    truth = read_truth(path)
    assert [s.token_ns.tolist() for s in truth["a"]] == [[1005, 1007], [2009]]
    assert truth["b"][0].token_ns.tolist() == []
    assert truth["b"][0].planned_tokens == 4


def test_two_workers_carry_what_their_cpu_leaves_of_the_core() -> None:
    def result(client: str, cpu_ms: float, scenario: str = "190") -> dict[str, Any]:
        return {"scenario": scenario, "client": client, "cpu_ms_per_1000_load": cpu_ms}

    results = [
        result("ampacity", 15),
        result("2 workers", 18),
        result("raw", 1),
        result("ampacity", 17),
    ]
    results += [result("2 workers", 22), result("2 workers", 99, "pacing")]
    found = cpu_ratio(results, ("190", "ampacity"), ("190", "2 workers"))
    assert found == pytest.approx((15 + 17) / (18 + 22))


@needs_mock
@pytest.mark.slow
def test_every_scheduled_request_arrives_once_and_tokens_agree(tmp_path: Path) -> None:
    load = Load(rate_rps=20, duration_s=2, output_tokens=24)
    out = tmp_path / "run"
    with mock_server(ttft_ms=50, itl_ms=10) as mock:
        done = subprocess.run(
            ampacity(COMMAND).command(mock.url, load, out),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    meta = json.loads((out / "run.json").read_text())
    account = read_run(out)
    found = compare(account.seen, mock.served)
    assert account.about["statuses"] == {"ok": len(account.seen)}
    assert found["requests"] == account.about["scheduled"] > 10
    assert (found["never_arrived"], found["arrived_twice"], found["tokens_differ"]) == (0, 0, 0)
    # the other way round: nothing reached the server that is neither a probe nor in the records
    last = meta["stages"][-1]
    recorded = sum(stage["scheduled_requests"] for stage in meta["stages"])
    of_load = [n for n in mock.served if "-probe-" not in n and not n.endswith("--1")]
    assert len(of_load) == recorded
    assert all(len(mock.served[n][0].token_ns) == load.output_tokens for n in of_load)
    # the server keeps its times, and the client reads them as they are (other work may share the
    # machine)
    ttft_ms = [
        (mock.served[n][0].token_ns[0] - mock.served[n][0].arrival_ns) / MS for n in account.seen
    ]
    assert min(ttft_ms) >= 50.0
    assert found["ttft_error_ms_p50"] < 20.0
    assert last["kind"] == "open"


@needs_mock
def test_a_stalled_server_goes_on_reading_and_shifts_every_stream(tmp_path: Path) -> None:
    import socket

    body = b'{"model":"mock","stream":true,"max_tokens":3,"messages":[]}'
    with mock_server(ttft_ms=20, itl_ms=10, stall_after_requests=1, stall_s=0.3) as mock:
        port = int(mock.url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nX-Request-Id: s\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += connection.recv(65536)
    assert answer.count(b'"delta":{"content":" ') == 3
    assert b"data: [DONE]\n\n" in answer
    assert b'"usage"' not in answer  # it was not asked for
    (served,) = mock.served["s"]
    since_arrival_ms = (served.token_ns - served.arrival_ns) / MS
    # TTFT 20 and ITL 10 after a stall of 300: never early, and paced as before, not sent in one
    # burst
    assert (since_arrival_ms >= np.array([320.0, 330.0, 340.0])).all()
    assert mock.stats["tokens"] == 3


def test_the_studies_in_virtual_time_drive_what_the_product_drives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    brackets(0.95, seeds=1, sweeps=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8  # a grid and a sweep at four loads
    assert sum("100.0% hold the truth" in line for line in lines) >= 6  # each does in 97 of 100
    slo, (capacity_rps, _) = put_at(QUEUE, 0.7, 0.95)
    found, requests, _, stages = search_server(QUEUE, slo, 0.1, seed=1)
    assert requests > 1_000
    assert len(stages) > 2
    assert found.capacity_rps == pytest.approx(capacity_rps, rel=0.2)
