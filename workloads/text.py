"""Text of files as people write them: UTF-8 or UTF-16, with bytes that are neither, and halves of characters."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_NOT_TEXT = re.compile("[\ud800-\udfff]")
DECODE_ERRORS = "surrogateescape"  # a byte that is no UTF-8 becomes one of U+DC80 to U+DCFF: its row can be named
BROKEN_BYTES = "a byte that is no UTF-8"


def encoding_of(head: bytes) -> str:
    """The encoding that the first bytes of a file say, else UTF-8."""
    return "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def is_broken(text: str) -> bool:
    """Whether ``text`` holds what cannot be sent or written: an undecoded byte, or half of a surrogate pair."""
    return not text.isascii() and _NOT_TEXT.search(text) is not None


def mended(value: Any) -> Any:
    """A value of JSON with U+FFFD for each half of a surrogate pair; the same object where there is none."""
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


def counting_pairs(twice: Counter[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """For ``object_pairs_hook`` of json: the last of each key; ``twice`` counts the keys that stand twice in an object."""

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            twice.update(name for name, times in names.items() if times > 1)
        return found

    return whole


def twice_notes(name: str, twice: Counter[str]) -> Iterator[str]:
    """One line for each key that stood twice in an object of the file ``name``."""
    for key, count in twice.items():
        yield f"{name}: the key {mended(key)} stands twice in an object, {count} times: the last one is taken"
