"""A small HTTP server of which a test writes the answers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], object]


@contextmanager
def http_server(get: Answer, post: Answer | None = None) -> Iterator[str]:
    """Serve while the block runs; yield the root URL, without a slash at its end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            get(self)

        def do_POST(self) -> None:
            post(self) if post else self.send_error(405)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def reply(
    handler: BaseHTTPRequestHandler, body: bytes = b"", status: int = 200, **headers: str
) -> None:
    """Send an answer of known length; ``Content_Type`` is the header Content-Type."""
    handler.send_response(status)
    for name, value in {**headers, "Content_Length": str(len(body))}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def model_server(
    answer: Callable[[BaseHTTPRequestHandler, int], object],
    models: bytes = b'{"data":[{"id":"m"}]}',
) -> Iterator[str]:
    """Serve /v1/models and streams; ``answer(handler, number)`` writes the n-th, 0 the probe's."""
    count = itertools.count()

    def get(handler: BaseHTTPRequestHandler) -> None:
        listed = handler.path.endswith("/models")
        reply(handler, models if listed else b"{}", 200 if listed else 404)

    def post(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        setattr(handler, "body", body)  # noqa: B010 - of the request, for answers that read it
        answer(handler, next(count))

    with http_server(get, post) as url:
        yield f"{url}/v1"


def stream(handler: BaseHTTPRequestHandler, *events: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()
    for event in (*events, b"[DONE]"):
        handler.wfile.write(b"data: " + event + b"\n\n")
