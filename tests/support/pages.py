"""HTML pages in a real browser."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAPER = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
# the texts of live charts that reach out of their picture, and those that lie on another one
CLIPPED = """() => [...document.querySelectorAll('.live svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(t => {
    const r = t.getBoundingClientRect();
    return r.width && (r.left < box.left - 1 || r.right > box.right + 1 ||
      r.top < box.top - 1 || r.bottom > box.bottom + 1);
  }).map(t => t.textContent);
})"""
OVERLAPPING = """() => [...document.querySelectorAll('.live svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].filter(t => getComputedStyle(t).opacity > 0)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, r], i) => texts.slice(i + 1).filter(([b, s]) => r.width && s.width &&
    r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 2 && s.top < r.bottom - 2)
    .map(([b]) => a + ' | ' + b));
})"""
ALL_DRAWN = "document.querySelectorAll('figure:not(.drawn)').length === 0"


def until(page: Any, holds: str, within_s: float = 20.0) -> None:
    """Wait for an expression to hold; ``wait_for_function`` evaluates text, which pages forbid."""
    end = time.monotonic() + within_s
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(50)


@contextmanager
def opened(browser: Any, path: Path, width: int = 1300, scheme: str = "light") -> Iterator[Any]:
    """Open a page with all its charts drawn; fail on any request, message or error of it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    try:
        page.goto(path.as_uri(), wait_until="load")
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        page.evaluate("report.drawAll()")  # else they are drawn when seen
        until(page, ALL_DRAWN)
        yield page
    finally:
        page.close()
    assert seen == []
    assert [url for url in requested if url != "data:,"] == [path.as_uri()]
