"""The structs of analysis/contract/ hold every summary without a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.part import ContractError
from ampacity.analysis.contract.summary import describe_fields, read_summary
from ampacity.analysis.summary import summarise
from tests.support import sample_summary
from tests.support.contract import difference
from tests.support.synthetic import make_run, queue_sweep

DOCUMENT = Path(__file__).parents[3] / "docs" / "summary.md"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stages = queue_sweep(np.random.default_rng(1), [2.0, 5.0], 40.0, service_rps=10.0)
    return summarise(make_run(tmp_path_factory.mktemp("runs") / "run", stages, ["ttft_p50=2s"]))


def test_a_summary_comes_back_as_it_was(sweep: dict[str, Any]) -> None:
    assert difference(sweep) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"killed": True},
        {"predicted": True},
        {"status": "interrupted"},
        {"imported": {"tool": "vllm"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_kinds_of_runs_come_back_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    stages = queue_sweep(np.random.default_rng(1), [2.0], 40.0, service_rps=10.0)
    assert (
        difference(summarise(make_run(tmp_path / "run", stages, ["ttft_p50=2s"], **changes))) == []
    )


@pytest.mark.parametrize("name", sample_summary.ALL)
def test_the_hand_made_summaries_fit(name: str) -> None:
    assert difference(sample_summary.ALL[name]()) == []


def test_an_unknown_field_and_a_wrong_type_name_their_path(sweep: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"`c_maxx`.*\$\.capacity"):
        read_summary({**sweep, "capacity": {**sweep["capacity"], "c_maxx": 1}})
    with pytest.raises(ContractError, match=r"\$\.knee\.rps"):
        read_summary({**sweep, "knee": {**sweep["knee"], "rps": "fast"}})


def test_the_document_lists_the_fields_of_the_structs() -> None:
    listed = DOCUMENT.read_text(encoding="utf-8").partition("## Fields\n\n")[2]
    assert listed.strip() == describe_fields().strip(), "docs/summary.md is stale"
