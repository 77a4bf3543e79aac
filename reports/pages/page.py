"""An HTML page that needs no network and no script: its template, its style, its charts as SVG."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ampacity.reports.charts.marks import Chart
from ampacity.reports.charts.palette import style_sheet
from ampacity.reports.charts.svg import draw, to_svg

NOT_DRAWN = "<p>This chart could not be drawn (out of memory?): ampacity report draws it again.</p>"


def render_page(template: str, charts: Iterable[Chart], **content: Any) -> str:
    """Return ``template`` filled with ``content``, escaped, and with ``charts`` by name."""
    figures = _drawn(list(charts))
    return str(
        _environment()
        .get_template(template)
        .render(style=style_sheet(), figures=figures, **content)
    )


def write_page(path: Path, page: str) -> None:
    """Write ``page``; a reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def embedded_json(value: Any) -> str:
    """Return JSON for a script element, without <, > and &. Raises ValueError on NaN."""
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


def _drawn(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the charts with their SVG, by name; a narrow form is shown where it fits."""
    forms = [
        (chart, fits, spec)
        for chart in charts
        for fits, spec in (
            ("wide" if chart.narrow_spec else "", chart.spec),
            ("narrow", chart.narrow_spec),
        )
        if spec is not None
    ]
    figures: dict[str, Any] = {chart.name: {"chart": chart, "pictures": []} for chart in charts}
    drawn = draw([spec for _, _, spec in forms])
    if drawn is None:
        for figure in figures.values():
            figure["pictures"].append(("", NOT_DRAWN))
        return figures
    for (chart, fits, _), svg in zip(forms, drawn, strict=True):
        picture = to_svg(svg, chart.alt, f"{chart.name}{fits}-")
        figures[chart.name]["pictures"].append((fits, picture))
    return figures
