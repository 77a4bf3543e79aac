"""Texts with half of a character: JSON may write a character above U+FFFF as two escapes, and a text may hold only one."""

from __future__ import annotations

import re
from typing import Any

ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # in JSON: of a pair, or alone
_HALF = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """``text`` with halves that meet made one character; one that stays alone becomes U+FFFD."""
    if not _HALF.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def with_whole_characters(value: Any) -> Any:
    """A JSON value, each of its texts as ``whole_characters`` gives it."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [with_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(k): with_whole_characters(v) for k, v in value.items()}
    return value
