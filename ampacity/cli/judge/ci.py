"""Hand the result of gate or check to a CI service: files, annotations, JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ampacity.cli.output import print_json, write_text

if TYPE_CHECKING:
    from ampacity.analysis.change.results import GateResult


def hand_over(
    result: GateResult,
    junit: Path | None,
    markdown: Path | None,
    *,
    annotate: bool = True,
    as_json: bool,
    show: Callable[[], object] = lambda: None,
) -> None:
    """Show the result or print it as JSON, then annotations on GitHub, JUnit XML and Markdown.

    Raises RunDirError for a file that cannot be written, after everything is printed.
    """
    from ampacity.reports.change.gate import gate_markdown, junit_xml, workflow_commands

    if as_json:
        print_json(result.as_dict())
    else:
        show()
    if annotate and os.environ.get("GITHUB_ACTIONS") == "true":
        print(*workflow_commands(result), sep="\n", file=sys.stderr if as_json else sys.stdout)
    if junit:
        write_text(junit, junit_xml(result))
    if markdown:
        write_text(markdown, gate_markdown(result), append=True)
