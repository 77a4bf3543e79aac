"""Join surrogate pairs: a character above U+FFFF may be two JSON escapes, cut by a gateway."""

import re
from collections.abc import Callable
from typing import Any

ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # in JSON; one of a pair, or alone
_SURROGATE = re.compile("[\ud800-\udfff]")


def join_surrogates(text: str) -> str:
    """Join surrogates that meet; replace lone ones by U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def with_joined_surrogates(value: Any) -> Any:
    """Apply ``join_surrogates`` to every text of a JSON value."""
    return map_texts(value, join_surrogates)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it changed, names of fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): map_texts(item, change) for name, item in value.items()}
    return value
