"""Servers that send without end, or what unfolds without end: bounded in memory and time."""

import asyncio
import contextlib
import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ampacity.loadgen.drive import timeouts
from ampacity.loadgen.net.pages import PAGE_MAX_BYTES, Page, PageError, Pages
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.probe.look import look
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.telemetry import Telemetry, read_metrics
from tests.support.servers.faults import FAULTS
from tests.support.stage_driving import on_loop, served_stage

HOSTILE = (
    *("endless_headers", "many_headers", "informational_forever", "endless_chunk_extension"),
    *("slow_drip", "gzip_bomb", "line_without_end", "ten_thousand_choices", "endless"),
)
GROWTH_MIB = 250  # of nine endings, three times each, at once; the servers' memory included


@pytest.mark.real_time  # they would run into their limit on a busy machine
def test_hostile_endings_are_bounded_in_memory_and_time() -> None:
    command = [sys.executable, "-m", "tests.support.servers.hostile_stage", *HOSTILE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    statuses, growth_mib, took_s = json.loads(done.stdout)
    assert statuses == {name: FAULTS[name].status for name in HOSTILE}
    assert growth_mib < GROWTH_MIB
    assert took_s < 20  # the limit of a request is 6 s


def test_a_stream_without_end_has_a_limit_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody set a limit of time."""
    monkeypatch.setattr(timeouts, "CHUNKS_MAX", 10)
    monkeypatch.setattr(timeouts, "COUNT_EVERY_NS", 10**8)
    result, _ = served_stage([0.0], "endless", limits=Limits(total_s=20.0, idle_s=20.0))
    (record,) = result.records
    assert (record.status, record.error) == ("protocol_error", "more than 10 chunks")


OK = b"HTTP/1.1 200 OK\r\n"
GZIP = OK + b"Content-Encoding: gzip\r\n\r\n"
FRAMING = "more than 64 KiB of headers"


def bomb(mib: int) -> bytes:
    return gzip.compress(bytes(mib << 20), 1)


def members(n: int) -> bytes:
    return gzip.compress(b"") * n


PAGES: dict[str, tuple[bytes | Callable[[], bytes], bytes, str | None]] = {
    # what is sent at once (or how to make it, where that takes long), then again and again; the error, None: a page that is cut
    "a page without end": (OK + b"\r\n", b"x" * 65_536, None),
    "100,000 headers": (OK, b"X: 1\r\n" * 1000, FRAMING),
    "a header without end": (OK + b"X: ", b"a" * 65_536, FRAMING),
    "1xx for ever": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, FRAMING),
    "a chunk extension without end": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n5;",
        b"a" * 65_536,
        FRAMING,
    ),
    "a gzip bomb": (lambda: GZIP + bomb(256), b"", "it unfolds to more than 32 MiB"),
    "members of gzip": (lambda: GZIP + members(50_000) + bomb(64), b"", "more than 32 MiB"),
    "a drip": (OK + b"X: ", b"a", "TimeoutError"),
}


def fetched(first: bytes, more: bytes, *, drips: bool) -> Page:
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            while more and not writer.is_closing():
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.1 if drips else 0)
        writer.close()

    async def main() -> Page:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        try:
            async with server, Pages() as pages:
                return await pages.get(url, {}, 1.0 if drips else 20.0)
        finally:
            await asyncio.gather(*filter(None, serving))
            await asyncio.sleep(0.01)

    page: Page = on_loop("asyncio", main())
    return page


@pytest.mark.parametrize("name", PAGES)
def test_a_hostile_page_is_cut_or_given_up(name: str) -> None:
    made, more, error = PAGES[name]
    first = made() if callable(made) else made
    before, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    if error is None:
        assert len(fetched(first, more, drips=False).body) == PAGE_MAX_BYTES
    else:
        with pytest.raises((PageError, TimeoutError)) as given_up:
            fetched(first, more, drips=name == "a drip")
        assert error in repr(given_up.value)
    growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert growth_mib < 120
    assert time.monotonic() - began_s < 15


class Answering(Pages):
    """Answers each page with ``body``."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body

    async def get(self, url: str, headers: object, timeout_s: float) -> Page:
        return Page(200, {}, self.body)


@pytest.mark.parametrize(
    "models", [b'{"data":[' + b'{"id":"m"},' * 700_000, b"[" * PAGE_MAX_BYTES], ids=["cut", "deep"]
)
def test_a_huge_list_of_models_names_none(models: bytes) -> None:
    endpoint = parse_endpoint("http://127.0.0.1:9/v1")
    served = asyncio.run(look(Answering(models[:PAGE_MAX_BYTES]), endpoint))
    assert served.models == ()


def test_a_huge_list_of_models_is_cut() -> None:
    whole = json.dumps({"data": [{"id": f"m{i}"} for i in range(200_000)]}).encode()
    endpoint = parse_endpoint("http://127.0.0.1:9/v1")
    assert len(asyncio.run(look(Answering(whole), endpoint)).models) == 1000


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{a="' + '\\\\"' * 300_000,
        "vllm:num_requests_running" + "{" * 1_000_000,
        "vllm:num_requests_running " + "9" * 1_000_000,
        " \t" * 1_000_000,
        "vllm:num_requests_running{" + 'a="b",' * 200_000 + "} 1",
    ],
    ids=["quotes", "braces", "digits", "blanks", "labels"],
)
def test_a_hostile_page_of_metrics_is_read_in_time(line: str) -> None:
    began_s = time.monotonic()
    read_metrics([line.encode()])
    assert time.monotonic() - began_s < 5


def test_a_page_of_metrics_that_was_cut_is_not_sampled() -> None:
    """Its figures would be those of a part."""
    page = b"vllm:num_requests_running 3\n"
    sample = Telemetry(Answering(page), {"http://h/metrics": {}}).sample()
    assert asyncio.run(sample) == {"running": 3.0, "engines": 1.0}
    cut = page + b"#" * (PAGE_MAX_BYTES - len(page))
    assert asyncio.run(Telemetry(Answering(cut), {"http://h/metrics": {}}).sample()) == {}
