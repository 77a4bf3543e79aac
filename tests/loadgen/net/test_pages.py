"""The small client for pages beside the load: every way in which HTTP ends a body, and what goes
wrong."""

import asyncio
import gzip

import pytest

from ampacity.loadgen.net.pages import PAGE_MAX_BYTES, NoConnectionError, Page, PageError, Pages
from tests.support.stage_driving import on_loop

OK = b"HTTP/1.1 200 OK\r\n"


class Script:
    """Gives the n-th request of all the n-th answer, and closes after one that says so. Notes
    heads and connections."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                writer.write(answer.removesuffix(b"<close>"))
                if answer.endswith(b"<close>"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def fetched(script: Script, times: int = 1) -> list[Page]:
    async def main() -> list[Page]:
        server = await asyncio.start_server(script.serve, "localhost", 0)
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}/metrics?a=1"
        async with server, Pages() as pages:
            return [await pages.get(url, {"X-Key": "k"}, 5.0) for _ in range(times)]

    return on_loop("uvloop", main())


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 5\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        OK + b"\r\nhello<close>",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello",
        OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"hello", mtime=0) + b"<close>",
    ],
)
def test_a_body_is_read_to_its_end(answer: bytes) -> None:
    script = Script(answer)
    (page,) = fetched(script)
    assert (page.status, page.body) == (200, b"hello")
    assert script.heads[0].startswith(b"GET /metrics?a=1 HTTP/1.1\r\nHost: localhost:")
    assert b"\r\nX-Key: k\r\n" in script.heads[0]


def test_a_connection_is_kept_and_one_that_was_closed_is_replaced() -> None:
    whole = OK + b"Content-Length: 1\r\n\r\nx"
    kept = Script(whole, whole, whole)
    fetched(kept, times=3)
    assert kept.connections == 1
    dropped = Script(whole + b"<close>", whole)  # announced by nothing: the next request finds out
    assert [page.body for page in fetched(dropped, times=2)] == [b"x", b"x"]
    assert dropped.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"<close>",
        b"SSH-2.0-server\r\n<close>",
        OK + b"Content-Length: 9\r\n\r\nhello<close>",
        OK + b"Content-Encoding: gzip\r\n\r\nno<close>",
    ],
)
def test_what_is_no_whole_answer_raises(answer: bytes) -> None:
    with pytest.raises(PageError):
        fetched(Script(answer))


def test_a_page_without_end_is_cut() -> None:
    (page,) = fetched(Script(OK + b"\r\n" + b"x" * (PAGE_MAX_BYTES + 100_000)))
    assert len(page.body) == PAGE_MAX_BYTES


@pytest.mark.parametrize("line", [b"X-Filler: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_headers_without_end_are_no_page(line: bytes) -> None:
    with pytest.raises(PageError, match="more than 64 KiB of headers"):
        fetched(Script(OK + b"X-First: " + line * 100))
    (page,) = fetched(
        Script(OK + line[:10] + b": " + b"a" * 40_000 + b"\r\nContent-Length: 1\r\n\r\nx")
    )
    assert page.body == b"x"


def test_silence_and_nobody_there() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main(silent: bool) -> None:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        if not silent:
            server.close()
            await server.wait_closed()
        async with Pages() as pages:
            try:
                await pages.get(url, {}, 0.05 if silent else 5.0)
            finally:
                server.close()

    with pytest.raises(TimeoutError):
        on_loop("uvloop", main(silent=True))
    with pytest.raises(NoConnectionError, match=r"^Connection refused$"):
        on_loop("uvloop", main(silent=False))
