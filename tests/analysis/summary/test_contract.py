"""The structs of analysis/contract/ hold every summary without a difference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.part import ContractError
from ampacity.analysis.contract.summary import Summary, read_summary, to_json
from ampacity.loadgen.rundir.files import Run, load_run
from tests.analysis.burst.test_burst import burst_run
from tests.analysis.capacity.test_families import two_classes
from tests.analysis.stage.test_outage import stage as outage_stage
from tests.analysis.summary.test_sessions import by_hand
from tests.support import sample_summary
from tests.support.args import Command
from tests.support.contract import describe_fields, lost_in_contract, summarise
from tests.support.synthetic import Stage, make_run, queue_sweep

DOCUMENT = Path(__file__).parents[3] / "docs" / "summary.md"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stages = queue_sweep(np.random.default_rng(1), [2.0, 5.0], 40.0, service_rps=10.0)
    return summarise(make_run(tmp_path_factory.mktemp("runs") / "run", stages, ["ttft_p50=2s"]))


def _burst(path: Path) -> Run:
    return burst_run(path)


def _outage(path: Path) -> Run:
    return make_run(path, [outage_stage(((10.0, 20.0),))], ["error_rate=5%"])


def _classes(path: Path) -> Run:
    stages = [two_classes(10.0, 0.0, 0, 0.1), two_classes(20.0, 200.0, 800, 1.0)]
    return make_run(path, stages, ["a:ttft_p90=150ms", "b:ttft_p90=500ms"], warmup_requests=0)


def _sessions(path: Path) -> Run:
    extra = {"sessions": {"begun": 6, "cut": ["0-4"]}, "cached_share_planned": 0.5}
    return make_run(path, [Stage(by_hand(), 10.0, extra=extra)], ["e2e_p50=2s"], warmup_requests=0)


def _search(path: Path) -> Run:
    rates = [2.0, 5.0]
    steps = [{"stage": i, "offered_rps": rate, "why": "start"} for i, rate in enumerate(rates)]
    stages = queue_sweep(np.random.default_rng(1), rates, 40.0, service_rps=10.0)
    search = {"precision": 0.1, "reached": True, "path": steps}
    return make_run(path, stages, ["ttft_p50=2s"], search=search)


@pytest.mark.parametrize("made", [_burst, _outage, _classes, _sessions, _search])
def test_each_kind_of_load_comes_back_whole(made: Callable[[Path], Run], tmp_path: Path) -> None:
    assert lost_in_contract(made(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--concurrency 1,8 --duration 60s --input-tokens 10 --output-tokens 20", "capacity"),
        ("--rates 1,2 --duration 60s --workload chat-short --lengths p99", "families"),
    ],
)
def test_predicted_runs_come_back_whole(
    words: str, part: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "run"
    engine = "--preset linear:0.01,0.001 --max-num-seqs 16 --slo ttft_p95=1s"
    command(f"predict {engine} {words} --out", path)
    assert lost_in_contract(load_run(path)) == []
    written = read_summary(path / "summary.json")
    assert getattr(written, part)
    assert to_json(written) == json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize(
    "changes",
    json.loads("""[{}, {"killed": true}, {"predicted": true}, {"status": "interrupted"},
        {"imported": {"tool": "vllm"}}]"""),
)
def test_each_state_of_a_run_comes_back_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    stages = queue_sweep(np.random.default_rng(1), [2.0], 40.0, service_rps=10.0)
    assert lost_in_contract(make_run(tmp_path / "run", stages, ["ttft_p50=2s"], **changes)) == []


@pytest.mark.parametrize("name", sample_summary.ALL)
def test_the_hand_made_summaries_fit(name: str) -> None:
    assert to_json(read_summary(made := sample_summary.ALL[name]())) == json.loads(json.dumps(made))


def test_an_unknown_field_and_a_wrong_type_name_their_path(sweep: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"`c_maxx`.*\$\.capacity"):
        read_summary({**sweep, "capacity": {**sweep["capacity"], "c_maxx": 1}})
    with pytest.raises(ContractError, match=r"\$\.knee\.rps"):
        read_summary({**sweep, "knee": {**sweep["knee"], "rps": "fast"}})


def test_the_document_lists_the_fields_of_the_structs() -> None:
    listed = DOCUMENT.read_text(encoding="utf-8").partition("## Fields\n\n")[2]
    assert listed.strip() == describe_fields(Summary).strip(), "docs/summary.md is stale"
