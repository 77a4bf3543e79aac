"""Whether one choice arrived, as asked for, or several."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any


class ChoiceOrder:
    """Follows the ``index`` of the choices of one answer.

    A server that numbers the tokens of its one choice by ``index``, as TGI did, has about as many
    indices as chunks; one that sends several choices comes back to an index.
    """

    latest: Any = None  # index of the latest choice with text
    several = False
    _indices: set[int | str] | None = None  # filled once there are several
    _finished: Any = None

    def on_text(self, index: Any, earlier_chunks: Sized, in_one_chunk: bool) -> None:
        """Take the index of a choice with text; ``in_one_chunk``: it is not the chunk's first."""
        if in_one_chunk and (index is None or index != self.latest):
            self.several = True
        if index == self.latest:
            return
        previous, self.latest = self.latest, index
        if previous is None and not earlier_chunks:
            return
        before, number = _number(previous), _number(index)
        if number == before:
            return
        if self._indices is None:
            self._indices = {before}
        self.several = self.several or number in self._indices
        self._indices.add(number)

    def on_finish(self, index: Any) -> None:
        """Take the index of a choice with a finish reason."""
        previous, self._finished = self._finished, index or 0
        if previous is not None and previous != self._finished:
            self.several = True

    def finish(self, chunks: int) -> None:
        """End the answer, which has this many chunks."""
        self.several = self.several or 1 < len(self._indices or ()) <= chunks / 2


def _number(index: Any) -> int | str:
    return index if isinstance(index, int | str) else 0  # one without a number is the first
