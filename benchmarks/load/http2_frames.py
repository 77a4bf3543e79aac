"""What HTTP/2 would cost a client in Python: CPU per 1,000 tokens, without sockets.

    pip install h2
    python -m benchmarks.load.http2_frames

One DATA frame a token, 128 tokens a stream, many streams on one connection, beside the same chunks
as HTTP/1.1 through this client's receive path, compiled and by its parsers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from benchmarks.load.shapes import SHAPES, TOKENS
from benchmarks.options import parser

STREAMS_AT_ONCE = 50
WINDOW_BYTES = 2**31 - 1


def http2_frames(answers: list[list[bytes]]) -> tuple[H2Connection, list[bytes]]:
    """Return a client with open streams, and the frames of a server that answers them."""
    client = H2Connection(H2Configuration(client_side=True))
    server = H2Connection(H2Configuration(client_side=False))
    for side in (client, server):
        side.initiate_connection()
        side.increment_flow_control_window(WINDOW_BYTES - 65_535)
        side.update_settings({4: WINDOW_BYTES, 3: len(answers)})  # window and streams at once
    for _ in range(2):
        server.receive_data(client.data_to_send())
        client.receive_data(server.data_to_send())
    names = [2 * number + 1 for number in range(len(answers))]
    for name in names:
        head = [(":method", "POST"), (":path", "/"), (":scheme", "https"), (":authority", "h")]
        client.send_headers(name, head, end_stream=True)
        server.receive_data(client.data_to_send())
        server.send_headers(name, [(":status", "200"), ("content-type", "text/event-stream")])
        client.receive_data(server.data_to_send())
    frames = []
    for events in zip(*answers, strict=True):
        for name, event in zip(names, events, strict=True):
            server.send_data(name, event)
            frames.append(server.data_to_send())
    return client, frames


def read_http2(answers: list[list[bytes]]) -> float:
    """Return the CPU seconds for reading them."""
    client, frames = http2_frames(answers)
    begin_s = time.process_time()
    for frame in frames:
        for event in client.receive_data(frame):
            if isinstance(event, DataReceived):
                client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        client.data_to_send()
    return time.process_time() - begin_s


def read_http1(answers: list[list[bytes]]) -> float:
    """Return the CPU seconds for reading and decoding them as HTTP/1.1 chunks."""
    head = SHAPES["ASCII"].stream(random.Random(0))[0][1]
    exchanges = []
    for _ in answers:
        record = RequestRecord(0, 0, 0, "unfinished", started_ns=0)
        exchanges.append(Exchange(record, b"", lambda _: None, ANSWERS["chat"]))
        exchanges[-1].feed(1, head)
    reads = [[b"%x\r\n%b\r\n" % (len(event), event) for event in events] for events in answers]
    begin_s = time.process_time()
    for number in range(TOKENS):
        for exchange, chunks in zip(exchanges, reads, strict=True):
            exchange.feed(number + 2, chunks[number])
    return time.process_time() - begin_s


def parsed(answers: list[list[bytes]]) -> float:
    """Return the CPU seconds of ``read_http1`` without the compiled hot path."""
    before, hot_path.COMPILED = hot_path.COMPILED, False
    try:
        return read_http1(answers)
    finally:
        hot_path.COMPILED = before


def answers_of(draw: random.Random) -> Iterator[list[bytes]]:
    shape = SHAPES["ASCII"]
    for _ in range(STREAMS_AT_ONCE):
        yield [shape.write(shape.text(draw), number) for number in range(TOKENS)]


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--repeat", type=int, default=9, help="the median of so many")
    repeat = given.parse_args().repeat
    ways: dict[str, Callable[[list[list[bytes]]], float]] = {
        "HTTP/1.1, compiled, decoded": read_http1,
        "HTTP/1.1, parsers, decoded": parsed,
        "HTTP/2, h2, frames alone": read_http2,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(repeat):  # in turn: the machine's own speed changes
        answers = list(answers_of(random.Random(seed)))
        for name, read in ways.items():
            found[name].append(read(answers) * 1e6 / (STREAMS_AT_ONCE * TOKENS))
    for name, each in found.items():
        print(f"{name}: {sorted(each)[repeat // 2]:.2f} ms of CPU per 1,000 tokens")


if __name__ == "__main__":
    main()
