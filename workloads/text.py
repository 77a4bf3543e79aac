"""Decode text files: UTF-8 or UTF-16, with undecodable bytes and lone surrogates."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_NOT_TEXT = re.compile("[\ud800-\udfff]")
# An undecodable byte becomes one of U+DC80 to U+DCFF, so that its row can be named.
DECODE_ERRORS = "surrogateescape"
BROKEN_BYTES = "a byte that is no UTF-8"


def encoding_of(head: bytes) -> str:
    """Return UTF-8, UTF-16 or UTF-32, by a file's byte order mark or by where its zeros are."""
    return json.detect_encoding(head[:4])


def is_broken(text: str) -> bool:
    """Return whether ``text`` holds an undecodable byte or a lone surrogate."""
    return not text.isascii() and _NOT_TEXT.search(text) is not None


def mended(value: Any) -> Any:
    """Return a JSON value with U+FFFD for each lone surrogate; the same object without one."""
    if isinstance(value, str):
        return _NOT_TEXT.sub("\ufffd", value) if is_broken(value) else value
    if isinstance(value, list):
        found = [mended(item) for item in value]
        return value if all(a is b for a, b in zip(found, value, strict=True)) else found
    if isinstance(value, dict):
        pairs = {mended(key): mended(item) for key, item in value.items()}
        same = all(a is b for a, b in zip(pairs.values(), value.values(), strict=False))
        return value if same and pairs.keys() == value.keys() else pairs
    return value


def counting_pairs(duplicates: Counter[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an ``object_pairs_hook`` for json that counts repeated keys; the last value wins."""

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            duplicates.update(name for name, times in names.items() if times > 1)
        return found

    return whole


def duplicate_key_notes(name: str, duplicates: Counter[str]) -> Iterator[str]:
    """Yield one line for each key repeated within an object of the file ``name``."""
    for key, count in duplicates.items():
        yield (
            f"{name}: the key {mended(key)} stands twice in an object, {count} times: "
            "the last one is taken"
        )
