"""Prometheus pages of engines and exporters under one set of names."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.telemetry import COLUMNS, Telemetry, lines_of, read_metrics, samples
from tests.support.repeats import often

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 250.0
vllm:num_preemptions_total{engine="0"} 7.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 45.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters="b"} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.8e+09
vllm:kv_block_lifetime_seconds_sum{engine="0"} 12.0
vllm:kv_block_lifetime_seconds_count{engine="0"} 3.0
vllm:prompt_tokens_cached_total{engine="0"} 250.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 12.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 0.28
sglang:cache_hit_rate{model_name="m"} 0.4
sglang:spec_accept_rate{model_name="m"} 0.6
sglang:num_retracted_requests_total{model_name="m"} 3
sglang:lora_pool_slots_used{model_name="m"} 2
sglang:lora_pool_slots_total{model_name="m"} 8
"""
TGI = b"tgi_batch_current_size 8\ntgi_queue_size 1\n"
LLAMA = b"llamacpp:requests_processing 4\nllamacpp:requests_deferred 2\n"
TRITON = b"""nv_trt_llm_request_metrics{model="t",request_type="waiting",version="1"} 6
nv_trt_llm_request_metrics{model="t",request_type="scheduled",version="1"} 10
nv_trt_llm_request_metrics{model="t",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="t"} 4000
nv_gpu_utilization{gpu_uuid="a"} 0.9
nv_gpu_memory_used_bytes{gpu_uuid="a"} 2147483648
"""
DCGM = b"""DCGM_FI_DEV_GPU_UTIL{gpu="0"} 80
DCGM_FI_DEV_GPU_UTIL{gpu="1"} 100
DCGM_FI_DEV_FB_USED{gpu="0"} 1024
DCGM_FI_DEV_FB_USED{gpu="1"} 1024
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0"} 0.2
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="1"} 0.4
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0"} 0.7
"""
ON_GPUS = {
    "gpu_utilization": 0.9,
    "gpu_memory_used_bytes": 2 * 2**30,
    "tensor_active": 0.3,
    "memory_active": 0.7,
}


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (
            [VLLM],
            json.loads("""{"running": 7, "waiting": 2, "kv_cache_usage": 0.75,
                "prefix_cache_queries_total": 1000, "prefix_cache_hits_total": 250,
                "preemptions_total": 7, "spec_draft_tokens_total": 60,
                "spec_accepted_tokens_total": 45, "adapter_slots": 4,
                "adapter_slots_used": 2, "kv_block_lifetime_s_total": 12,
                "kv_blocks_evicted_total": 3, "cached_tokens_total": 250, "engines": 2}"""),
        ),
        (
            [SGLANG],
            json.loads("""{"running": 12, "waiting": 5, "kv_cache_usage": 0.28,
                "prefix_hit_rate": 0.4, "spec_acceptance_rate": 0.6, "preemptions_total": 3,
                "adapter_slots": 8, "adapter_slots_used": 2, "engines": 1}"""),
        ),
        ([TGI], {"running": 8, "waiting": 1, "engines": 1}),
        ([LLAMA], {"running": 4, "waiting": 2, "engines": 1}),
        (
            [TRITON],
            {
                "running": 10,
                "engines": 1,
                "waiting": 6,
                "kv_cache_usage": 0.5,
                "gpu_utilization": 0.9,
                "gpu_memory_used_bytes": 2 * 2**30,
            },
        ),
        ([DCGM], ON_GPUS),
        (
            [SGLANG, DCGM],
            {
                "running": 12,
                "waiting": 5,
                "kv_cache_usage": 0.28,
                "prefix_hit_rate": 0.4,
                "spec_acceptance_rate": 0.6,
                "preemptions_total": 3,
                "adapter_slots": 8,
                "adapter_slots_used": 2,
                "engines": 1,
                **ON_GPUS,
            },
        ),
        ([b"", b"<html>404</html>", b"vllm:num_requests_running NaN\n"], {}),
    ],
    ids=["vllm", "sglang", "tgi", "llama.cpp", "triton", "dcgm", "engine and exporter", "nothing"],
)
def test_the_names_of_engines_are_one_set_of_columns(
    pages: list[bytes], expected: dict[str, float]
) -> None:
    found = read_metrics(pages)
    assert found == pytest.approx(expected)
    assert set(found) <= set(COLUMNS)


def test_a_page_that_knows_nothing_is_left_alone_and_the_key_goes_to_the_engine_only() -> None:
    asked: list[tuple[str, str | None]] = []

    class Served(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            body = {"/metrics": VLLM, "/gpu": DCGM}.get(self.path, b"nothing\n")
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{http.server_address[1]}"

    async def main() -> tuple[Telemetry, dict[str, float]]:
        async with Pages() as pages:
            telemetry = Telemetry(
                pages,
                {
                    f"{root}/metrics": {"Authorization": "Bearer k"},
                    f"{root}/gpu": {},
                    f"{root}/other": {},
                },
            )
            await telemetry.start()
            found = await telemetry.sample()
            await telemetry.stop()
            return telemetry, found

    try:
        telemetry, found = asyncio.run(main())
    finally:
        http.shutdown()
        http.server_close()
    assert telemetry.silent == [f"{root}/other"]
    assert (found["running"], found["gpu_utilization"]) == (7, pytest.approx(0.9))
    assert asked.count(("/other", None)) == 1
    assert {key for path, key in asked if path == "/metrics"} == {"Bearer k"}
    assert {key for path, key in asked if path != "/metrics"} == {None}
    table = telemetry.table()
    assert table["running"].to_pylist() == [7, 7]
    assert table["prefix_hit_rate"].to_pylist() == [None, None]


BLANK = st.text(" \t", max_size=2)
SAMPLE = st.tuples(
    st.dictionaries(
        st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,3}", fullmatch=True),
        st.text(max_size=6),
        max_size=3,
    ),
    st.floats(allow_nan=False),
    st.lists(BLANK, min_size=20, max_size=20),
    st.sampled_from(["", " 1700000000000"]),
    st.booleans(),
)


def written(
    name: str, labels: dict[str, str], value: float, blanks: list[str], stamp: str, comma: bool
) -> str:
    """A line as the text format allows it: blanks between tokens, escapes, a comma behind the last
    label, a time."""
    blank = iter(blanks)
    pairs = []
    for label, text in labels.items():
        escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        pairs.append(f'{next(blank)}{label}{next(blank)}={next(blank)}"{escaped}"{next(blank)}')
    braces = (
        f"{{{','.join(pairs)}{',' if comma and pairs else ''}{next(blank)}}}"
        if pairs or comma
        else " "
    )
    shown = {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(value))
    return f"{next(blank)}{name}{next(blank)}{braces}{next(blank)}{shown}{stamp}{next(blank)}"


@settings(max_examples=often(15, 60), deadline=None)
@given(st.lists(SAMPLE, max_size=4), st.sampled_from(["\n", "\r\n"]))
def test_every_line_that_the_text_format_allows_is_read(lines: list[tuple], end: str) -> None:
    page = end.join(
        part
        for line in lines
        for part in ("# HELP m m 5", written("m_other", *line), "", written("m", *line))
    )
    assert samples(lines_of(page), "m") == [(labels, value) for labels, value, *_ in lines]


@pytest.mark.parametrize("line", ['m{a="x} 5', 'm{a="x" 5', "m x", "m", 'm{a="x"}'])
def test_a_damaged_line_is_no_number(line: str) -> None:
    assert [value != value for _, value in samples(lines_of(line), "m")] == [True]
    assert read_metrics([line.replace("m", "vllm:num_requests_running").encode()]) == {}
