"""The pages in a real browser: alone, quiet, legible, and right when their controls are moved."""

import json
import random
import shlex
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ampacity.analysis.capacity.fleet_figures import FleetInputs, fleet_figures
from ampacity.analysis.change.results import Check, GateResult
from ampacity.analysis.compare.scorecard import compare
from ampacity.analysis.contract.capacity import ClassCapacity
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.other_limits import AtLimit, capacity_at_limits
from ampacity.analysis.summary import summarise
from ampacity.analysis.timeline import timeline_of
from ampacity.loadgen.rundir.files import Run
from ampacity.reports.change.compare import write_comparison_page
from ampacity.reports.change.gate_page import write_gate_page
from ampacity.reports.pages.run_report import Beyond, write_report
from tests.support.compared_runs import arm, stage, ttfts
from tests.support.contract import blank
from tests.support.pages import CLIPPED, OVERLAPPING, PAPER, opened, until
from tests.support.sample_summary import all_failed, meta, open_sweep
from tests.support.synthetic import make_run, queue_sweep

Measured = tuple[Run, Summary, list[AtLimit]]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A run whose capacity and other limits the analysis finds from its records."""
    folder = tmp_path_factory.mktemp("measured")
    stages = queue_sweep(np.random.default_rng(3), [10, 25, 35, 45, 60], 40.0, service_rps=50.0)
    inputs = {"peak_rps": 300.0, "tensor_parallel": 2, "gpu_hour_usd": 2.5, "safety_factor": 1.1}
    run = make_run(folder / "run", stages, ["ttft_p95=200ms"], fleet_inputs=inputs)
    summary = summarise(run)
    return run, summary, capacity_at_limits(run, summary)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, measured: Measured) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run, summary, limits = measured
    failed = all_failed()
    written = {"run": folder / "run.html", "failed": folder / "failed.html"}
    write_report(written["run"], summary, run.meta, Beyond(timeline_of(run), limits, str(run.path)))
    write_report(written["failed"], read_summary(failed), meta(failed))
    arms = [
        arm(folder / n, stage(ttfts(k, 1000, 1 + k / 5)), ["ttft_p99=1s"], usd=2.0)
        for k, n in enumerate("abc")
    ]
    result = compare(arms)
    written["gate"] = folder / "gate.html"
    write_gate_page(written["gate"], regressed(), shlex.join(["ampacity", "gate", HOSTILE]))
    written["compare"] = folder / "compare.html"
    write_comparison_page(
        written["compare"], structs.replace(result, sentence=f"{result.sentence} {HOSTILE}")
    )
    return written


def regressed() -> GateResult:
    """A regression, a pass, a violated SLO, and markup in every text."""
    rows = (("ttft_p50", "regression", 0.2), ("ttft_p90", "pass", 0.0), ("e2e_p99", "pass", 0.01))
    checks = [
        Check(
            name, "change", "20/s", verdict, 0.1, 0.1 + c, c, (c - 0.02, c + 0.02), tolerance=0.05
        )
        for name, verdict, c in rows
    ]
    checks.append(Check("ttft_p50=1s", "slo", HOSTILE, "violated", candidate=2.0, reason=HOSTILE))
    sentence = f"Regression: ttft_p50 at 20/s +20 %. {HOSTILE}"
    untracked = {"itl_p99 at 20/s": HOSTILE}
    return GateResult(
        verdict="regression", sentence=sentence, notes=[HOSTILE], untracked=untracked, checks=checks
    )


def test_the_gate_s_page_has_what_its_result_has(browser: Any, pages: dict[str, Path]) -> None:
    result = regressed()
    with opened(browser, pages["gate"]) as page:
        assert page.locator("#verdict").text_content() == result.sentence
        held = page.evaluate("JSON.parse(document.getElementById('gate').textContent)")
        assert held == json.loads(json.dumps(result.as_dict()))
        cells = page.locator("#checks tbody tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in cells] == [
            ["ttft_p50 at 20/s", "regression"],
            [f"ttft_p50=1s at {HOSTILE}", "violated"],
            ["e2e_p99 at 20/s", "pass"],
            ["ttft_p90 at 20/s", "pass"],
        ]
        assert page.locator("#next-command").text_content().endswith(f"'{HOSTILE}'")
        assert page.locator("main script").count() == 0


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("run", 1300, "light"),
        ("run", 400, "dark"),
        ("failed", 400, "light"),
        ("compare", 1300, "dark"),
        ("compare", 400, "light"),
        ("gate", 1300, "light"),
        ("gate", 400, "dark"),
    ],
)
def test_a_page_is_quiet_alone_and_fits(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    with opened(browser, pages[name], width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(OVERLAPPING) == []
        assert page.locator("figure").count() >= (1 if name == "gate" else 4)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == PAPER[scheme]
        ink = page.locator(".live svg text").first.evaluate("e => getComputedStyle(e).fill")
        assert ink == {"light": "rgb(88, 97, 112)", "dark": "rgb(163, 173, 185)"}[scheme]
        linked = page.eval_on_selector_all(".toc a", "links => links.map(a => a.hash.slice(1))")
        assert linked == page.eval_on_selector_all("section", "all => all.map(s => s.id)")


# the numbers at each x axis of a view, from the upper panel to the lower
AXIS_LABELS = """(() => {
  const found = [];
  const walk = item => {
    if (item.role === "axis-label" && item.items.length && item.items[0].align === "center") {
      found.push(item.items.filter(t => t.opacity).map(t => Number(t.text)));
    }
    for (const inner of item.items || []) walk(inner);
  };
  walk(VIEW.scenegraph().root);
  return found.filter(numbers => numbers.length && !numbers.some(Number.isNaN));
})()"""


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("run", "dark"), ("failed", "light"), ("compare", "light"), ("gate", "light")],
)
def test_axe_finds_nothing_serious(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, pages[name], 1300, scheme) as page:
        found = axe.run(page).response["violations"]
        assert [
            f"{v['id']}: {v['nodes'][0]['target']}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ] == []


def test_the_report_answers_its_controls(
    browser: Any,
    pages: dict[str, Path],
    measured: Measured,
    ampacity: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, summary, limits = measured
    with opened(browser, pages["run"]) as page:
        assert page.locator("#verdict").text_content() == summary.verdict
        held = page.evaluate("JSON.parse(document.getElementById('summary').textContent)")
        assert read_summary(held) == summary
        check_sliders(page, summary, limits)
        found, command = page.evaluate("report.fleet()"), page.locator("#plan-command")
        outcome = page.locator("#what-if .outcome")
        assert "1 M output tokens if the peak lasts all day" in outcome.text_content()
        assert ampacity(*shlex.split(command.text_content())[1:], "--json") == 0
        planned = json.loads(capsys.readouterr().out)
        assert {name: planned[name] for name in found} == found
        check_timeline(page)
        check_curve(page)
        page.click("#rerun button")
        assert page.locator("#rerun button").text_content() == "Copied"
        selected = page.evaluate("getSelection().toString()")
        assert selected == page.locator("#command-line").text_content()


def check_sliders(page: Any, summary: Summary, limits: list[AtLimit]) -> None:
    """Twenty random settings give what the plan's own function gives."""
    draw = random.Random(7)
    sized = [at for at in limits if at.capacity_rps]
    assert len(sized) > 4
    for _ in range(20):
        at = draw.choice(sized)
        peak, safety = float(f"{10 ** draw.uniform(0, 4):.4g}"), round(draw.uniform(1, 2), 2)
        usd, busy = round(draw.uniform(0.1, 9), 2), draw.choice([None, draw.randint(1, 100)])
        typed = {"peak_rps": peak, "safety_factor": safety, "gpu_hour_usd": usd}
        for name, value in (typed | {"utilisation": busy}).items():
            page.fill(f"#{name}", "" if value is None else repr(value))
        page.fill("#limit", str(limits.index(at)))
        inputs = FleetInputs(
            **typed,
            capacity_rps=at.capacity_rps,
            tensor_parallel=2,
            utilisation=None if busy is None else busy / 100,
            output_tokens=summary.fleet.output_tokens_mean,
        )
        wanted, found = fleet_figures(inputs), page.evaluate("report.fleet()")
        for name in found.keys() - {"instances_ci", "capacity_rps"}:
            assert found[name] == getattr(wanted, name), (name, inputs)
        low, high = at.capacity_rps_ci or (None, None)
        ends = [
            rate and fleet_figures(structs.replace(inputs, capacity_rps=rate)).instances
            for rate in (high, low)
        ]
        assert found["instances_ci"] == ends
        outcome = page.locator(".outcome").text_content()
        assert f"GPUs{wanted.gpus:,}" in outcome
        spare = wanted.instances - ceil(peak / at.capacity_rps)
        assert (f", or {spare:,} instance" in outcome) == (spare > 0)
    page.fill("#gpu_hour_usd", "0")
    assert "A yearset a price" in page.locator(".outcome").text_content()
    for name, refused in (("gpu_hour_usd", "-5"), ("peak_rps", ""), ("safety_factor", "0.5")):
        kept = page.input_value(f"#{name}")
        page.fill(f"#{name}", refused)
        assert page.locator(".outcome").text_content().startswith("No fleetthe ")
        assert page.locator("#plan-command").is_hidden()  # no command with a number that is refused
        page.fill(f"#{name}", kept)
    assert page.locator("#plan-command").is_visible()
    page.fill("#gpu_hour_usd", "2.5")
    page.locator("[data-of=safety_factor]").focus()
    page.keyboard.press("Home")
    assert page.input_value("#safety_factor") == "1"


def check_timeline(page: Any) -> None:
    """Dragging over the first panel, and the sliders below, choose the span of all others."""
    view = "report.views.get('timeline').view"
    end_s = page.evaluate(f"{view}.signal('to_s')")
    page.locator("#chart-timeline").scroll_into_view_if_needed()
    box = page.locator("#chart-timeline .live").bounding_box()
    y = box["y"] + 40
    page.mouse.move(box["x"] + 0.4 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=4)
    page.mouse.up()
    until(page, f"{view}.signal('from_s') > 0")
    from_s, to_s = (page.evaluate(f"{view}.signal('{name}')") for name in ("from_s", "to_s"))
    assert 0.25 * end_s < from_s < 0.45 * end_s < 0.5 * end_s < to_s < 0.65 * end_s
    below = page.evaluate(AXIS_LABELS.replace("VIEW", view))[-1]  # of the last panel's time axis
    assert len(below) > 3
    assert from_s <= min(below) < max(below) <= to_s
    slider = page.locator("#chart-timeline input[type=range]").first
    slider.focus()
    page.keyboard.press("Home")
    until(page, f"{view}.signal('from_s') === 0")


def check_curve(page: Any) -> None:
    """Ctrl and wheel zoom, a bare wheel does not; a box switches the curves and their keys."""
    view = "report.views.get('latency-rate').view"
    before = page.evaluate(f"{view}.scale('x').domain()")
    page.locator("#chart-latency-rate").scroll_into_view_if_needed()
    box = page.locator("#chart-latency-rate .live").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 150)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    until(page, f"{view}.scale('x').domain()[1] < {before[1]}")
    zoomed = page.evaluate(f"{view}.scale('x').domain()")
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    assert page.evaluate(f"{view}.scale('x').domain()") == zoomed
    keys = page.locator("#chart-latency-rate [data-switch=show_p99]")
    assert not keys.first.is_visible()
    page.check("#chart-latency-rate input[name=show_p99]")
    assert keys.first.is_visible()


def test_paper_has_everything_and_no_controls(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="dark")
    try:
        page.goto(pages["run"].as_uri(), wait_until="load")
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER["light"]
        assert page.locator(".definitions dd").last.bounding_box()["height"] > 0  # was collapsed
        figures = page.locator("figure").count()
        assert page.locator(".picture svg:visible").count() == figures
        assert page.locator(".live:visible, .toc:visible, button:visible").count() == 0
        assert page.locator("input[type=range]:visible").count() == 0
        assert page.locator(".outcome:visible").inner_text().count("$") >= 4  # what the fleet costs
        page.set_viewport_size({"width": 794, "height": 1123})  # A4
        ends = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
        assert max(page.evaluate(ends)) <= 795
        assert page.pdf().startswith(b"%PDF-")
    finally:
        page.close()


@pytest.mark.slow
def test_a_page_with_100_000_requests_behind_it_is_small_and_paints_at_once(
    browser: Any, measured: Measured, tmp_path: Path
) -> None:
    """Of the page only the timeline grows with the requests. The paint takes 0.2 s."""
    stages = queue_sweep(np.random.default_rng(3), [800, 1700], 40.0, service_rps=2000.0)
    run = make_run(tmp_path / "run", stages, ["ttft_p95=20ms"])
    assert run.requests.num_rows > 99_000
    _, summary, limits = measured
    beyond = Beyond(timeline_of(run), limits, str(run.path))
    path = write_report(tmp_path / "report.html", summary, run.meta, beyond)
    assert path.stat().st_size < 3_000_000
    page = browser.new_page()
    try:
        page.goto(path.as_uri(), wait_until="load")
        until(page, "performance.getEntriesByName('first-contentful-paint').length > 0")
        [paint] = page.evaluate("performance.getEntriesByName('first-contentful-paint')")
        assert paint["startTime"] < 3000
        drawn = page.evaluate("JSON.parse(document.getElementById('live').textContent)")
        rows = drawn["specs"]["timeline"]["datasets"].values()
        assert max(map(len, rows)) <= 20_000
    finally:
        page.close()


def test_long_and_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    """A model of 5,000 characters, 200 classes, markup in names and reasons."""
    summary = open_sweep()
    names = [f"{HOSTILE} {'long' * (i % 20)} {i}" for i in range(200)]
    known = {"capacity_rps": 5.0, "crossing": "verified", "slos": ["ttft_p99=2s"]}
    summary["classes"] = [blank(ClassCapacity) | known | {"name": name} for name in names]
    summary["stages"][7]["errors"][HOSTILE] = 3
    summary["warnings"] = [{"code": "errors", "text": f"{HOSTILE} <b>bold</b> {'x' * 900}"}]
    run = meta(summary)
    run["endpoint"]["model"] = HOSTILE + "m" * 5_000
    path = write_report(tmp_path / "report.html", read_summary(summary), run)
    with opened(browser, path, 400) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert run["endpoint"]["model"] in page.locator(".subject").text_content()
        assert page.locator("#classes tbody tr").count() == 200
        assert names[199] in page.locator("#classes").text_content()
        assert page.locator("main script, main b").count() == 0
