"""Built-in workloads, in the form of a workload file. Quantiles are facts of the traces that ``source`` names."""

from __future__ import annotations

from typing import Any

_AZURE = "Azure LLM inference trace 2023, {} (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0), quantiles of all {} rows"

# Levels of the tables below: the mean comes out within 4 % of the trace's (11 levels leave 14 %).
_LEVELS = (0, .01, .05, .10, .15, .20, .25, .30, .35, .40, .45, .50, .55, .60, .65, .70, .75, .80, .85, .90, .95,
           .975, .99, .995, .999, 1)  # fmt: skip


def _quantiles(*tokens: int) -> dict[str, dict[float, int]]:
    return {"quantiles": dict(zip(_LEVELS, tokens, strict=True))}


ARCHETYPES: dict[str, dict[str, Any]] = {
    "chat": {
        "source": _AZURE.format("conversation", "19,366"),
        "input_tokens": _quantiles(
            2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734,
            4083, 4092, 4142, 4831, 6179, 14050,
        ),
        "output_tokens": _quantiles(
            7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424,
            451, 522, 601, 643, 954, 1000,
        ),
    },
    "chat-short": {
        "source": "an assumption, not a measurement: short turns, for demonstrations and quick checks",
        "input_tokens": {"lognormal": {"p50": 128, "p99": 512}},
        "output_tokens": {"lognormal": {"p50": 32, "p99": 128}},
    },
    "code": {
        "source": _AZURE.format("code completion", "8,819"),
        "input_tokens": _quantiles(
            3, 17, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2744, 3192, 3920, 5188,
            7303, 7435, 7436, 7436, 7437, 7437,
        ),
        "output_tokens": _quantiles(
            6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55,
            90, 145, 251, 359, 825, 1899,
        ),
    },
    "rag": {
        "source": "an assumption, not a measurement (no public trace holds RAG lengths): an instruction and 5 to 20 "
        "passages of 200 to 500 tokens, tail ratio as in the Azure traces",
        "input_tokens": {"lognormal": {"p50": 3000, "p99": 12000, "max": 32000}},
        "output_tokens": {"lognormal": {"p50": 200, "p99": 800, "max": 4000}},
    },
}  # fmt: skip
