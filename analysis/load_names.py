"""One name for a stage in every output: its load, and its number where another shares it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def load_name(stage: Mapping[str, Any]) -> str:
    """Return the name of a stage's load: ``12.5 req/s``, ``16 users``, or that of name_stages."""
    if name := stage.get("name"):
        return str(name)
    if (rate_rps := stage.get("offered_rps")) is not None:
        return f"{_four_digits(rate_rps)} req/s"
    if (users := stage.get("concurrency_set", stage.get("concurrency"))) is not None:
        return f"{_four_digits(users)} users"
    return f"stage {stage.get('index', '?')}"


def name_stages(stages: Sequence[dict[str, Any]]) -> None:
    """Give each stage its ``name``: the load, and the ``index`` of those that share it."""
    names = [load_name(stage) for stage in stages]
    shared = Counter(names)
    for stage, name in zip(stages, names, strict=True):
        stage["name"] = f"{name} (stage {stage['index']})" if shared[name] > 1 else name


def _four_digits(value: float) -> str:
    return f"{float(f'{value:.4g}'):,.10g}"
