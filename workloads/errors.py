"""The one error of this room, and the hint that goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WorkloadError(ValueError):
    """A workload that cannot be used; the message is one printable line that says what, where and how to mend it."""

    def __init__(self, message: str) -> None:
        # what it quotes comes from files: control characters are shown, not sent to the terminal
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``" (did you mean x?)"`` where something known is close to ``word``, or nothing."""
    close = get_close_matches(str(word).lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
