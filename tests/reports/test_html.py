"""The page as text: escaping, embedded summary, banners, SVG, one file without references."""

import io
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ampacity.analysis.contract.capacity import Capacity, Knee
from ampacity.analysis.contract.summary import read_summary
from ampacity.reports.charts import svg as drawing
from ampacity.reports.charts.curves import latency_by_rate
from ampacity.reports.pages.around_limit import around_limit
from ampacity.reports.pages.page import embedded_json
from ampacity.reports.pages.run_report import partial_reason, render_report, write_report
from ampacity.reports.pages.terminal import render_table
from tests.support.contract import blank, summarise
from tests.support.sample_summary import ALL, meta, one_stage, open_sweep
from tests.support.synthetic import make_run, queue_sweep

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028"
VOID = {"meta", "link", "img", "br", "input"}


def svg_of(spec: dict[str, Any], alt: str, prefix: str) -> str:
    drawn = drawing.draw([spec])
    return drawing.to_svg(drawn.svg[0], alt, prefix)


class Page(HTMLParser):
    """Text by element id, all tags, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, str | None]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name:
                self.text[name] = self.text.get(name, "") + data


def short_sweep() -> dict[str, Any]:
    """The last two stages of the open sweep: every kind of chart, and quick to draw."""
    summary = open_sweep()
    return summary | {"stages": summary["stages"][-2:]}


def page_of(summary: dict[str, Any], run: dict[str, Any] | None = None) -> tuple[str, Page]:
    text = render_report(read_summary(summary), run or meta(summary))
    return text, Page(text)


@pytest.mark.parametrize("name", ["open_sweep", "one_stage", "all_failed"])
def test_the_page_is_one_well_formed_file(name: str, tmp_path: Path) -> None:
    summary = ALL[name]()
    path = write_report(tmp_path / "report.html", read_summary(summary), meta(summary))
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_size < 2_000_000
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.text["verdict"] == summary["verdict"]
    assert json.loads(page.text["summary"]) == summary
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed")
        for key in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(key)
            assert target in (None, "data:,") or target.startswith("#")
    assert "url(http" not in text
    assert "@import" not in text
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for reference in re.findall(r"url\(#([\w-]+)\)", text):
        assert reference in ids
    # 5.4 req/s below the knee x (2 s - 98.98 ms) = 10.3; 34.2 in flight, rounded up; 34.2 / 1.3, rounded down
    limits = (
        "limit of one instance set in set to what comes beyond why "
        "rate proxy at most 5.40 req/s refused (429) the low end of the knee region "
        "requests in flight proxy at most 35 waits in the queue at any moment: C_max, rounded up "
        "circuit breaker proxy opens at 8 to 9 waiting refused (503) "
        "80 to 90 % of the queue, before that is full; 43 to 44 requests with those in flight "
        "queue proxy at most 10 waiting refused (429) what leaves in the 1.90 s that TTFT may wait "
        "add an instance autoscaler above 26 in flight – on average over minutes: C_max ÷ the safety factor"
    )
    shown = page.text.get("rails", "")
    assert " ".join(shown.split()) == (limits if name == "open_sweep" else "")


def test_sections_stand_in_the_order_of_the_report() -> None:
    _, page = page_of(short_sweep())
    wanted = (
        "verdict decision set curve distributions goodput trust warnings rerun appendix slos "
        "workload provenance definitions summary live"
    ).split()
    assert [a["id"] for _, a in page.tags if a.get("id") in wanted] == wanted


def test_the_loads_around_the_capacity_are_told_in_words() -> None:
    """Of 6.4 requests/s: the stage at 6, not that at 7, of which 95.1 % met the SLO."""
    at_6 = (
        "TTFT p50 310 ms, p95 1.06 s, p99 1.77 s; ITL p50 28.0 ms, p95 45.9 ms, p99 56.3 ms; "
        "E2E p50 5.64 s, p95 12.8 s, p99 18.0 s."
    )
    above = (
        "Above the capacity: at 7 req/s 4.90% of the requests missed the SLO, TTFT p50 640 ms; "
        "at 9 req/s 95.0% of the requests missed the SLO, TTFT p50 11.5 s, and the queue grew to the end."
    )
    summary = open_sweep()
    _, page = page_of(summary)
    at_most = f"At 6 req/s, the highest load that met the SLOs: {at_6}"
    assert page.text["around-limit"] == f"{at_most}{above}"
    summary["stages"][5]["slo_met"] = None  # at 6: now 5 is the highest that met them
    below = around_limit(read_summary(summary))[1]
    open_ = "the highest load below the capacity; its verdict is inconclusive"
    assert below == f"At 6 req/s, {open_}: {at_6}"
    summary["capacity"] |= {"crossing": "pooled", "binding_slo": "ttft_p99=2s"}
    assert around_limit(read_summary(summary))[2] == (
        "At the capacity, 6.40 req/s, by the estimate 1.00% of the requests take longer than 2.00 s, as ttft_p99=2s allows."
    )
    summary["capacity"] |= {"crossing": "lower_bound"}
    assert len(around_limit(read_summary(summary))) == 2
    assert around_limit(read_summary(ALL["all_failed"]())) == []


def test_hostile_text_stays_text() -> None:
    summary = short_sweep()
    summary["verdict"] = HOSTILE
    summary["warnings"] = [{"code": HOSTILE, "text": HOSTILE}]
    summary["workload"] = summary["workload"] | {"name": HOSTILE}
    summary["stages"][1]["stable_reason"] = HOSTILE
    summary["stages"][1]["errors"][HOSTILE] = 1
    summary["capacity"]["binding_slo"] = HOSTILE
    run = meta(summary)
    run["endpoint"]["model"] = run["name"] = run["locked"]["engine"] = HOSTILE
    run["locked"][HOSTILE] = HOSTILE
    run["command_line"] = ["ampacity", HOSTILE]
    text, page = page_of(summary, run)
    data = [{"type": "application/json", "id": name} for name in ("summary", "fleet", "live")]
    assert [a for t, a in page.tags if t == "script"] == [*data, {}, {}]
    assert not any(key.startswith("on") for _, a in page.tags for key in a)
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text["verdict"] == HOSTILE
    assert json.loads(page.text["summary"]) == summary
    (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    expected = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    assert policy == expected


def test_embedded_json_holds_no_markup_and_no_nan() -> None:
    value = {"a": HOSTILE}
    text = embedded_json(value)
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON"):
        embedded_json({"a": float("nan")})


def test_a_complete_run_has_no_banner() -> None:
    _, page = page_of(short_sweep())
    assert "partial" not in page.text
    assert "predicted" not in page.text


@pytest.mark.parametrize(
    ("status", "status_reason", "partial", "said"),
    [
        ("interrupted", "Ctrl-C in stage 3", None, "Ctrl-C in stage 3."),
        (
            "running",
            None,
            None,
            "The run was still going, or was killed, when this report was written.",
        ),
        ("budget", "--max-requests 100", "ended in stage 2 of 8", "Ended in stage 2 of 8."),
        ("complete", None, None, None),
        ("complete", None, "stage 4 was cut", "Stage 4 was cut."),
    ],
)
def test_why_a_run_is_partial(
    status: str, status_reason: str | None, partial: str | None, said: str | None
) -> None:
    summary = one_stage() | {"partial": partial}
    run = meta(summary) | {"status": status, "status_reason": status_reason}
    assert partial_reason(read_summary(summary), run) == said
    _, page = page_of(summary, run)
    assert (said is None and "partial" not in page.text) or (
        said is not None and said in page.text["partial"]
    )


def test_every_figure_of_a_prediction_is_marked() -> None:
    text, page = page_of(short_sweep() | {"predicted": True})
    assert "none was measured" in page.text["predicted"]
    marks = text.count('<span class="tag">predicted</span>')
    cards, figures = text.count('class="card"'), text.count("<figure")
    tables = len([tag for tag, _ in page.tags if tag == "table"])
    assert (cards, figures, tables) == (10, 9, 14)
    # the length table stands under the mark of its section
    assert marks >= cards + figures + tables - 1


def test_null_figures_show_their_reasons() -> None:
    text, _ = page_of(one_stage())
    for reason in (
        "needs 299 requests, has 40",
        "tokens of each chunk are not known",
        "no stage could be decided",
    ):
        assert reason in text


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            {"timeout": 27, "unfinished": 3},
            "Of 4,320 requests of the whole run 3 cut off unfinished; 27 failed: timeout 27.",
        ),
        (
            {"timeout": 0, "unfinished": 3},
            "Of 4,320 requests of the whole run 3 cut off unfinished; none failed.",
        ),
        ({"timeout": 0}, "Of 4,320 requests of the whole run none failed."),
    ],
)
def test_cut_off_requests_are_no_failures(errors: dict[str, int], said: str) -> None:
    _, page = page_of(short_sweep() | {"errors": errors})
    assert said in page.text["goodput"]


def test_provenance_has_what_repeats_the_run() -> None:
    summary = short_sweep()
    run = meta(summary)
    run["command_line"] += ["--name", "two words"]
    _, page = page_of(summary, run)
    said = page.text["rerun"] + page.text["provenance"]
    for fact in (
        "ampacity 0.1.0",
        "--name 'two words'",
        "7f3a",
        "uvicorn",
        "0.32.0",
        "CLOCK_MONOTONIC 1234 ns",
        "8.0 GiB",
        "2026-11-27T22:09:31Z",
        "example/chat-8b",
        "not given",
        "temperature 0",
    ):
        assert fact in said


def test_a_sparse_run_json_does_not_break_the_report() -> None:
    _, page = page_of(short_sweep(), {"schema_version": 1})
    assert page.text["verdict"] == short_sweep()["verdict"]


def test_an_odd_run_json_does_not_break_the_report() -> None:
    run = meta(short_sweep()) | {
        "command_line": 5,
        "seed": float("inf"),
        "host": {"memory_bytes": "much"},
    }
    _, page = page_of(short_sweep(), run)
    assert "inf" in page.text["rerun"]


def test_writing_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    summary = short_sweep()
    summary["stages"][0]["achieved_rps"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        write_report(path, read_summary(summary), meta(summary))
    assert path.read_text() == "old"


@pytest.mark.draws
def test_axis_labels_are_plain_numbers() -> None:
    summary = short_sweep()
    for factor, labels in ((10, ("20", "40", "60")), (1000, ("2,000", "4,000", "6,000"))):
        stages = [s | {"offered_rps": s["offered_rps"] * factor} for s in summary["stages"]]
        chart = latency_by_rate(
            read_summary(
                summary | {"stages": stages, "capacity": blank(Capacity), "knee": blank(Knee)}
            )
        )
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg_of(chart.spec, "alt", "x-"))
        assert set(labels) <= set(texts)
        assert not [text for text in texts if re.search(r"\de[+-]?\d", text)]
        assert "2 s" in texts
        assert "20 s" in texts


def test_a_summary_of_the_analysis_becomes_a_report(tmp_path: Path) -> None:
    """An M/M/1 sweep through the real analysis: the report shows its words, and every picture."""
    stages = queue_sweep(np.random.default_rng(3), [10, 25, 40, 60], 20.0, service_rps=50.0)
    run = make_run(tmp_path / "run", stages, ["ttft_p99=500ms", "itl_p99=50ms"])
    summary = summarise(run)
    text, page = page_of(summary, run.meta)
    assert page.text["verdict"] == summary["verdict"]
    assert json.loads(page.text["summary"]) == summary
    for warning in summary["warnings"]:
        assert warning["text"] in page.text["warnings"]
    drawn = re.findall(r'<figure id="chart-([^"]+)"', text)
    assert (
        drawn
        == (
            "latency-rate latency-concurrency achieved ttft-percentiles itl-percentiles goodput "
            "input-tokens output-tokens"
        ).split()
    )
    out = io.StringIO()
    render_table(read_summary(summary), Console(file=out, width=100, no_color=True))
    assert " ".join(out.getvalue().split()).startswith(summary["verdict"])


@pytest.mark.draws
def test_svg_has_tooltips_alternative_text_and_its_own_ids() -> None:
    chart = latency_by_rate(read_summary(open_sweep()))
    svg = svg_of(chart.spec, "an <alt>", "x-")
    assert 'aria-label="an &lt;alt&gt;"' in svg
    assert 'role="img"' in svg
    assert "<title>2 req/s: TTFT p99 319 ms (274 ms to 386 ms)</title>" in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert ids
    assert all(name.startswith("x-") for name in ids)
    assert "Offered rate (requests/s)" in svg
    assert ">100 ms</text>" in svg
    assert "font-family" not in svg
    assert len(svg) < 60_000


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os.abort()", "SIGABRT (too little memory?)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise MemoryError", "MemoryError"),
        ("print('half a docu')", "Expecting value"),
    ],
)
def test_what_draws_may_die_and_the_page_is_written_without_charts(
    program: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "draw.py").write_text(program)
    monkeypatch.setattr(drawing, "_DRAW", tmp_path / "draw.py")
    summary = open_sweep()
    page = write_report(tmp_path / "report.html", read_summary(summary), meta(summary)).read_text()
    assert 'role="img"' not in page
    assert "This chart could not be drawn" in page
    assert summary["verdict"] in page
    said = capfd.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_the_lengths_as_they_came_stand_under_the_verdict() -> None:
    text, _ = page_of(short_sweep())
    assert "prompts p50 1,031 tokens, p99 4,134; answers p50 151 tokens, p99 556" in text
