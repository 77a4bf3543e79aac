"""Feed damaged bytes to every reader: ``python -m tests.long.fuzz --seconds 60 [TARGET ...]``.

Inputs are recorded streams and small files, mutated at random. The receive path must make the same
record with the compiled code as with the parsers; a reader must return, or raise its own error in
a sentence. A failing input is kept in the folder ``--keep`` and named.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import io
import json
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

TESTS = Path(__file__).parents[1]
MOST_S = 20.0  # of CPU for one input
MOST_WALL_S = 300.0  # by the clock: one that waits for ever uses no CPU
STOP = threading.Event()  # set by SIGINT: what was read is still printed
MEMORY_BYTES = 4 << 30
NUMBERS = (b"0", b"-1", b"1e308", b"9" * 19, b"9" * 400, b"NaN", b"Infinity", b"0.5", b"null")
PIECES = (
    *(b"\r\n", b"\n\n", b"data: ", b"data:", b"[DONE]", b'"', b"\\", b"\\ud83d", b"{", b"}", b"["),
    *(b"]", b",", b":", b"\x00", b"\xff", b"\xef\xbb\xbf", b"<think>", b"</think>", b"0\r\n\r\n"),
    *(b"event: error\n", b"\xf0\x9f\x98\x80", b"#", b"&a *a", b"!!python/object:os.system"),
)


def mutated(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Return ``data`` with one to six random changes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randint(0, len(found))
        end = min(len(found), at + int(draw.paretovariate(0.7)))
        match draw.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at:end]
            case 3:
                found[at:at] = draw.choice(PIECES)
            case 4:
                digits = [i for i, byte in enumerate(found) if 48 <= byte <= 57]
                if digits:
                    where = draw.choice(digits)
                    found[where : where + 1] = draw.choice(NUMBERS)
            case 5:
                other = draw.choice(others)
                cut = draw.randint(0, len(other))
                found[at:] = other[cut : cut + 20_000]
            case _:
                found[at:end] = bytes(draw.randrange(256) for _ in range(min(end - at, 64)))
    return bytes(found)


def streams() -> list[bytes]:
    return [path.read_bytes() for path in sorted((TESTS / "streams").glob("*.http"))]


def receive(data: bytes, draw: random.Random) -> None:
    """Read a response both ways, cut where events end or anywhere; the records must be equal."""
    from ampacity.loadgen.receive import hot_path
    from tests.streams.playing import in_pieces, new_exchange

    draw = random.Random(data)  # a kept input is cut as it was
    if draw.random() < 0.7:
        end = draw.choice((b"\n\n\r\n", b"\r\n", b"\n\n"))
        reads = [piece + end for piece in data.split(end)]
    else:
        cuts = draw.sample(range(len(data) + 1), min(len(data), draw.randint(0, 20)))
        reads = in_pieces(data, cuts)
    found = []
    for compiled in {hot_path.COMPILED, False}:
        before, hot_path.COMPILED = hot_path.COMPILED, compiled
        try:
            exchange = new_exchange(keep=True)
            for ms, read in enumerate(reads, 1):
                if not exchange.ended:
                    exchange.feed(ms * 1_000_000, read)
            exchange.eof(10**9)
        finally:
            hot_path.COMPILED = before
        record = exchange.record
        # the excerpt of a broken read begins where its handler began
        record.error = ":".join((record.error or "").split(":")[:2])
        found.append((record, exchange.pieces(), exchange.content()))
    pairs = [zip(_plain(one), _plain(found[0]), strict=True) for one in found[1:]]
    if apart := [
        f"{a[0]}: {a[1]!r:.80} or {b[1]!r:.80}" for pair in pairs for a, b in pair if a != b
    ]:
        raise AssertionError(f"compiled and parsed differ: {'; '.join(apart)}")


def _plain(found: tuple[Any, object, object]) -> list[tuple[str, object]]:
    record, pieces, content = found
    fields = [(name, getattr(record, name)) for name in record.__slots__]
    return [*fields, ("pieces", pieces), ("content", content)]


def reader(read: Callable[[Path], object], *errors: type[Exception], suffix: str = "") -> Target:
    """Return a target that reads a file with these bytes; ``errors`` are in order."""

    def run(data: bytes, draw: random.Random) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"f{suffix}"
            path.write_bytes(data)
            try:
                read(path)
            except errors as error:
                text = str(error)
                if not text or "\n" in text.strip() or len(text) > 2000:
                    raise AssertionError(f"no one clear line: {text!r}") from error

    return run


Target = Callable[[bytes, random.Random], None]
Corpus = list[bytes]


def _folder(name: str, *patterns: str, most: int = 30_000) -> Corpus:
    import gzip

    found = []
    for pattern in patterns:
        for path in sorted((TESTS / name).glob(pattern)):
            data = path.read_bytes()
            found.append((gzip.decompress(data) if path.suffix == ".gz" else data)[:most])
    return found


def traces() -> tuple[Target, Corpus]:
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.traces.read import read_trace

    files = _folder("data/traces", "*.csv*", "*.jsonl*", "*.json", "otel_agent_traces/*")
    return reader(read_trace, WorkloadError, suffix=".jsonl"), files


def prompts() -> tuple[Target, Corpus]:
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.prompts.files import read_prompts

    rows = [{"prompt": "a b"}, {"messages": [{"role": "user", "content": "x"}]}]
    shares = _folder("data/traces", "sharegpt*")
    lines = "\n".join(map(json.dumps, rows)).encode()
    return reader(read_prompts, WorkloadError, suffix=".jsonl"), [*shares, lines]


def workload_files() -> tuple[Target, Corpus]:
    from ampacity.workloads.archetypes import ARCHETYPES
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.profile import load_workload, workload_text

    texts = [workload_text(name)[0].encode() for name in ARCHETYPES]
    read = lambda path: load_workload(str(path))  # noqa: E731
    return reader(read, WorkloadError, suffix=".yaml"), texts


def imports() -> tuple[Target, Corpus]:
    from ampacity.imports.into_run import read_file
    from ampacity.imports.results import ImportedFileError

    files = _folder("samples_other_tools", "*.json*", "aiperf/*.jsonl", most=200_000)
    return reader(read_file, ImportedFileError, suffix=".json"), files


def models() -> tuple[Target, Corpus]:
    from ampacity.analysis.decision.model import DecisionError, read_model

    dense = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    dense |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    sliding = {"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}
    configs = [dense, dense | experts, dense | latent | {"v_head_dim": 128}, dense | sliding]
    return reader(read_model, DecisionError, suffix=".json"), [
        json.dumps(config).encode() for config in configs
    ]


def prices() -> tuple[Target, Corpus]:
    from ampacity.analysis.decision.model import DecisionError
    from ampacity.analysis.decision.money import read_prices

    text = b"name,input,cached,output,cache_write\nx,3,0.3,15,3.75\ny,1,,2,\n"
    return reader(read_prices, DecisionError, suffix=".csv"), [text]


def _predicted(run: Path, duration: str) -> None:
    import subprocess

    line = "predict --preset linear:0.01,0 --input-tokens 10 --output-tokens 5 --rates 5"
    command = [sys.executable, "-m", "ampacity", *line.split(), "--duration", duration]
    subprocess.run([*command, "--out", str(run)], check=True, capture_output=True)


def baselines() -> tuple[Target, Corpus]:
    """Damage a baseline, with a checksum that is right, and gate its own run by it."""
    from ampacity.analysis.change.judged import CompareError
    from ampacity.analysis.gate.baseline_file import _checksum, read_baseline
    from tests.support.processes.command_lines import run_here

    with tempfile.TemporaryDirectory() as folder:
        run, path = Path(folder) / "run", Path(folder) / "base.json"
        _predicted(run, "60s")
        run_here(["baseline", str(run), "-o", str(path)])
        text = path.read_bytes()
    read = reader(read_baseline, CompareError, suffix=".json")

    def signed(data: bytes, draw: random.Random) -> None:
        with suppress(ValueError, RecursionError, TypeError, AttributeError):
            held = json.loads(data)
            data = json.dumps(held | {"checksum": _checksum(held)}).encode()
        read(data, draw)

    return signed, [text]


def run_directories() -> tuple[Target, Corpus]:
    """Damage run.json, the records or a note of a short predicted run; analyse what is there."""
    from ampacity.analysis.metrics.requests import RecordsError
    from ampacity.analysis.summary import summarise
    from ampacity.loadgen.rundir.files import RunDirError, load_run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        _predicted(run, "5s")
        kept = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
        table = load_run(run).requests
    kept |= _streams(table)
    parquet, stream, note = "requests.parquet", "requests.arrows", "in-flight-0-0.arrows"

    def analyse(path: Path) -> None:
        summarise(load_run(path))

    def damage(data: bytes, draw: random.Random) -> None:
        with tempfile.TemporaryDirectory() as folder:
            name = parquet if data[:2] == b"PA" else "run.json" if data[:1] == b"{" else stream
            name = note if b"class_index" in data and name == stream else name
            for other, content in kept.items():
                if other not in ((parquet,) if name in (stream, note) else (stream, note)):
                    (Path(folder) / other).write_bytes(data if other == name else content)
            try:
                analyse(Path(folder))
            except (RunDirError, RecordsError) as error:
                if "\n" in str(error).strip():
                    raise AssertionError(f"no one clear line: {error}") from error

    return damage, [kept[name] for name in ("run.json", parquet, stream, note)]


def _streams(table: pa.Table) -> dict[str, bytes]:
    """Return the streams of a run that was killed with three requests in flight."""
    from ampacity.loadgen.drive.in_flight import InFlightNotes
    from ampacity.loadgen.plan import StagePlan, record_of
    from ampacity.loadgen.receive.exchange import Exchange
    from ampacity.loadgen.rundir.records import SCHEMA
    from ampacity.loadgen.rundir.streams import BatchStream
    from ampacity.workloads.schedule import Schedule

    schedule = Schedule(np.arange(3.0), np.full(3, 20), np.full(3, 5), table.num_rows)
    plan = StagePlan(0, "open", schedule, 3.0)
    in_flight = {Exchange(record_of(plan, i, i), b"", lambda _: None): i for i in range(3)}
    name, noted = InFlightNotes(plan, in_flight, [None], 0).take()
    kept = {}
    for file, rows in (("requests.arrows", table.slice().cast(SCHEMA)), (name, pa.table(noted))):
        buffer = io.BytesIO()
        BatchStream(buffer, rows.schema).write_table(rows)
        kept[file] = buffer.getvalue()
    return kept


def metrics() -> tuple[Target, Corpus]:
    from ampacity.loadgen.telemetry import read_metrics

    def run(data: bytes, draw: random.Random) -> None:
        read_metrics([data])

    page = b"""# HELP vllm:num_requests_running Running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 7 1700000000000
vllm:prefix_cache_queries_total 100
sglang:token_usage 0.5
"""
    return run, [page]


def receives() -> tuple[Target, Corpus]:
    """Return recorded streams, and longer ones of 120 words: of all planes, counted, in calls."""
    from tests.streams.playing import END, HEAD, http_chunk

    def answer(write: Callable[[str], dict[str, Any]], counted: bool = False) -> bytes:
        chunks = [HEAD]
        for n, word in enumerate(words, 1):
            usage = {"usage": {"prompt_tokens": 7, "completion_tokens": n}} if counted else {}
            value = {"choices": [{"index": 0, **write(word)}], **usage}
            data = json.dumps(value, separators=(",", ":"), ensure_ascii=n % 40 == 39)
            chunks.append(http_chunk(b"data: " + data.encode() + b"\n\n"))
        return b"".join([*chunks, http_chunk(b"data: [DONE]\n\n"), END])

    def text(word: str) -> dict[str, Any]:
        return {"delta": {"content": word}}

    def call(word: str) -> dict[str, Any]:
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": word}}]}}

    def listed(word: str) -> dict[str, Any]:
        entry = {"token": word, "logprob": -1.5e-07, "bytes": [*word.encode()]}
        return text(word) | {"logprobs": {"content": [entry | {"top_logprobs": [entry, {}]}]}}

    def tokens(word: str) -> dict[str, Any]:
        return {"text": word, "logprobs": {"tokens": [word], "token_logprobs": [-0.5, None]}}

    words = ["the ", "quick", " \N{GRINNING FACE}", "\u4f60\u597d", "brown ", "fox"] * 20
    answers = [answer(write) for write in (text, call, listed, tokens)]
    return receive, [*streams(), *answers, answer(text, True), answer(listed, True)]


TARGETS: dict[str, Callable[[], tuple[Target, Corpus]]] = {
    "receive": receives,
    "traces": traces,
    "prompts": prompts,
    "workloads": workload_files,
    "imports": imports,
    "models": models,
    "prices": prices,
    "baselines": baselines,
    "run-directories": run_directories,
    "metrics": metrics,
}


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(
            f"took more than {seconds:g} s of CPU, or {MOST_WALL_S:g} s by the clock"
        )

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, MOST_WALL_S),
    )
    for timer, number, most_s in timers:
        signal.signal(number, late)
        signal.setitimer(timer, most_s)
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)


def fuzz(name: str, seconds: float, seed: int, keep: Path) -> tuple[int, int]:
    """Return how many inputs were read in ``seconds`` of this process's CPU, and how many failed.

    On a busy machine that takes longer by the clock, and is worth the same. SIGINT ends it.
    """
    target, corpus = TARGETS[name]()
    draw = random.Random(seed)
    until, done, failed = time.process_time() + seconds, 0, 0
    keep.mkdir(parents=True, exist_ok=True)
    now = keep / f"{name}-{seed}-now"  # left where the interpreter itself crashes
    while time.process_time() < until and not STOP.is_set():
        data = mutated(draw.choice(corpus), draw, corpus)
        done += 1
        now.write_bytes(data)
        try:
            with bounded(MOST_S):
                target(data, draw)
        except Exception as error:
            failed += 1
            path = keep / f"{name}-{seed}-{done}"
            path.write_bytes(data)
            print(f"{name}: {type(error).__name__}: {str(error)[:300]} ({path})", flush=True)
            if failed >= 10:
                break
    now.unlink(missing_ok=True)
    return done, failed


def use_build(path: Path) -> None:
    """Load this build of the compiled hot path in place of the installed one."""
    name = "ampacity.loadgen.receive._hot_path"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import ampacity.loadgen.receive as package

    package._hot_path = module
    from ampacity.loadgen.receive import hot_path

    assert hot_path.read_handler is module.read_handler


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU, for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--hot-path", type=Path, help="a build of _hot_path.c to use instead")
    given = parser.parse_args()
    faulthandler.enable()
    if given.hot_path:  # a sanitizer reserves terabytes of addresses
        use_build(given.hot_path)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    failures = 0
    signal.signal(signal.SIGINT, lambda *_: STOP.set())
    for name in given.targets:
        before_s = time.process_time()
        done, failed = fuzz(name, given.seconds, given.seed, given.keep)
        failures += failed
        cpu_s = time.process_time() - before_s
        print(f"{name}: {done} inputs in {cpu_s:.0f} s of CPU, {failed} failed (seed {given.seed})")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
