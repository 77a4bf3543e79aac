"""The tool against vLLM on the CPU (``make test-engines``): the engine with the fullest protocol.

vLLM needs minutes to start and, beside other work on a small machine, a second for a step; so the
tests ask for few tokens, set no tight limits, and judge counts and order, not speed.
"""

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.engines.command import ampacity, answered
from tests.engines.engine import MEAN_LENGTH_TOKENS, Engine, need
from tests.engines.relay import Relay
from tests.support.args import args_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_LIMIT_S = 600.0  # 30 s on two idle cores, 200 s on two busy ones
STOP_LIMIT_S = 30.0
RUN_LIMIT_S = 400.0


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One vLLM server of the virtual environment that VLLM_VENV names."""
    venv = os.environ.get("VLLM_VENV")
    if not venv:
        pytest.skip("VLLM_VENV names no virtual environment with vLLM: see docs/engines.md")
    need("tokenizers")
    from tests.engines.tiny_gguf import make_tiny_model, write_hugging_face

    folder = tmp_path_factory.mktemp("vllm")
    write_hugging_face(make_tiny_model(MEAN_LENGTH_TOKENS), folder / "tiny")
    with serve_vllm(Path(venv), folder / "tiny", folder / "log") as engine:
        yield engine


@contextmanager
def serve_vllm(venv: Path, model: Path, log: Path) -> Iterator[Engine]:
    """vLLM on ``model``. Its processes are one group, which is ended as a whole: a killed parent
    leaves them alive."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = args_of(
        venv / "bin" / "vllm", "serve", model, "--served-model-name tiny --port", port
    )
    command += args_of("--host 127.0.0.1 --dtype bfloat16 --max-model-len 2048 --max-num-seqs 32")
    command += ["--enforce-eager"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "OMP_NUM_THREADS": "1",  # more threads spin against whatever else runs on a small machine
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as process,
    ):
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
            yield Engine(root=f"http://127.0.0.1:{port}", model="tiny", process=process)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(process: subprocess.Popen[str], root: str, log: Path) -> None:
    def healthy() -> bool:
        assert process.poll() is None, f"vLLM ended: {log.read_text()[-3000:]}"
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{root}/health", timeout=5).close()
            return True
        return False

    wait_until(healthy, START_LIMIT_S, lambda: log.read_text()[-3000:])


def test_counts_chunks_and_telemetry_are_the_servers(vllm: Engine, tmp_path: Path) -> None:
    with Relay(vllm.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--rates 3 --duration 10s --input-tokens lognormal:p50=60,p99=300",
            "--output-tokens lognormal:p50=12,p99=40 --slo e2e_p99=200s",
            limit_s=RUN_LIMIT_S,
        )
        wires = answered(run, relay)
    rows = run.requests
    assert len(rows) == run.meta["stages"][0]["scheduled_requests"] == len(wires) > 10
    assert Counter(row["status"] for row in rows) == {"ok": len(rows)}
    for row in rows:
        wire = wires[row["request_id"]]
        assert wire.done
        assert wire.body["stream_options"] == {
            "include_usage": True,
            "continuous_usage_stats": True,
        }
        assert row["input_tokens"] == wire.usage["prompt_tokens"]
        assert (
            row["output_tokens"] == wire.usage["completion_tokens"] == row["output_tokens_planned"]
        )
        assert row["finish_reason"] == "length"
        # vLLM says with every chunk how many tokens there were, so merged and hidden tokens are
        # known
        assert row["token_source"] == "usage_per_chunk"
        assert len(row["chunk_at_us"]) == wire.text_events
        assert len(row["chunk_tokens"]) == len(row["chunk_at_us"])
        # a hidden token at the end (its chunk has no text) belongs to no chunk
        assert 0 <= row["output_tokens"] - sum(row["chunk_tokens"]) <= wire.empty_events
        assert row["first_event_ns"] <= row["first_token_ns"]

    assert run.meta["locked"]["engine"] == "vllm"
    assert run.meta["locked"]["engine_version"]
    assert run.meta["locked"]["max_model_len"] == 2048
    samples = run.server
    assert max(sample["running"] for sample in samples) >= 1
    assert all(
        sample["waiting"] is not None and 0 <= sample["kv_cache_usage"] <= 1 for sample in samples
    )
    assert run.summary["workload"]["realised"]["token_source"] == {"usage_per_chunk": len(rows)}


def test_natural_ends_are_counted_as_the_server_counts_them(vllm: Engine, tmp_path: Path) -> None:
    with Relay(vllm.url) as relay:
        run = ampacity(
            tmp_path / "run",
            "run",
            relay.url,
            "--concurrency 8 --max-requests 24 --duration 300s --input-tokens 30",
            "--output-tokens 500 --extra-body",
            '{"ignore_eos":false}',
            "--slo e2e_p99=200s",
            limit_s=RUN_LIMIT_S,
        )
        wires = answered(run, relay)
    rows = run.requests
    assert len(rows) == 24
    for row in rows:
        usage = wires[row["request_id"]].usage
        assert (row["status"], row["finish_reason"]) == ("ok", "stop")
        assert row["output_tokens"] == usage["completion_tokens"]
        # the end token is counted and has no text
        assert len(row["chunk_at_us"]) <= row["output_tokens"] - 1


def test_a_wrong_name_of_the_model_is_refused_before_the_load(vllm: Engine, tmp_path: Path) -> None:
    run = ampacity(
        tmp_path / "run",
        "run",
        vllm.url,
        "--model no-such-model --rates 1 --duration 1s",
        check=False,
    )
    assert run.exit_status == 2
    assert run.stderr.startswith("ampacity: --model no-such-model:")
    assert "it serves: tiny" in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "run.json").exists()
