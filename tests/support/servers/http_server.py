"""A small HTTP server of which a test writes the answers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], object]


@contextmanager
def http_server(get: Answer, post: Answer | None = None) -> Iterator[str]:
    """Serve while the block runs; yield the root URL, without a slash at its end."""
    methods = {"do_GET": get, "do_POST": post, "log_message": lambda *_: None}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (BaseHTTPRequestHandler,), methods))
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
