"""Rate-limit headers of each family, by the names and forms that providers document."""

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.quota import write_limits
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import RunWriter

SOON = (datetime.now(UTC) + timedelta(seconds=100_000)).isoformat().replace("+00:00", "Z")
R, T = "quota_requests", "quota_tokens"


def read(headers: dict[str, str]) -> dict[str, float]:
    record = RequestRecord(0, 0, 0, "ok")
    write_limits([(n.encode(), v.encode()) for n, v in headers.items()], record)
    names = (name for name in RequestRecord.__slots__ if name.startswith("quota_"))
    return {n: v for n in names if (v := getattr(record, n)) is not None}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            json.loads("""{"x-ratelimit-limit-requests": "500",
                "x-ratelimit-remaining-requests": "499",
                "x-ratelimit-reset-requests": "120ms", "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0s"}"""),
            {R: 500, f"{R}_left": 499, f"{R}_reset_s": 0.12}
            | {T: 150000, f"{T}_left": 149984, f"{T}_reset_s": 360},
        ),
        ({"x-ratelimit-reset-requests": "2m59.56s"}, {f"{R}_reset_s": 179.56}),
        ({"x-ratelimit-reset-requests": "1d2h"}, {f"{R}_reset_s": 93600}),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": SOON,
                "anthropic-ratelimit-tokens-limit": "90000",
                "anthropic-ratelimit-input-tokens-limit": "80000",  # the tightest one is -tokens-
            },
            {R: 50, f"{R}_left": 0, f"{R}_reset_s": 100_000, T: 90000},
        ),
        (
            {"x-ratelimit-limit": "20", "x-ratelimit-remaining": "3"}
            | {"x-ratelimit-reset": f"{1e3 * (time.time() + 100_000):.0f}"},
            {R: 20, f"{R}_left": 3, f"{R}_reset_s": 100_000},
        ),
        (
            {
                "ratelimit-limit": "100, 100;w=10",
                "ratelimit-remaining": "7",
                "ratelimit-reset": "4",
            },
            {R: 100, f"{R}_left": 7, f"{R}_reset_s": 4},
        ),
        (
            {"ratelimit-policy": '"burst";q=100;w=60,"day";q=1000;w=86400'}
            | {"ratelimit": '"burst";r=50;t=30,"day";r=900;t=9000'},
            {R: 100, "quota_window_s": 60, f"{R}_left": 50, f"{R}_reset_s": 30},
        ),
        (
            {"ratelimit-policy": "10;w=1", "ratelimit": "limit=10, remaining=5, reset=1"},
            {R: 10, "quota_window_s": 1, f"{R}_left": 5, f"{R}_reset_s": 1},
        ),
        (
            {"x-ratelimit-limit-requests": "9", "llm_provider-x-ratelimit-limit-requests": "500"}
            | {"llm_provider-anthropic-ratelimit-tokens-limit": "8"},
            {R: 9, T: 8},
        ),
        ({"x-ratelimit-limit-requests": "many", "x-ratelimit-reset-tokens": "soon"}, {}),
        ({"x-ratelimit-over-limit": "yes", "ratelimit": "open"}, {}),
    ],
)
def test_each_family(headers: dict[str, str], expected: dict[str, float]) -> None:
    found = read(headers)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        within = 5_000 if value == 100_000 else 1e-9  # since the tests were collected
        assert found[name] == pytest.approx(value, abs=within), name


@pytest.mark.parametrize(
    ("lines", "expected_s"),
    [
        ("Retry-After: 2", 2.0),
        ("Retry-After-Ms: 1500\r\nRetry-After: 2", 1.5),
        ("Retry-After: 2\r\nretry-after-ms: 1500", 1.5),
        ("retry-after-ms: soon\r\nRetry-After: 2", 2.0),
    ],
)
def test_headers_reach_the_record(lines: str, expected_s: float) -> None:
    exchange = Exchange(RequestRecord(0, 0, 0, "unfinished"), b"", lambda _: None)
    limits = "X-RateLimit-Limit-Requests: 5\r\nX-RateLimit-Remaining-Requests: 0\r\n"
    head = f"HTTP/1.1 429 No\r\n{limits}{lines}\r\nContent-Length: 0\r\n\r\n"
    exchange.feed(1, head.encode())
    record = exchange.record
    assert (record.status, record.retry_after_s) == ("http_error", expected_s)
    assert (record.quota_requests, record.quota_requests_left, record.quota_tokens) == (5, 0, None)


@pytest.mark.parametrize("ahead_s", [0, 7_200, -300_000_000])
def test_dates_count_from_the_servers_own_clock(ahead_s: int) -> None:
    """A server whose clock is two hours ahead, or years behind, names the same 90 seconds."""
    now_s = time.time() + ahead_s
    date, due = (formatdate(at_s, usegmt=True) for at_s in (now_s, now_s + 90))
    exchange = Exchange(RequestRecord(0, 0, 0, "unfinished"), b"", lambda _: None)
    limits = f"X-RateLimit-Reset: {now_s + 90:.0f}\r\nRetry-After: {due}\r\nDate: {date}\r\n"
    exchange.feed(1, f"HTTP/1.1 429 No\r\n{limits}Content-Length: 0\r\n\r\n".encode())
    found = exchange.record.retry_after_s, exchange.record.quota_requests_reset_s
    assert found == (pytest.approx(90, abs=6), pytest.approx(90, abs=6))


def test_a_run_from_before_these_columns_is_read(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {"stages": []}) as writer:
        writer.append(RequestRecord(0, 0, 0, "ok", quota_requests=5.0))
        writer.finish()
    table = load_run(tmp_path).requests
    assert table["quota_requests"].to_pylist() == [5.0]
    old = table.select([n for n in table.column_names if not n.startswith(("quota_", "answered_"))])
    pq.write_table(old, tmp_path / "requests.parquet")
    assert load_run(tmp_path).requests["quota_requests"].to_pylist() == [None]
    (tmp_path / "requests.parquet").unlink()  # of a run that was killed
    with pa.ipc.new_stream(tmp_path / "requests.arrows", old.schema) as stream:
        stream.write_table(old)
    assert load_run(tmp_path).requests["quota_window_s"].to_pylist() == [None]
