"""Built-in workloads, in the form of a workload file. Quantiles are facts of the traces that ``source`` names.

Only figures are carried over. Where a source says "an assumption", nothing in it was measured.
"""

from __future__ import annotations

from typing import Any

_AZURE = "Azure LLM inference trace 2023, {} (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0), quantiles of all {} rows"

# Levels of the tables below: the mean comes out within 4 % of the trace's (11 levels leave 14 %).
_LEVELS = (0, .01, .05, .10, .15, .20, .25, .30, .35, .40, .45, .50, .55, .60, .65, .70, .75, .80, .85, .90, .95,
           .975, .99, .995, .999, 1)  # fmt: skip


def _quantiles(*tokens: int, levels: tuple[float, ...] = _LEVELS) -> dict[str, dict[float, int]]:
    return {"quantiles": dict(zip(levels, tokens, strict=True))}


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
    "reasoning": {
        "source": "ServeGen deepseek-r1, one day, 1,383,669 requests (Alibaba, Apache-2.0), published quantiles, log-linear "
        "between them, below p1 as p1 (assumed). Output includes the hidden reasoning: 70 % of its tokens on average",
        "input_tokens": _quantiles(
            9, 9, 13, 18, 24, 31, 41, 57, 79, 109, 150, 208, 246, 291, 344, 407, 482, 786, 1282, 2092, 6714, 14660,
            23423, 28708, 33783, 56957,
        ),
        "output_tokens": _quantiles(
            141, 141, 225, 287, 328, 374, 427, 483, 547, 619, 700, 792, 900, 1022, 1161, 1319, 1499, 1976, 2604, 3432,
            5701, 9362, 12607, 16665, 20833, 32768,
        ),
    },
    "summarisation": {
        "source": "arXiv summarisation, 28,257 papers as counted by Vidur (Agrawal et al., MLSys 2024; MIT), quantiles of "
        "all rows; input and output together are cut at 4,096 there. Arrivals are an assumption",
        "input_tokens": _quantiles(
            1, 73, 749, 1242, 1564, 1802, 1986, 2150, 2308, 2453, 2596, 2730, 2861, 2996, 3127, 3249, 3370, 3490, 3597,
            3702, 3813, 3876, 3933, 3963, 4012, 4054,
        ),
        "output_tokens": _quantiles(
            5, 36, 60, 78, 92, 104, 115, 125, 135, 145, 156, 167, 179, 192, 206, 222, 242, 268, 304, 372, 736, 2507,
            3271, 3582, 3844, 4056,
        ),
        "correlation": -0.11,
    },
    "batch": {
        "source": "an assumption, not a measurement: documents labelled or extracted from by a queue's workers, evenly",
        "arrivals": "constant",
        "input_tokens": {"lognormal": {"p50": 800, "p99": 6000, "max": 16000}},
        "output_tokens": {"lognormal": {"p50": 60, "p99": 400, "max": 1000}},
    },
    "agentic": {
        "source": "an assumption, not a measurement: short tasks of an agent with tools, for models of 32k context; the "
        "shape (tool calls between messages, growing context) is that of agentic-coding",
        "input_tokens": {"lognormal": {"p50": 300, "p99": 2000}},
        "output_tokens": {"lognormal": {"p50": 150, "p99": 900}},
        "prefixes": [{"name": "system and tools", "tokens": 4000}],
        "sessions": {
            "turns": "uniform:min=1,max=3",
            "think_ms": {"lognormal": {"p50": 8000, "p99": 60000}},
            "steps": {
                "calls": "gamma:mean=4,cv=0.8,max=20",
                "result_tokens": {"lognormal": {"p50": 350, "p99": 3000}},
                "delay_ms": {"lognormal": {"p50": 800, "p99": 8000}},
            },
        },
    },
    "mooncake-conversation": {
        "source": "Mooncake conversation trace, 12,031 requests (Qin et al., FAST 2025; Apache-2.0), quantiles of all rows "
        "and 37 % of prompt tokens found by an infinite cache. Poisson: counts in its steps of 3 s are; the pool of 2,000 "
        "shared texts is an assumption",
        "input_tokens": _quantiles(
            891, 894, 901, 964, 1261, 1662, 2306, 3263, 4251, 4993, 5870, 6909, 8187, 9570, 11238, 13196, 15367, 17869,
            21464, 27367, 39550, 58977, 85400, 100810, 121301, 126195,
        ),
        "output_tokens": _quantiles(
            1, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543, 597, 698, 835, 1119,
            1568, 2000, 2000,
        ),
        "correlation": 0.07,
        "prefixes": {"cached_share": 0.37, "pool": 2000, "zipf": 1.0},
    },
    "agentic-coding": {
        "source": "710 sessions of a coding agent (callanjfox/kv-cache-tester, Apache-2.0): quantiles of first prompts, "
        "answers, tool results (new text, cut at its p99), tool times and pauses (cut at their p99), 69 requests a session, "
        "16 % of them a person's. Assumed: that turns and calls are gamma of CV 1, a shared beginning of 14,948 tokens (its "
        "median), and compaction at 200,000 tokens to 15,000",
        "input_tokens": _quantiles(
            100, 1500, 3000, 4000, 9500, 89000, 244000, 360000, 693000, levels=(0, .05, .15, .25, .5, .75, .9, .95, 1),
        ),
        "output_tokens": _quantiles(
            1, 58, 89, 105, 117, 126, 137, 149, 161, 177, 195, 216, 242, 273, 311, 361, 426, 514, 639, 898, 1554, 2425,
            3686, 5018, 7982, 18195,
        ),
        "prefixes": [{"name": "system and tools", "tokens": 14948}],
        "sessions": {
            "turns": "gamma:mean=11,cv=1",
            "user_tokens": _quantiles(
                1, 5, 17, 28, 109, 360, 1172, 3239, 6300, 17218, levels=(0, .01, .05, .10, .25, .50, .75, .90, .95, 1),
            ),
            "think_ms": _quantiles(
                3000, 9000, 16000, 40000, 127000, 408800, 1540300, 3087500, 6854000,
                levels=(0, .05, .10, .25, .50, .75, .90, .95, 1),
            ),
            "limit_tokens": 200_000,
            "summary_tokens": 15_000,
            "steps": {
                "calls": "gamma:mean=5.2,cv=1",
                "result_tokens": _quantiles(
                    1, 5, 17, 28, 109, 360, 1172, 3239, 6300, 17218, levels=(0, .01, .05, .10, .25, .50, .75, .90, .95, 1),
                ),
                "delay_ms": _quantiles(
                    2000, 3000, 4000, 5000, 9000, 19000, 72000, 167300, 916000,
                    levels=(0, .05, .10, .25, .50, .75, .90, .95, 1),
                ),
            },
        },
    },
    "rag": {
        "source": "an assumption, not a measurement (no public trace holds RAG lengths): an instruction and 5 to 20 "
        "passages of 200 to 500 tokens, tail ratio as in the Azure traces",
        "input_tokens": {"lognormal": {"p50": 3000, "p99": 12000, "max": 32000}},
        "output_tokens": {"lognormal": {"p50": 200, "p99": 800, "max": 4000}},
    },
}  # fmt: skip

ARCHETYPES |= {
    "azure-conv-2023": ARCHETYPES["chat"] | {"correlation": 0.07},
    "azure-code-2023": ARCHETYPES["code"],
    "arxiv-summarisation": ARCHETYPES["summarisation"],
    "servegen-reasoning": ARCHETYPES["reasoning"],
}
