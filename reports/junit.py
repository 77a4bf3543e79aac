"""The gate's answer as JUnit XML: one test case per metric and SLO, in the form that CI services read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from reports.gate_text import sentence

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


def junit_xml(result: Mapping[str, Any]) -> str:
    """A regression is a failure, an open question an error, what is not judged is skipped."""
    suite = ElementTree.Element("testsuite", name="ampacity gate")
    counts = {"failures": 0, "errors": 0, "skipped": 0}

    def case(name: str, level: str | None, tag: str | None, kind: str, message: str) -> None:
        element = ElementTree.SubElement(
            suite, "testcase", classname=_clean(f"gate.{level or 'run'}"), name=_clean(name), time="0"
        )
        if tag:
            counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[tag]] += 1
            attributes = {"message": _clean(message)} | ({} if tag == "skipped" else {"type": kind})
            ElementTree.SubElement(element, tag, attributes).text = _clean(message)
        else:
            ElementTree.SubElement(element, "system-out").text = _clean(message)

    for c in result["checks"]:
        tag = {"pass": None, "inconclusive": "error"}.get(c["verdict"], "failure")
        case(c["name"], c["level"], tag, c["verdict"], sentence(c))
    for name, reason in result.get("untracked", {}).items():
        metric, _, level = name.partition(" at ")
        case(metric, level, "skipped", "untracked", reason)
    if result["verdict"] == "cannot_compare":
        case("comparable", None, "error", "cannot_compare", result["sentence"])
    totals = {"tests": str(len(suite)), **{k: str(n) for k, n in counts.items()}, "time": "0"}
    suite.attrib.update(totals)
    root = ElementTree.Element("testsuites", {"name": "ampacity", **totals})
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
