"""Which tests need the machine to themselves: those that hold times over real sockets to a limit."""

from __future__ import annotations

import pytest

REAL_TIME = {
    "test_ab", "test_benchmarks", "test_calibrate", "test_experiments", "test_llamacpp", "test_loadgen_faults",
    "test_loadgen_pacer", "test_loadgen_pages", "test_loadgen_probe", "test_loadgen_proxy", "test_loadgen_redirects",
    "test_loadgen_retries", "test_loadgen_sessions", "test_loadgen_workers", "test_search", "test_simulator_faults_server",
    "test_simulator_launch", "test_simulator_server", "test_simulator_server_agreement", "test_simulator_server_answers",
    "test_tokenizer_census", "test_vllm",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in REAL_TIME:
            item.add_marker(pytest.mark.real_time)
