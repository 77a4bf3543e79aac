"""The report in a real browser: quiet, alone, legible at both widths and in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.reports.pages.run_report import write_report
from tests.support.sample_summary import ALL, meta

# whether every text of a chart lies inside its picture, and which texts of one axis overlap
CLIPPED = """() => [...document.querySelectorAll('.picture svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  if (!box.width) return [];
  return [...svg.querySelectorAll('text')].filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 ||
      r.top < box.top - 1 || r.bottom > box.bottom + 1;
  }).map(t => t.textContent);
})"""
OVERLAPPING = """() => [...document.querySelectorAll('.picture svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')]
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, r], i) => texts.slice(i + 1).filter(([b, s]) => r.width && s.width &&
    r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 2 && s.top < r.bottom - 2)
    .map(([b]) => a + ' | ' + b));
})"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    for name in ("open_sweep", "all_failed"):
        summary = ALL[name]()
        made[name] = (
            summary,
            write_report(folder / f"{name}.html", read_summary(summary), meta(summary)),
        )
    return made


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("open_sweep", width, scheme) for width in (1400, 390) for scheme in ("light", "dark")),
        ("all_failed", 1400, "dark"),
        ("all_failed", 390, "light"),
    ],
)
def test_the_report_is_quiet_alone_and_fits(
    browser: Any,
    reports: dict[str, tuple[dict[str, Any], Path]],
    name: str,
    width: int,
    scheme: str,
) -> None:
    summary, path = reports[name]
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    console: list[str] = []
    failed: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    try:
        page.goto(path.as_uri(), wait_until="load")
        assert page.locator("#verdict").text_content() == summary["verdict"]
        assert (
            page.evaluate("JSON.parse(document.getElementById('summary').textContent).verdict")
            == summary["verdict"]
        )
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(OVERLAPPING) == []
        shown = page.locator(".picture svg:visible").count()
        assert shown == page.locator("figure").count()
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
        ink = page.locator(".picture svg:visible text").first.evaluate(
            "e => getComputedStyle(e).fill"
        )
        assert ink == ("rgb(88, 97, 112)" if scheme == "light" else "rgb(163, 173, 185)")
    finally:
        page.close()
    assert console == []
    assert failed == []
    assert [url for url in requested if url != "data:,"] == [path.as_uri()]
