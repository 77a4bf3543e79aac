"""An exchange ends once, whatever comes later; what it notes of the connection."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from tests.streams.playing import END, HEAD, MS, OK, chunk, new_exchange


def _exchange() -> tuple[Exchange, list[Exchange]]:
    ends: list[Exchange] = []
    return new_exchange(on_end=ends.append), ends


@pytest.mark.parametrize("late", ["cancelled by the user", "connection lost", "nothing"])
def test_a_whole_answer_is_judged_later_and_by_nothing_that_came_since(late: str) -> None:
    """Its times are those of its reads, and its status is that of what was read."""
    ends: list[Exchange] = []
    whole: list[Exchange] = []
    record = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    exchange = Exchange(record, b"request", ends.append, on_whole=whole.append)
    assert exchange.feed(1 * MS, HEAD + chunk(OK[0])) is False
    assert exchange.feed(5 * MS, chunk(*OK[1:]) + END) is True  # the connection is free
    assert (whole, ends, exchange.close_after) == ([exchange], [], False)
    if late == "cancelled by the user":
        exchange.fail("cancelled", "the user left", 7 * MS)
    elif late == "connection lost":
        exchange.eof(7 * MS)
    assert ends == []
    exchange.judge()
    assert ends == [exchange]
    plain = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    at_once = Exchange(plain, b"request", lambda _: None)
    at_once.feed(1 * MS, HEAD + chunk(OK[0]))
    at_once.feed(5 * MS, chunk(*OK[1:]) + END)
    assert record == plain
    assert (record.status, record.ended_ns) == ("ok", 5 * MS)


def test_a_broken_answer_is_judged_at_once_although_whole_ones_wait() -> None:
    ends: list[Exchange] = []
    record = RequestRecord(1, 0, 0, "unfinished", started_ns=0)
    not_whole = lambda _: pytest.fail("it is not whole")  # noqa: E731
    exchange = Exchange(record, b"request", ends.append, on_whole=not_whole)
    exchange.feed(1 * MS, HEAD + chunk(OK[0]))
    exchange.eof(2 * MS)
    assert ends == [exchange]
    assert record.status == "truncated"


def test_two_responses_to_one_request_end_it_once_and_leave_its_record_alone() -> None:
    exchange, ends = _exchange()
    first = HEAD + chunk(*OK) + END
    second = (
        b"HTTP/1.1 503 Busy\r\nRetry-After: 9\r\nX-Request-Id: other\r\nContent-Length: 0\r\n\r\n"
    )
    exchange.feed(5, first + second)
    exchange.feed(6, second)
    exchange.eof(7)
    assert ends == [exchange]
    record = exchange.record
    assert (record.status, record.http_status, record.ended_ns) == ("ok", 200, 5)
    assert (record.retry_after_s, record.server_request_id) == (None, None)
    assert exchange.close_after  # such a connection must not be used again


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2.5", 2.5),
        ("in an hour", pytest.approx(3600, abs=60)),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),  # already past
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_when_to_come_back_is_said_in_seconds_or_as_a_date(
    said: str, seconds: float | None
) -> None:
    if said == "in an hour":  # names of tests must not change while they are collected
        said = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    exchange, _ = _exchange()
    exchange.feed(
        5, f"HTTP/1.1 429 Busy\r\nRetry-After: {said}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert exchange.record.status == "http_error"
    assert exchange.record.retry_after_s == seconds


def test_a_server_that_says_an_error_and_falls_silent_is_no_timeout() -> None:
    for status, expected in (
        ("timeout", "stream_error"),
        ("unfinished", "stream_error"),
        ("cancelled", "cancelled"),
    ):
        exchange, _ = _exchange()
        exchange.feed(1 * MS, HEAD + chunk(OK[0], {"error": {"message": "overloaded"}}))
        assert not exchange.ended
        exchange.fail(status, "no token for 120 s", 9 * MS)
        assert exchange.record.status == expected
        assert ("overloaded" in (exchange.record.error or "")) is (expected == "stream_error")


def test_a_time_limit_keeps_what_arrived_and_what_comes_later_is_dropped() -> None:
    exchange, ends = _exchange()
    exchange.feed(1 * MS, HEAD + chunk(OK[0]))
    exchange.fail("timeout", "nothing received for 1 s", 1000 * MS)
    exchange.feed(1001 * MS, chunk(OK[1]) + END)
    exchange.fail("unfinished", "end of the stage", 2000 * MS)
    exchange.eof(2001 * MS, "Connection reset by peer")
    assert len(ends) == 1
    record = exchange.record
    assert (record.status, record.error) == ("timeout", "nothing received for 1 s")
    assert (record.output_tokens, list(record.chunk_at_us)) == (1, [1_000])
    assert record.ended_ns == 1000 * MS


@pytest.mark.parametrize(
    ("more", "reusable"),
    [(b"", True), (b"Connection: close\r\n", False), (b"Connection: keep-alive\r\n", True)],
)
def test_whether_the_connection_may_be_used_again(more: bytes, reusable: bool) -> None:
    exchange, _ = _exchange()
    exchange.feed(1, HEAD[:-2] + more + b"\r\n" + chunk(*OK) + END)
    assert exchange.ended
    assert exchange.close_after is not reusable


def test_a_second_attempt_on_a_fresh_connection_starts_from_nothing() -> None:
    exchange, ends = _exchange()
    exchange.restart()
    exchange.record.started_ns = 10 * MS
    exchange.feed(15 * MS, HEAD + chunk(*OK) + END)
    assert len(ends) == 1
    assert (exchange.record.status, list(exchange.record.chunk_at_us)) == ("ok", [5_000, 5_000])
