"""SECURITY.md names files that exist, and the limits that hold."""

import re
from pathlib import Path

from ampacity import files
from ampacity.imports import into_run
from ampacity.loadgen.drive import timeouts
from ampacity.loadgen.net import pages
from ampacity.loadgen.receive import bodies
from ampacity.workloads import profile
from ampacity.workloads.prompts import files as prompts
from ampacity.workloads.traces import formats, json_rows

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_path_in_it_exists() -> None:
    for path in re.findall(r"`((?:tests|ampacity|docs)/[\w./]+)`|\((docs/[\w./]+)\)", TEXT):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_the_limits_in_it_hold() -> None:
    mib = {"MiB": files.MIB, "GiB": files.GIB, "KiB": 1024}
    for text, value in (
        ("64 KiB", bodies.FRAMING_MAX_BYTES),
        ("32 MiB", bodies.WHOLE_BODY_BYTES),
        ("8 MiB", pages.PAGE_MAX_BYTES),
        ("2 MiB", profile.YAML_MAX_BYTES),
        ("64 MiB", files.MOST_BYTES),
        ("1 GiB", prompts.LARGEST_BYTES),
        ("1 GiB", into_run.LARGEST_BYTES),
        ("1 GiB", json_rows.DOCUMENT_MAX),
    ):
        number, unit = text.split()
        assert int(number) * mib[unit] == value, text
        assert text in TEXT
    for count in (
        timeouts.CHUNKS_MAX,
        profile.NODES_MAX,
        profile.NUMBER_MAX,
        formats.LINE_MAX,
        formats.LINES_MAX,
    ):
        assert f"{count:,}" in TEXT
