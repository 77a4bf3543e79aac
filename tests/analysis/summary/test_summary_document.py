"""The summary and docs/summary.md: every name of the one is in the other."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.summary import read_summary, to_json
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.warnings import RULES
from ampacity.loadgen.rundir.records import KINDS
from tests.support import synthetic
from tests.support.contract import summarise

CODES = set(RULES)


def test_the_document_of_warnings_names_every_code_in_the_order_of_the_report() -> None:
    text = Path(__file__).parents[3].joinpath("docs/warnings.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(RULES)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stages = synthetic.queue_sweep(
        np.random.default_rng(1), [25, 50, 100, 150, 220, 300], 20.0, service_rps=200
    )
    path = tmp_path_factory.mktemp("runs") / "sweep"
    return summarise(synthetic.make_run(path, stages, synthetic.SLOS, fleet_inputs=synthetic.FLEET))


def jsonc_block(number: int) -> str:
    text = Path(__file__).parents[3].joinpath("docs/summary.md").read_text(encoding="utf-8")
    return text.split("```jsonc\n")[number].split("```")[0]


def contract() -> dict[str, Any]:
    """The example in docs/summary.md as a dict; {…} and PERCENTILES become {} (their names are
    checked apart)."""
    block = jsonc_block(1)
    block = re.sub(r"//.*", "", block)
    block = re.sub(r'\{ … [^{}]*"realised"', '{"realised"', block)
    block = re.sub(r"\{[^{}]*…[^{}]*\}|\{\.\.\.\}|\[\.\.\.\]|LENGTHS|PERCENTILES", "{}", block)
    block = re.sub(r"\":(?=\s*[,}])", '": null', block)
    found: dict[str, Any] = json.loads(block)
    return found


def walk(expected: Any, actual: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        for name, value in expected.items():
            if name.endswith("reason") and value is None and name not in actual:
                continue  # reasons that are null may be left out
            assert name in actual, f"{where}.{name}"
            walk(value, actual[name], f"{where}.{name}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict) and actual:
        for i, item in enumerate(actual):
            walk(expected[0], item, f"{where}[{i}]")


def test_every_name_of_the_contract_is_there(sweep: dict[str, Any]) -> None:
    expected = contract()
    assert set(expected) >= set(
        "verdict stages knee capacity littles_law goodput fleet audit".split()
    )
    assert "littles_law" in expected["stages"][0]
    expected["workload"]["realised"]["token_source"] = {}
    expected["error_examples"] = {}  # no request failed
    expected["warnings"], expected["stages"][0]["curves"] = (
        [],
        {"ttft_s": {}, "itl_s": {}, "e2e_s": {}},
    )
    walk(expected, synthetic.strict(sweep), "summary")
    assert set(sweep["errors"]) == set(KINDS) - {"ok"}
    percentiles = {"p50", "p90", "p95", "p99", "p99_ci", "mean", "n", "infinite"}
    lengths = {"n", "mean", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max"}
    for stage in sweep["stages"]:
        assert set(stage["errors"]) == set(KINDS) - {"ok"}
        for (
            metric
        ) in "ttft ttft_from_schedule first_answer itl icl tpot e2e e2e_from_schedule".split():
            assert set(stage[f"{metric}_s"]) >= percentiles
        for curve in stage["curves"].values():
            assert len(curve["q"]) == len(curve["value"]) > 0
            assert curve["value"] == sorted(curve["value"])
    realised = sweep["workload"]["realised"]
    for side in (realised["input_tokens"]["planned"], realised["output_tokens"]["received"]):
        assert set(side) == lengths
    assert all(set(w) == {"code", "text"} and w["code"] in CODES for w in sweep["warnings"])


def undocumented(actual: Any, documented: Any, where: str, text: str) -> list[str]:
    """Paths of ``actual`` that the document lacks. A figure's percentiles are in the second block,
    by name."""
    if isinstance(actual, list):
        inner = documented[0] if isinstance(documented, list) and documented else documented
        return [p for item in actual for p in undocumented(item, inner, f"{where}[]", text)]
    if not isinstance(actual, dict):
        return []
    if where.endswith((".errors", ".workload.trace", ".token_source")):
        return []  # keys of data
    if {"p50", "p99", "mean"} <= actual.keys():
        names = {re.sub(r"^(p50|p90|p95|p99\.9|min|max)(?=_)", "p99", name) for name in actual}
        return [f"{where}.{name}" for name in names if f'"{name}":' not in text]
    found = []
    for name, value in actual.items():
        known = isinstance(documented, dict) and name in documented
        if not known and not (
            where == "summary.workload" and name != "realised"
        ):  # those are run.json's
            found.append(f"{where}.{name}")
        inner = documented.get(name) if isinstance(documented, dict) else None
        found += undocumented(value, inner, f"{where}.{name}", text)
    return found


def test_every_key_of_a_real_summary_is_in_the_document(
    sweep: dict[str, Any], tmp_path: Path
) -> None:
    cut = [
        synthetic.request(
            i, i * 0.02, ttft_s=None, status="unfinished", ended_ns=synthetic.ORIGIN_NS + 20 * 10**9
        )
        for i in range(400)
    ]
    failed = [synthetic.request(i, i * 0.02, ttft_s=None, status="timeout") for i in range(400)]
    grouped = synthetic.fixed(400, 0.02, output_tokens=50)
    runs = [
        sweep,
        summarise(synthetic.make_run(tmp_path / "empty", [])),
        *(
            summarise(synthetic.make_run(tmp_path / name, [synthetic.Stage(records, 8.0)], slos))
            for name, records, slos in (
                ("cut", cut, synthetic.SLOS),
                ("failed", failed, synthetic.SLOS),
                ("grouped", grouped, synthetic.SLOS),
                ("none", failed, []),
            )
        ),
    ]
    documented = contract()
    lengths = dict.fromkeys(["n", "mean", "p1", "p50", "p99", "max"], 0)
    assert "LENGTHS = {" in jsonc_block(1)
    documented["workload"]["realised"] |= {
        "input_tokens": {"planned": lengths, "sent": lengths},
        "output_tokens": {"planned": lengths, "received": lengths},
    }
    documented["warnings"] = [{"code": "", "text": ""}]
    line = next(line for line in jsonc_block(1).splitlines() if '"curves":' in line)
    documented["stages"][0]["curves"] = {
        n: {"q": [], "value": []} for n in re.findall(r'"(\w+_s)":', line)
    }
    text = jsonc_block(1) + jsonc_block(2)
    for summary in runs:
        assert (
            undocumented(
                to_json(read_summary(synthetic.strict(summary))), documented, "summary", text
            )
            == []
        )


@pytest.mark.parametrize(
    "reason",
    [
        "needs 299 requests, has 40",
        "infinite: 10 of 500 requests failed",
        "between 0.74 s and infinite: 10 of 500 requests were cut off, or gave no token",
    ],
)
def test_the_reasons_in_the_document_read_as_the_code_writes_them(reason: str) -> None:
    text = " ".join(
        Path(__file__).parents[3].joinpath("docs/summary.md").read_text(encoding="utf-8").split()
    )
    assert f"`{reason}`" in text
    # 490 quick answers, and ten that were cut off: the 495th of 500 is the fifth of these, at
    # 0.74 s
    quick = [synthetic.request(i, 0.01 * i, ttft_s=0.5) for i in range(490)]
    cut = [
        synthetic.request(
            900 + i,
            50.0,
            ttft_s=None,
            status="unfinished",
            ended_ns=synthetic.ORIGIN_NS + 50_700_000_000 + i * 10_000_000,
        )
        for i in range(10)
    ]
    failed = [synthetic.request(900 + i, 50.0, ttft_s=None, status="timeout") for i in range(10)]
    cohorts = {"needs": quick[:40], "infinite:": [*quick, *failed], "between": [*quick, *cut]}
    figures = percentiles(synthetic.cohort(*cohorts[reason.split()[0]]).ttft(from_schedule=True))
    assert figures.p99_reason == reason


def test_null_figures_have_their_reason(sweep: dict[str, Any]) -> None:
    for stage in sweep["stages"]:
        for metric in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
            figures = stage[metric]
            for name in ("p50", "p90", "p95", "p99"):
                assert (
                    figures[name] is not None
                    or figures.get(f"{name}_reason")
                    or figures.get("reason")
                )
