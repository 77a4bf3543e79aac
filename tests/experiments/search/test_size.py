"""``ampacity size``: thirteen steps from a run, against the engine that the run came from."""

import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ampacity.analysis.decision.candidates import Decision
from ampacity.analysis.decision.guardrails import guardrails, operating_rate
from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.known import Known, Physics
from ampacity.analysis.decision.model import plain_model
from ampacity.analysis.decision.plan import Plan
from ampacity.analysis.decision.roofline import Instance, Point, use_of
from ampacity.analysis.decision.steps import thirteen_steps
from ampacity.analysis.decision.tiers import TierPlan
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.analysis.summary import summarise
from ampacity.cli import main
from ampacity.experiments.sizing import read_judged
from ampacity.loadgen.rundir.files import load_run
from ampacity.reports.pages.findings import usable_rate
from ampacity.reports.pages.plan import rate_text
from ampacity.reports.pages.size import _rails
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.catalog import HARDWARE, LLAMA3_8B
from ampacity.simulator.models.hardware import find_config
from benchmarks.servers.truth import simulate
from tests.analysis.decision.test_model import LLAMA3_8B as CONFIG
from tests.analysis.limits.test_limits import predicted
from tests.support.contract import describe_fields

TITLES = [
    *("Workload", "Hardware", "Routing", "Memory", "Quantisation", "Parallelism", "Benchmark"),
    *("KV strategy", "Batching", "Benchmark again", "Fleet", "TCO", "Validation"),
]


@dataclass
class Moved:
    """A step time that keeps the bytes and the seconds of each step."""

    inner: Roofline
    moved: list[float] = field(default_factory=list)
    lasted: list[float] = field(default_factory=list)

    def seconds(
        self, sequences: int, tokens: int, kv_tokens: int, attended_pairs: float, prompts: int
    ) -> float:
        self.moved.append(self.inner.weight_bytes + self.inner.kv_bytes_per_token * kv_tokens)
        self.lasted.append(
            self.inner.seconds(sequences, tokens, kv_tokens, attended_pairs, prompts)
        )
        return self.lasted[-1]


@pytest.mark.parametrize(
    ("inputs", "outputs", "rate_rps"),
    [(100, 400, 12.0), (500, 200, 16.0), (2000, 500, 4.0)],
    ids=["short", "middle", "long"],
)
def test_mbu_is_the_share_of_the_bandwidth_that_the_engine_used(
    inputs: int, outputs: int, rate_rps: float
) -> None:
    """The engine counts the bytes of every step; MBU comes from rate and TPOT alone: within 5 %."""
    config = find_config("llama3-8b-h100")
    assert isinstance(config.step_time, Roofline)
    counted = Moved(config.step_time)
    arrivals = np.cumsum(np.random.default_rng(5).exponential(1 / rate_rps, 3000))
    n = len(arrivals)
    outcome = simulate(
        replace(config, step_time=counted),
        arrivals,
        np.full(n, inputs),
        np.full(n, outputs),
    )
    busy_s = sum(counted.lasted)
    known = sum(counted.moved) / busy_s / HARDWARE["h100"].bandwidth_bytes_s
    tokens_per_s = float(outcome.output_tokens.sum()) / busy_s
    card = HARDWARE["h100"]
    shape = plain_model(LLAMA3_8B.parameters, 32, 8, 128, heads=32)
    point = Point(Range(tokens_per_s), float(np.nanmean(outcome.tpot_s)), inputs, outputs)
    assert use_of(Instance(shape, card), point).mbu.value == pytest.approx(known, rel=0.05)


@pytest.fixture(autouse=True, scope="module")
def judged_once() -> Iterator[None]:
    """Read and judge each run once, a second, for all the commands that size it."""
    kept = functools.cache(lambda path, slos, written_ns: read_judged(path, slos))

    def judged(path: Path, slos: Sequence[Slo]) -> Any:
        meta = path / "run.json"
        return kept(path.resolve(), tuple(slos), meta.stat().st_mtime_ns if meta.exists() else 0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ampacity.experiments.decide.read_judged", judged)
        yield


LOAD = {"input_tokens": 500, "output_tokens": 100, "slo": ["ttft_p95=300ms"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("size") / "run"
    predicted("llama3-8b-h100", LOAD | {"rates": "1,16,24,32,40,48"}, folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any
) -> tuple[object, str, str]:
    full = [] if "--json" in arguments else ["--summary", "full"]
    monkeypatch.setattr(sys, "argv", ["ampacity", "size", *map(str, arguments), *full])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_all_thirteen_steps_on_two_screens_in_three_seconds(
    run: Path,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With all that can be stated, long commands counted as the rows that they take."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(run.parent)
    prices = tmp_path / "prices.csv"
    prices.write_text("model,input,cached,output\nsmall,0.5,0.05,2\nlarge,3,0.3,15\n")
    known = ["--model-config", config, "--gpu", "h100", "--peak-rps", 120, "--gpu-hour", 2.5]
    known += ["--prices", prices, "--accepted", 0.9, "--utilisation", 0.4]
    known += ["--draft-tokens", 4, "--cold-start", "47s"]
    began_s = time.monotonic()
    code, out, _ = size(monkeypatch, capsys, run.name, *known)
    assert code == 0
    assert time.monotonic() - began_s < 20  # below 3 s on a quiet machine
    lines = out.splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= 48, out
    assert lines[1].startswith("5 instances (5 to 6), 5 GPUs for 120 requests/s; $109,500 a year")
    for number, title in enumerate(TITLES, 1):
        assert any(line.startswith(f"{number:2} {title}") for line in lines), title
    assert "not known" not in out
    text = " ".join(out.split())
    assert "of the bandwidth bound used" in text
    assert "the server reported no acceptance of drafted tokens" in text
    assert "of 295 FLOP/byte" in text
    assert "start an instance 47.0 s ahead" in text
    assert "if this were 20 % lower / higher instances USD a year USD for 1,000" in text


def test_the_model_and_gpu_of_a_prediction_need_not_be_stated(
    run: Path, config: Path, tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with the config.json, up to its input embedding; the report says the same."""
    found = []
    for given in ([], ["--model-config", "llama3-8b"], ["--model-config", config, "--gpu", "H100"]):
        assert ampacity("size", run, *given, "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["candidates"][0])
    assert found[0]["hardware"] == found[1]["hardware"]
    shares = [one["hardware"]["mbu"]["value"] for one in found]
    assert shares[0] == pytest.approx(shares[2], rel=0.1)
    assert ampacity("report", run) == 0
    expected = f"Distance to the hardware: {found[0]['hardware_text']}."
    assert expected in (run / "report.html").read_text(encoding="utf-8")
    three = summarise(
        predicted("llama3-8b-h100", {**LOAD, "rates": "1", "tp": 3}, tmp_path / "three")
    )
    assert three.fleet.tensor_parallel == 3
    assert ampacity("report", tmp_path / "three") == 0
    page = (tmp_path / "three" / "report.html").read_text(encoding="utf-8")
    assert "--tp 3 does not divide the 32 attention heads" in page
    assert ampacity("report", run, "--gpu", "b200") == 0  # 8 TB/s for 3.35
    told = (run / "report.html").read_text(encoding="utf-8")
    assert f" {100 * shares[0] * 3.35 / 8:.0f} % " in told.partition("Distance to the hardware")[2]


def test_a_fleet_that_cannot_be_sized_ends_as_plan_does(
    tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every load violates 1 ms: no capacity, no fleet. Without a peak none was asked for."""
    load = {"input_tokens": 10, "output_tokens": 20, "slo": ["ttft_p95=1ms"], "rates": "0.5,2"}
    predicted("linear:0.01,0.001", load, tmp_path / "run")
    assert ampacity("plan", tmp_path / "run", "--peak-rps", 9) == 2
    why = capsys.readouterr().err.removeprefix("ampacity: no fleet can be sized from this run: ")
    assert ampacity("size", tmp_path / "run", "--peak-rps", 9, "--summary", "full") == 2
    assert f"no fleet: {why.strip()}" in " ".join(capsys.readouterr().out.split())
    assert ampacity("size", tmp_path / "run") == 0


@pytest.mark.parametrize("columns", [80, 120])
def test_the_first_screen_is_the_answer_in_24_lines(
    run: Path,
    config: Path,
    columns: int,
    ampacity: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    known = ["--model-config", config, "--gpu", "h100", "--peak-rps", 120, "--gpu-hour", 2.5]
    assert ampacity("size", run, run, *map(str, known)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FLEET     5 instances (5 to 6), 5 GPUs for 120 requests/s")
    assert sum(max(1, -(-len(line) // columns)) for line in lines) <= 23, lines


def test_several_engines_behind_one_endpoint(
    tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two engines of one GPU each, by ``predict``; a run of two that were not stated warns."""
    load = ["--input-tokens", "10", "--output-tokens", "20", "--slo", "ttft_p95=1s", "--rates", "2"]
    engine = "llama3-8b-h100,replicas=2"
    given = ["--preset", engine, *load, "--duration", "20s", "-o", tmp_path / "two", "-q"]
    assert ampacity("predict", *given) == 0
    predicted(engine, {"input_tokens": 10, "output_tokens": 20, "rates": "2"}, tmp_path / "one")
    for name, gpus, warned in (("two", 2, False), ("one", 1, True)):
        capsys.readouterr()
        slo = ("--slo", "ttft_p95=1s")
        assert ampacity("size", tmp_path / name, "--peak-rps", 1, *slo, "--json") == 0
        found = json.loads(capsys.readouterr().out)["candidates"][0]
        assert found["plan"]["tensor_parallel"] == gpus
        codes = [warning["code"] for warning in found["plan"]["warnings"]]
        assert ("several_engines" in codes) == warned
        assert found["hardware"] is None
        assert "2 engines share the load" in found["hardware_text"]


def test_pools_by_the_rates_of_the_two_phases(
    linear: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 ms a prompt: at most 50/s. At 20/s that is 40 % of the time: 20 / 0.6 = 33/s decoded.

    A peak of 100/s, safety 1: 2 and 3 instances; the mean TTFT also has some waiting in it."""
    assert ampacity("plan", linear, "--peak-rps", 100, "--safety", 1, "--json") == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert pools["prefill_rps"] == pytest.approx(50, rel=0.08)
    assert pools["decode_rps"] == pytest.approx(100 / 3, rel=0.08)
    assert pools["prefill_instances"] == math.ceil(100 / pools["prefill_rps"])
    assert pools["decode_instances"] == math.ceil(100 / pools["decode_rps"])
    assert ampacity("plan", linear, "--peak-rps", 100, "--safety", 1, "--summary", "full") == 0
    text = f"P:D {pools['prefill_instances']}:{pools['decode_instances']} (an instance computes"
    assert text in capsys.readouterr().out


def test_of_a_wide_estimate_what_is_verified_comes_first(run: Path) -> None:
    summary = summarise(load_run(run))
    held = msgspec.structs.replace(
        summary.capacity,
        crossing="pooled",
        capacity_rps=12.6,
        capacity_rps_ci=(5.0, 15.0),
        verified_rps=6.0,
    )
    found = usable_rate(msgspec.structs.replace(summary, capacity=held))
    assert found.value == "6.00 req/s verified"
    assert found.interval == "an estimated 12.6 req/s, 95 % interval 5.00 to 15.0 req/s"
    assert "verified" not in found.note
    text = "6.00 req/s verified, an estimated 12.6 req/s (5.00 to 15.0),"
    assert rate_text(12.6, (5.0, 15.0), 6.0) == text
    assert rate_text(5.0, (5.0, None), 5.0) == "at least 5.00 req/s"
    assert rate_text(12.6, (11.0, 14.0), 6.0) == "12.6 req/s (11.0 to 14.0)"


def test_the_figures_are_those_of_the_formulas(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cost: 120/s of 100 tokens are 43.2 M tokens an hour, paid for by the fleet's GPUs."""
    known = ["--model-config", config, "--gpu", "h100", "--peak-rps", 120, "--gpu-hour", 2.5]
    _, out, _ = size(monkeypatch, capsys, run, *known, "--json")
    (found,) = json.loads(out)["candidates"]
    plan = found["plan"]
    before = math.ceil(120 / found["capacity_rps"])
    assert (plan["instances_before_safety"], plan["instances"]) == (before, math.ceil(1.5 * before))
    assert plan["cost_per_hour"] == plan["gpus"] * 2.5
    per_million = plan["gpus"] * 2.5 / (120 * 3600 * 100) * 1e6
    assert plan["fleet_cost_per_million_output_tokens"] == pytest.approx(per_million)
    # P95 of a Poisson number in flight; all sequences are 500 + 100 tokens of 131,072 B
    c_max = summarise(load_run(run)).capacity.c_max or 0
    in_flight = c_max + 1.645 * math.sqrt(c_max)
    assert found["memory"]["needed"]["kv"] == pytest.approx(in_flight * 600 * 131_072)
    assert len(set(found["memory"]["sequences"].values())) == 1
    assert found["memory"]["sequences"].keys() == {"p50", "p95", "p99"}
    assert found["memory"]["needed"]["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert [step["title"] for step in found["steps"]][3] == "Memory"
    rates = [at["rps"] for at in found["hardware_curve"]]
    assert rates == sorted(rates)
    assert found["hardware"]["mbu"] in [at["mbu"] for at in found["hardware_curve"]]
    _, out, _ = size(monkeypatch, capsys, run, *known, "--lora-slots", "4x100", "--json")
    held = json.loads(out)["candidates"][0]["memory"]  # four of 100 MB, out of the KV pool
    assert (held["needed"]["adapters"], found["memory"]["needed"]["adapters"]) == (400e6, 0)
    assert found["memory"]["pool_bytes"] - held["pool_bytes"] == pytest.approx(400e6)
    kinds = {i["basis"] for step in found["steps"] for i in step.get("known", [])}
    assert kinds == {"predicted", "stated", "assumed"}


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of which no model is known; a prompt takes 20 ms, nothing violates the SLO."""
    folder = tmp_path_factory.mktemp("linear") / "run"
    load = {"input_tokens": 10, "output_tokens": 20, "slo": ["ttft_p95=1s"], "rates": "0.5,10,20"}
    predicted("linear:0.005,0.0001,0.02", load, folder)
    return folder


def test_what_is_missing_is_named_and_no_number_is_invented(
    linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = size(monkeypatch, capsys, linear)
    assert code == 0
    assert "4 Memory          not known: no model is given (--model-config)" in out
    assert "   → add --model-config FILE" in out
    assert "11 Fleet           not known: no peak rate given (--peak-rps)" in out
    assert "12 TCO             not known: no price of a GPU" in out
    assert "$" not in out


def test_candidates_are_ranked_at_one_slo_and_the_broken_one_is_left_out(
    run: Path, tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run twice cannot be told apart; an engine with half the batch is dearer.

    All are judged at the limit that is stated, though each run had its own."""
    small = tmp_path / "small"
    load = {"input_tokens": 500, "output_tokens": 100, "slo": ["ttft_p95=1s"]}
    predicted("llama3-8b-l4", load | {"rates": "0.5,1,2,3,4"}, small)
    page = tmp_path / "size.html"
    runs = (small, run, tmp_path / "none", run)
    known = ("--peak-rps", 120, "--gpu-hour", 2.5, "--slo", "ttft_p95=500ms")
    assert ampacity("size", *runs, *map(str, known), "--json", "--html", page) == 0
    plain = json.loads(capsys.readouterr().out)
    found = msgspec.convert(plain, Decision)  # every field is as docs/decision-json.md lists it
    assert [one.run for one in found.candidates] == [str(run), str(run), str(small)]
    assert {tuple(one.slos) for one in found.candidates} == {("ttft_p95=500ms",)}
    assert found.apart == [
        f"{run} and {run} are not to be told apart: their intervals meet",
        f"{run} is cheaper than {small}: the intervals do not meet",
    ]
    (left,) = found.left_out
    assert left.reason == f"{tmp_path / 'none'} is no run directory: it is missing"
    text = page.read_text(encoding="utf-8")
    assert text.count("<strong>Validation</strong>") == 3
    assert "What moves the answer most" in text
    assert "http://" not in text
    assert "https://" not in text
    assert (
        ampacity("size", small, run, *map(str, known), "--summary", "full") == 0
    )  # the cheapest is read first
    out = " ".join(capsys.readouterr().out.split())
    heads = (f"{run}: predicted,", f"{small}: predicted,", f"Steps of {run}:")
    order = [out.index(text) for text in heads]
    assert order == sorted(order)


def test_bursts_within_a_minute_lower_the_rate_to_run_at(run: Path) -> None:
    """By as much as Poisson arrivals would have to be higher to crowd so; not where they did."""
    summary = summarise(load_run(run))
    rate, why = operating_rate(summary)
    assert operating_rate(summary, 1.25) == (
        rate / 1.25,
        f"{why}, over 1.25 for bursts within a minute",
    )
    bursty = {**summary.workload, "arrivals": "gamma:cv=2"}
    assert operating_rate(msgspec.structs.replace(summary, workload=bursty), 1.25) == (rate, why)


def test_guardrails_have_no_empty_range_and_no_breaker_of_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = size(monkeypatch, capsys, run, "--wait-budget", "1ms", "--json")
    rails = msgspec.convert(json.loads(out), Decision).candidates[0].guardrails
    assert (rails.queue_depth, rails.breaker) == (None, None)
    assert "the wait budget of 1 ms is too short" in rails.missing["queue_depth"]
    rails = msgspec.structs.replace(rails, max_input_tokens=(7413, 7413), max_output_tokens=None)
    shown = _rails(msgspec.structs.replace(rails, queue_depth=1))
    assert any(text.startswith("prompt at most 7,413 tokens (") for text in shown)
    assert any(text.startswith("queue at most 1 waiting (") for text in shown)


def test_step_7_names_every_slo_that_may_limit(run: Path) -> None:
    """As the screen and the plan do: which of the two breaks first cannot be told."""
    summary = summarise(load_run(run))
    slos = ["ttft_p95=300ms", "itl_p99=50ms"]
    held = msgspec.structs.replace(
        summary.capacity, binding_slo=slos[0], binding_or=slos[1:], crossing="pooled"
    )
    summary = msgspec.structs.replace(summary, capacity=held)
    known = Known(summary, "run", guardrails(summary))
    expected = "bound by ttft_p95=300ms or itl_p99=50ms"
    assert expected in str(thirteen_steps(known, Physics())[6].decision)
    assert "bound by ttft_p95=300ms or itl_p99=50ms" in usable_rate(summary).note


def test_without_a_stated_slo_the_first_run_has_it(
    run: Path, tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {"input_tokens": 10, "output_tokens": 20, "slo": ["ttft_p95=1s"], "rates": "2,5"}
    predicted("linear:0.01,0.001", load | {"peak_rps": 20}, tmp_path / "run")
    assert ampacity("size", tmp_path / "run", run, "--json") == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), Decision)
    assert found.notes[0] == f"All are judged at ttft_p95=1s, that of {tmp_path / 'run'}."
    assert {one.plan.peak_rps for one in found.candidates if one.plan} == {20}


def test_plan_asks_another_slo_of_the_same_records(
    run: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A looser limit carries more; the figure is that of a report judged by it."""
    capacities = []
    for text in ("ttft_p95=300ms", "ttft_p95=600ms"):
        given = ("--peak-rps", "120", "--slo", text, "--json")
        assert ampacity("plan", run, *given) == 0
        capacities.append(json.loads(capsys.readouterr().out)["capacity_rps"])
        loaded = load_run(run)
        meta = {**loaded.meta, "slos": [slo.as_dict() for slo in parse_slos([text])]}
        summary = summarise(replace(loaded, meta=meta))
        assert capacities[-1] == summary.capacity.capacity_rps
    assert capacities[0] < capacities[1]
    assert ampacity("plan", run, "--peak-rps", "120", "--slo", "ttft_p95") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_capacity_in_the_knee_region_is_named(
    tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 sequences at a time queue from 8/s on; an SLO of 60 s is met far beyond."""
    load = {"input_tokens": 300, "output_tokens": 200, "slo": ["ttft_p95=60s"]}
    engine = "llama3-8b-h100,max_num_seqs=32"
    rates = "1,4,6,8,10,12,14,16,18"
    predicted(engine, load | {"rates": rates}, tmp_path / "run", requests=2000)
    named = "The capacity of 16 req/s lies above the knee region of 8 to 14 req/s"
    assert ampacity("plan", tmp_path / "run", "--peak-rps", "20", "--summary", "full") == 0
    assert f"Warning: {named}" in capsys.readouterr().out
    assert ampacity("size", tmp_path / "run", "--peak-rps", "20") == 0  # as a note
    assert named in " ".join(capsys.readouterr().out.split())
    assert ampacity("report", tmp_path / "run") == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "it lies above the knee region of 8 to 14 req/s" in page.partition("</h1>")[0]
    assert named in page


def test_the_page_lists_the_fields_of_plan_and_size() -> None:
    page = (Path(__file__).parents[3] / "docs" / "decision-json.md").read_text(encoding="utf-8")
    listed = page.partition("## Fields\n\n")[2]
    assert listed.strip() == describe_fields(Plan, TierPlan, Decision).strip(), "it is stale"


def test_a_load_that_was_not_reached_is_a_lower_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing violates the SLO up to 5/s: at least 5/s, and at most ceil(20 / 5) x 1.5 instances."""
    load = {"input_tokens": 10, "output_tokens": 20, "slo": ["ttft_p95=1s"], "rates": "2,5"}
    predicted("linear:0.01,0.001", load, tmp_path / "run")
    prices = tmp_path / "prices.csv"
    prices.write_text("model,input,output\nfree,0,0\n")
    known = ["--peak-rps", 20, "--gpu-hour", 2.5, "--prices", prices]
    _, out, _ = size(monkeypatch, capsys, tmp_path / "run", *known)
    text = " ".join(out.split())
    assert "one instance is predicted to carry at least 5.00 req/s at ttft_p95=1s" in text
    assert "one instance is predicted to carry at least 5 req/s" in text
    assert "no load that was tried violates an SLO: run higher --rates" in text
    assert text.split(": predicted, nothing was measured ")[1].startswith("at most 6 instances, 6")
    assert "at most 4 for the peak x 1.5 = 6 instances, 6 GPUs" in text
    assert "rate at most 5.00 req/s (the highest load that met every SLO)" in text
    assert "dearer than free at any load" in text


def test_a_profile_sizes_the_fleet_as_plan_does_and_not_the_peak_of_the_run(
    tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was given a peak of 100/s; the profile's busiest hour of 12/s is what counts."""
    load = {"input_tokens": 10, "output_tokens": 20, "slo": ["ttft_p95=1s"], "rates": "2,5"}
    predicted("linear:0.01,0.001", load | {"peak_rps": 100}, tmp_path / "run")
    profile = tmp_path / "profile.yaml"
    busy = "busy_hour: {rps: 12.0, rps_ci: [11.0, 13.0], window_s: 3600}"
    profile.write_text(
        "measured: {requests: 100000, arrivals: {mean_rps: 10.0, rps_p99: 20.0, span_s: 864000, "
        f"dispersion: {{60s: 2.0}}, p99_rps: {{60s: 13.0}}, {busy}}}}}\n"
    )
    assert ampacity("plan", tmp_path / "run", "--profile", profile, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert ampacity("size", tmp_path / "run", "--profile", profile, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["candidates"]
    assert found["plan"] == plan
    assert msgspec.convert(plan, Plan).instances == plan["instances"]
    assert (plan["peak_rps"], plan["mean_rps"], plan["utilisation_at"]) == (
        *(12.0, 10.0),
        "mean of the profile / what the fleet carries",
    )


def test_speculation_and_pipelines(
    tmp_path: Path, ampacity: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """K = 4 at an acceptance of 0.8: 3.36 tokens a step, K = 8: (1 - 0.8^9) / 0.2 = 4.33.

    The server reports the share of the drafts, (3.36 - 1) / 4 = 0.59. 810 GB need more than eight H100: two
    machines, a pipeline of two batches idles (2 - 1) / (2 + 2 - 1) = 33 %."""
    load = {"input_tokens": 100, "output_tokens": 100, "slo": ["tpot_p95=50ms"], "rates": "1,4"}
    predicted("llama3-8b-h100,speculation=4:0.8", load, tmp_path / "run", requests=2000)
    known = ["--params", "405e9", "--layers", "126", "--kv-heads", "8", "--head-dim", "128"]
    known += ["--heads", "128", "--gpu", "h100", "--draft-tokens", "4"]
    assert ampacity("size", tmp_path / "run", *known, "--summary", "full") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "speculation gives 3.36 tokens a step, 8 drafted tokens would give 4.3" in text
    assert "2 machines in a pipeline of 2 batches idle 33 %" in text


def test_conditions_for_disaggregation(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """500 tokens of 131,072 B over 25 Gbit/s take 21 ms, 7 % of the limit of 300 ms."""
    known = ["--model-config", config, "--gpu", "h100", "--peak-rps", 120, "--link", 25]
    _, out, _ = size(monkeypatch, capsys, run, *known, "--json")
    (found,) = json.loads(out)["candidates"]
    held = {c["name"]: (c["holds"], c["evidence"]) for c in found["disaggregation"]}
    assert len(held) == 6
    assert held["prompts are long"][0] is False
    assert held["TTFT and token latency both have an SLO"][0] is False
    assert held["the link moves a KV cache in time"] == (
        True,
        "21 ms for 500 tokens, 7 % of the TTFT limit",
    )
    assert held["few prompt tokens are cached"][0] is None


FOUR = ["--params", "8e9", "--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--layers", 1], "must be given too", id="five-numbers"),
        pytest.param(
            ["--model-config", "Llama-3-8B"],
            "give the path of the model's config.json (or its folder)",
            id="no-config",
        ),
        pytest.param(["--prices", "nowhere.csv"], "cannot be read", id="no-prices"),
        pytest.param(["--gpu", "h900"], "--gpu h900: none of a100-40", id="gpu-alone"),
        pytest.param(["--kv", "fp3"], "precision 'fp3' (--weights, --kv)", id="precision"),
        pytest.param(
            [*FOUR, "--heads", "30"], "--heads 30 is no multiple of --kv-heads 8", id="heads"
        ),
        pytest.param([*FOUR, "--heads", "-8"], "--heads is -8: it must be above", id="no-heads"),
        pytest.param(["--cold-start", "soon"], "--cold-start", id="duration"),
        pytest.param(["--slo", "ttft_max=1s"], "give a percentile, as ttft_p99=1s", id="max"),
        pytest.param(["--link", "-1"], "--link", id="link"),
        pytest.param(["--lora-slots", "4"], "write SLOTSxMB", id="adapters"),
        pytest.param(
            [*FOUR, "--heads", "32", "--gpu", "H100", "--tp", "3"],
            "--tp 3 does not divide the 32 attention heads of given: valid are 1, 2, 4, 8, 16, 32",
            id="degree",
        ),
        pytest.param(
            ["--model-config", "x", "--params", "1"], "drop --params, --layers", id="both"
        ),
        pytest.param(["--peak-rps", "-3"], "--peak-rps", id="peak"),
    ],
)
def test_input_that_cannot_be_used_is_refused_in_one_line(
    run: Path,
    arguments: list[Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = size(monkeypatch, capsys, run, *arguments)
    assert code == 2
    assert err.startswith("ampacity: ")
    assert message in err
    assert err.count("\n") == 1
