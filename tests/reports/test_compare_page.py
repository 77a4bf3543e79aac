"""The page of a comparison in a real browser: alone, quiet, nothing clipped or overlapping, in both
themes and widths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ampacity.analysis.change.scorecard import compare
from ampacity.reports.pages.compare import write_comparison_page
from tests.reports.test_browser import CLIPPED, OVERLAPPING
from tests.support.compared_runs import arm, stage, ttfts


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    made = [
        arm(folder / n, stage(ttfts(k, 1000, 1 + k / 5)), ["ttft_p99=1s"], usd=2.0)
        for k, n in enumerate("abc")
    ]
    result = compare(made)
    result = structs.replace(result, sentence=f"{result.sentence} <script>alert(1)</script>")
    write_comparison_page(folder / "compare.html", result)
    return folder / "compare.html"


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_the_page_is_quiet_alone_and_fits(
    browser: Any, page_path: Path, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    try:
        page.goto(page_path.as_uri(), wait_until="load")
        assert "<script>" in page.locator("#verdict").text_content()
        assert (
            page.evaluate(
                "JSON.parse(document.getElementById('comparison').textContent).runs.length"
            )
            == 3
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(OVERLAPPING) == []
        assert page.locator(".picture svg:visible").count() == page.locator("figure").count() >= 6
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
    finally:
        page.close()
    assert said == []
    assert [url for url in requested if url != "data:,"] == [page_path.as_uri()]
