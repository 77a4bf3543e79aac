"""Compare a summary with itself after the way through the contract."""

from __future__ import annotations

import json
from typing import Any

from ampacity.analysis.contract import read_summary, to_json


def _without_defaults(value: Any) -> Any:
    """Drop null, 0 and empty values: a field that has such a default may be left out."""
    if isinstance(value, dict):
        kept = {k: _without_defaults(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v is not None and v not in (0, [], {})}
    return [_without_defaults(v) for v in value] if isinstance(value, list) else value


def difference(summary: dict[str, Any]) -> list[str]:
    """Return the top-level fields in which a summary differs after being read and written."""
    before = _without_defaults(json.loads(json.dumps(summary)))
    after = _without_defaults(json.loads(json.dumps(to_json(read_summary(summary)))))
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
