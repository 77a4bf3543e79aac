"""Vega-Lite specs as inline SVG, for paper and for pages without scripts, and their runtime."""

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

SVG = "http://www.w3.org/2000/svg"
KEPT_DECIMALS = 2
DRAW_TIMEOUT_S = 120.0
STATIC_ROWS = 2_000
_DRAW = Path(__file__).with_name("draw.py")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_DROPPED = ("aria-roledescription", "aria-hidden", "class", "pointer-events", "role", "font-family")


@dataclass(frozen=True)
class Drawn:
    """The specs as SVG documents, and the JavaScript that draws such specs in a page."""

    svg: list[str]
    runtime: str


def draw(specs: Sequence[dict[str, Any]]) -> Drawn | None:
    """Return the specs drawn; None, with a line on stderr, where drawing fails.

    A process of its own draws, for without memory the engine ends its process.
    """
    runtime = _kept_runtime()
    static = [_static(spec) for spec in specs]
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_DRAW)],
            input=json.dumps({"specs": static, "runtime": runtime is None}, allow_nan=False),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=DRAW_TIMEOUT_S,
            check=True,
        )
        drawn = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        why = _reason(error)
        print(
            f"the charts could not be drawn, every figure is in the tables: {why}", file=sys.stderr
        )
        return None
    if runtime is None:
        runtime = str(drawn["runtime"])
        _keep_runtime(runtime)
    return Drawn(drawn["svg"], runtime)


def write_svgs(folder: Path, specs: Mapping[str, dict[str, Any]]) -> list[Path]:
    """Write each spec as ``folder/NAME.svg``; return the files, none where drawing fails."""
    drawn = draw([*specs.values()])
    if drawn is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in specs]
    for path, svg in zip(paths, drawn.svg, strict=True):
        path.write_text(svg, encoding="utf-8")
    return paths


def _static(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with the first rows only of what would make a picture of megabytes."""
    held = spec["datasets"]
    return {**spec, "datasets": {name: rows[:STATIC_ROWS] for name, rows in held.items()}}


def _runtime_path() -> Path:
    """Return where the runtime is kept, by the version that made it: making it takes a second."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ampacity" / f"vega-{version('vl-convert-python')}.js"


def _kept_runtime() -> str | None:
    try:
        return _runtime_path().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return None


def _keep_runtime(runtime: str) -> None:
    with suppress(OSError, RuntimeError):
        path = _runtime_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(runtime, encoding="utf-8")
        part.replace(path)


def _reason(error: Exception) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    if error.returncode < 0:
        name = signal.Signals(-error.returncode).name
        return f"the drawing process ended by {name} (too little memory?)"
    return " ".join(error.stderr.strip().splitlines()[-1:]) or f"exit status {error.returncode}"


def to_svg(drawn: str, alt: str, prefix: str) -> str:
    """Return a document of ``draw`` as an ``<svg>`` element for a page.

    Mark descriptions become ``<title>`` tooltips, ``alt`` is for screen readers, and ids start with
    ``prefix``, so that several pictures can share a page.
    """
    ET.register_namespace("", SVG)
    root = ET.fromstring(drawn)
    _drop_empty(root)
    for element in root.iter():
        _tidy(element, prefix)
    width, height = root.get("width", "0"), root.get("height", "0")
    root.attrib.clear()
    root.attrib.update({"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": alt})
    root.set("style", f"max-width:{1.15 * float(width):.0f}px")
    return ET.tostring(root, encoding="unicode")


def _tidy(element: ET.Element, prefix: str) -> None:
    described = element.attrib.pop("aria-label", None)
    if described and element.get("role") == "graphics-symbol" and element.tag != f"{{{SVG}}}g":
        title = ET.SubElement(element, f"{{{SVG}}}title")
        title.text = described
    for name in _DROPPED:
        element.attrib.pop(name, None)
    for name, value in element.attrib.items():
        if name == "id":
            element.set(name, prefix + value)
        elif value.startswith("url(#"):
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
        elif name in ("d", "transform"):
            element.set(
                name, _NUMBER.sub(lambda found: f"{float(found[0]):.{KEPT_DECIMALS}f}", value)
            )


def _drop_empty(element: ET.Element) -> None:
    """Remove what draws nothing: hidden labels, backgrounds and foregrounds without a line."""
    for child in list(element):
        _drop_empty(child)
        kind = child.tag.rpartition("}")[2]
        hidden = child.get("opacity") == "0" or child.get("display") == "none"
        nothing = (
            (kind == "text" and not (child.text or "").strip())
            or (kind == "path" and child.get("class") == "background" and not child.get("stroke"))
            or (kind == "g" and len(child) == 0)
            or child.get("fill") == "transparent"
        )
        if hidden or nothing:
            element.remove(child)
