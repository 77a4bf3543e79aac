"""The error of this package, and checks of a workload file's keys and numbers."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class WorkloadError(ValueError):
    """A workload that cannot be used; one printable line with the problem, place and remedy."""

    def __init__(self, message: str) -> None:
        # what it quotes comes from files: control characters are shown, not sent to the terminal
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``" (did you mean x?)"`` for a close match of ``word`` in ``known``, or ""."""
    close = get_close_matches(str(word).lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_keys(spec: object, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return ``spec`` as a dict. Raises WorkloadError for no mapping, or a key not in ``known``."""
    if not isinstance(spec, Mapping):
        raise WorkloadError(f"{where}: this is no mapping; write lines such as 'input_tokens: 512'")
    for key in spec:
        if key not in known:
            hint = did_you_mean(key, known)
            raise WorkloadError(
                f"{where}: key {key!r} is not known{hint}: the keys are {', '.join(known)}"
            )
    return dict(spec)


def number_between(value: object, what: str, least: float, most: float) -> float:
    """Return a number. Raises WorkloadError that names the value ``what``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise WorkloadError(f"{what} is {value!r}: give a number from {least:g} to {most:g}")
    return float(value)


def whole_between(value: object, what: str, least: int, most: int) -> int:
    """Return a whole number. Raises WorkloadError that names the value ``what``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise WorkloadError(f"{what} is {value!r}: give a whole number from {least} to {most}")
    return value
