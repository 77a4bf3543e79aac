"""What the generator does about the limits of its machine."""

import subprocess
import sys

import pytest

READS_ITS_TABLE = """
import os
from pathlib import Path
from ampacity.loadgen.host import open_files_limit, widen_descriptor_table
def table():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "FDSize" in line)
before, opened = table(), len(os.listdir("/proc/self/fd"))
widen_descriptor_table()
print(before, table(), min(open_files_limit(), 65_536), len(os.listdir("/proc/self/fd")) - opened)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/proc tells how large the table is"
)
def test_the_table_of_descriptors_is_large_before_the_load_and_nothing_stays_open() -> None:
    """It would be doubled while requests wait; it has room for as many as may be opened at all."""
    told = subprocess.run(
        [sys.executable, "-c", READS_ITS_TABLE],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after, most, left_open = map(int, told.stdout.split())
    assert before < most
    assert most <= after <= 2 * most
    assert left_open == 0
