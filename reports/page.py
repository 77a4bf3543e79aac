"""An HTML page that needs no network and no script: its template, its style, its charts as SVG."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from reports.marks import Chart
from reports.palette import style_sheet
from reports.svg import to_svg


def render_page(template: str, charts: Iterable[Chart], **content: Any) -> str:
    """The page that ``template`` makes of ``content``, escaped, with ``charts`` by their names."""
    figures = {chart.name: _drawn(chart) for chart in charts}
    return str(_environment().get_template(template).render(style=style_sheet(), figures=figures, **content))


def write_page(path: Path, page: str) -> None:
    """Write ``page``; a reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def embedded_json(value: Any) -> str:
    """JSON that can stand inside a script element: it holds no <, > or &. Raises ValueError on NaN."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _drawn(chart: Chart) -> dict[str, Any]:
    """A chart with its SVG; where it has a narrow form as well, the page shows the one that fits."""
    pictures = [("", chart.spec)]
    if chart.narrow_spec is not None:
        pictures = [("wide", chart.spec), ("narrow", chart.narrow_spec)]
    return {
        "chart": chart,
        "pictures": [(fits, to_svg(spec, chart.alt, f"{chart.name}{fits}-")) for fits, spec in pictures],
    }
