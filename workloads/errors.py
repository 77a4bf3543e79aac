"""The one error of this room."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A workload that cannot be used; the message is one printable line that says what, where and how to mend it."""

    def __init__(self, message: str) -> None:
        # what it quotes comes from files: control characters are shown, not sent to the terminal
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))
