"""The metrics that a gate tracks, and the tolerances that a user gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ampacity.analysis.change.blocks import TRACKED
from ampacity.analysis.change.comparable import CompareError

NAMES = (*TRACKED, "error_rate", "output_tokens_per_s", "capacity_rps")


def parse_tolerances(texts: Sequence[str]) -> dict[str, float]:
    """``ttft_p99=10%`` to {"ttft_p99": 0.1}; ``ttft`` and ``p99`` stand for several. Raises CompareError."""
    found: dict[str, float] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.]+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
        names = [
            n
            for n in NAMES
            if match and (n == match[1] or (n in TRACKED and match[1] in n.split("_")))
        ]
        if not match or not names:
            raise CompareError(
                f"--tolerance {text}: write METRIC=N%, as ttft_p99=10%, with one of {', '.join(NAMES)}"
            )
        if not 0 < float(match[2]) <= 1000:
            raise CompareError(f"--tolerance {text}: give more than 0 % and at most 1000 %")
        found |= dict.fromkeys(names, float(match[2]) / 100)
    return found
