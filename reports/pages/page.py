"""An HTML page that needs no network: its template, its style, its charts, live and as SVG.

The page's policy names its two scripts by their hashes, so that nothing else can run in it.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ampacity.reports.charts.marks import Chart
from ampacity.reports.charts.palette import COLOURS, style_sheet
from ampacity.reports.charts.svg import draw, to_svg

NOT_DRAWN = "<p>This chart could not be drawn (out of memory?): ampacity report draws it again.</p>"
TEMPLATES = Path(__file__).parent / "templates"
_SECTION = re.compile(r'<section id="([^"]+)"[^>]*>\s*<h2>([^<]*)')


def render_page(template: str, charts: Iterable[Chart], **content: Any) -> str:
    """Return ``template`` filled with ``content``, escaped, and with ``charts`` by name."""
    found = list(charts)
    figures, runtime = _drawn(found)
    page_script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    live = {
        "specs": {chart.name: chart.spec | {"description": chart.alt} for chart in found},
        "dark": dict(COLOURS.values()),
    }
    scripts = [runtime, page_script] if runtime else [page_script]
    return str(
        _environment()
        .get_template(template)
        .render(
            style=style_sheet(),
            figures=figures,
            live=embedded_json(live),
            scripts=scripts,
            hashes=[_hash(script) for script in scripts],
            **content,
        )
    )


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def write_page(path: Path, page: str) -> None:
    """Write ``page``; a reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except BaseException:  # e.g. a full disk, on which it would stay
        temporary.unlink(missing_ok=True)
        raise


def embedded_json(value: Any) -> str:
    """Return JSON for a script element, without <, > and &. Raises ValueError on NaN."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def sections(body: str) -> list[tuple[str, str]]:
    """Return (id, heading) of the sections of a page, for its table of contents."""
    return [(name, heading.strip()) for name, heading in _SECTION.findall(body)]


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sections"] = lambda body: [
        (name, environment.filters["safe"](heading)) for name, heading in sections(str(body))
    ]
    return environment


def _drawn(charts: Sequence[Chart]) -> tuple[dict[str, Any], str | None]:
    """Return the charts with their SVG, by name, and the runtime that draws them live."""
    drawn = draw([chart.spec for chart in charts]) if charts else None
    pictures = [NOT_DRAWN] * len(charts)
    if drawn is not None:
        pairs = zip(drawn.svg, charts, strict=True)
        pictures = [to_svg(svg, chart.alt, f"{chart.name}-") for svg, chart in pairs]
    figures = {
        chart.name: {"chart": chart, "picture": picture}
        for chart, picture in zip(charts, pictures, strict=True)
    }
    return figures, drawn.runtime if drawn else None
