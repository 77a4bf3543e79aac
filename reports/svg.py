"""Vega-Lite specs as inline SVG: static, themable by CSS, with tooltips, small."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

SVG = "http://www.w3.org/2000/svg"
KEPT_DECIMALS = 2
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_DROPPED = ("aria-roledescription", "aria-hidden", "class", "pointer-events", "role", "font-family")


def to_svg(spec: dict[str, Any], alt: str, prefix: str) -> str:
    """``spec`` drawn as an ``<svg>`` element to put into a page.

    Text fits any theme (colours are recoloured by the page's style sheet), mark descriptions become
    ``<title>`` tooltips, ``alt`` is what a screen reader says, and ids start with ``prefix``, so that
    several pictures can share a page.
    """
    import vl_convert

    ET.register_namespace("", SVG)
    root = ET.fromstring(vl_convert.vegalite_to_svg(json.dumps(spec, allow_nan=False)))
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
            element.set(name, _NUMBER.sub(lambda found: f"{float(found[0]):.{KEPT_DECIMALS}f}", value))


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
