"""Retries happen only when asked for; every attempt is a row with its number."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Limits, StagePlan
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from tests.support.stage_driving import plain, played, schedule_at

pytestmark = pytest.mark.real_time  # needs the machine to itself

OK = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


def refusal(status: str, retry_after: str = "0") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nRetry-After: {retry_after}\r\n"
        "Content-Length: 0\r\nConnection: close\r\n\r\n"
    ).encode()


def busy(retry_after: str = "0") -> bytes:
    return refusal("429 Too Many Requests", retry_after)


def drive(
    answers: list[bytes], requests: int, *, concurrency: int | None = None, **limits: int
) -> list[RequestRecord]:
    """The server gives ``answers`` in the order in which requests come, then 200s."""

    async def main() -> list[RequestRecord]:
        left = list(answers)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(
                int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            )
            writer.write(left.pop(0) if left else OK)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        client = Client(endpoint, endpoint.addresses(), None)
        if concurrency is None:
            schedule = schedule_at([0.01 * i for i in range(requests)])
            plan = StagePlan(0, "open", schedule, 0.2, offered_rps=1.0, drain_s=10)
        else:
            schedule = schedule_at([0.0] * requests)
            plan = StagePlan(0, "closed", schedule, 5.0, concurrency=concurrency, drain_s=10)
        options = RunnerOptions(limits=Limits(**limits))
        result = await played(client, plain(endpoint), plan, options)
        server.close()
        first = sum(r.attempt == 0 for r in result.records)
        assert result.meta["scheduled_requests"] == requests == first
        return result.records

    return asyncio.run(main())


def attempts(records: list[RequestRecord]) -> Counter[tuple[int, str]]:
    return Counter((r.attempt, r.status) for r in records)


def test_never_without_being_asked() -> None:
    assert attempts(drive([busy()] * 2, 5)) == {(0, "http_error"): 2, (0, "ok"): 3}


@pytest.mark.parametrize(
    ("answers", "retries", "expected"),
    [
        # the last attempt may fail too
        ([busy()] * 9, 2, {(attempt, "http_error"): 1 for attempt in range(3)}),
        *(  # a refusal that will not pass
            ([refusal(status)], 3, {(0, "http_error"): 1})
            for status in ("400 Bad", "401 Unauthorized", "404 Not Found", "501 Not There")
        ),
        *(  # one that may
            ([refusal(status)], 1, {(0, "http_error"): 1, (1, "ok"): 1})
            for status in (
                "408 Timeout",
                "500 Error",
                "503 Unavailable",
                "524 Late",
                "529 Overload",
            )
        ),
    ],
)
def test_only_what_may_pass_is_tried_again(
    answers: list[bytes], retries: int, expected: dict[tuple[int, str], int]
) -> None:
    assert attempts(drive(answers, 1, retries=retries)) == expected


def test_each_attempt_is_a_row() -> None:
    records = drive([busy(), busy()], 1, retries=3)
    assert attempts(records) == {(0, "http_error"): 1, (1, "http_error"): 1, (2, "ok"): 1}
    assert {r.request_id for r in records} == {0}
    assert len({r.scheduled_ns for r in records}) == 1  # all of them count from the schedule
    begins = [r.dispatched_ns or 0 for r in records]
    assert begins == sorted(begins)


def test_retry_after_is_honoured() -> None:
    first, second = drive([busy("0.3")], 1, retries=1)
    assert first.retry_after_s == 0.3
    assert 0.3 <= (second.dispatched_ns - first.ended_ns) / 1e9 < 2.0


@pytest.mark.parametrize(("retries", "said"), [(2, True), (0, False)])
def test_who_is_told_to_wait_too_long_is_not_sent_again_and_says_so(
    retries: int, said: bool
) -> None:
    (record,) = drive([busy("3600")], 1, retries=retries)
    assert record.status == "http_error"
    assert ("not sent again: it asks to wait 3,600 s" in (record.error or "")) == said


@pytest.mark.parametrize(
    ("failed", "pause_s"),
    [
        ({"status": "connect_error"}, 0.5),  # doubled with each attempt
        ({"status": "reset", "attempt": 1}, 1.0),
        ({"status": "reset", "attempt": 2}, None),  # two retries were asked for
        ({"status": "http_error", "http_status": 503, "retry_after_s": 3.0}, 3.0),
        ({"status": "http_error", "http_status": 429, "retry_after_s": 3.0, "attempt": 1}, 3.0),
        (
            {"status": "http_error", "http_status": 429, "retry_after_s": 3600.0},
            None,
        ),  # nobody waits that long, and none comes earlier
        ({"status": "http_error", "http_status": 429, "retry_after_s": -1.0}, 0.0),
        ({"status": "http_error", "http_status": 501, "retry_after_s": 3.0}, None),
        ({"status": "stream_error", "error": "Overloaded"}, 0.5),
        ({"status": "stream_error", "error": "bad prompt"}, None),
        (
            {"status": "truncated", "http_status": 200},
            None,
        ),  # what was answered in part is not asked again
        ({"status": "timeout"}, None),
        ({"status": "ok", "http_status": 200}, None),
    ],
)
def test_how_long_is_waited_before_the_next_attempt(
    failed: dict[str, Any], pause_s: float | None
) -> None:
    found = [Limits(retries=2).retry_pause_s(RequestRecord(0, 0, 0, **failed)) for _ in range(50)]
    if pause_s is None:
        assert set(found) == {None}
    else:
        assert all(pause_s < found_s <= 1.25 * pause_s + 0.002 for found_s in found if found_s)
        assert None not in found
        assert len(set(found)) > 1 or not pause_s  # they do not come back at once
    assert Limits().retry_pause_s(RequestRecord(0, 0, 0, **failed)) is None


def test_a_closed_loop_keeps_its_concurrency_while_a_user_waits_to_try_again() -> None:
    records = drive([busy("0.1")] * 3, 6, concurrency=1, retries=5)
    assert attempts(records) == {
        (0, "http_error"): 1,
        (1, "http_error"): 1,
        (2, "http_error"): 1,
        (3, "ok"): 1,
        (0, "ok"): 5,
    }
    spans = sorted((r.dispatched_ns or 0, r.ended_ns or 0) for r in records)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
