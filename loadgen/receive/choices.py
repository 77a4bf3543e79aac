"""Tell one choice, as requested, from several in one stream."""

from typing import Any


class ChoiceOrder:
    """Follows the ``index`` and the finish reasons of the choices of one answer.

    A server that numbers the tokens of its one choice by ``index``, as TGI did, has about as many
    indices as chunks; one that sends several choices returns to an index. Where a gateway drops
    the index, text of another choice comes after a finish reason.
    """

    latest: Any = None  # index of the latest choice with text
    several = False
    finishes = 0
    _indices: set[int | str] | None = None  # filled once there are several
    _finished: Any = None
    _finished_at = 0  # number of chunks at the latest finish reason
    _later_finishes = 0  # finish reasons after further text

    def on_text(self, index: Any, earlier_chunks: int, in_one_chunk: bool) -> None:
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

    def on_finish(self, index: Any, chunks: int) -> None:
        """Take the index of a choice with a finish reason, after this many chunks with text."""
        if self.finishes:
            self.several = self.several or self._finished != (index or 0)
            self._later_finishes += chunks > self._finished_at
        self._finished, self._finished_at = index or 0, chunks
        self.finishes += 1

    def finish(self, chunks: int) -> None:
        """End the answer, which has this many chunks.

        Where nearly every chunk has another index or a finish reason, these mean nothing.
        """
        indices = len(self._indices or ())
        self.several = self.several or 1 < indices <= chunks / 2
        self.several = self.several or 0 < self._later_finishes <= chunks / 2

    def may_be_several(self, tokens: int | None, requested: int | None) -> bool:
        """Tell whether an answer with several finish reasons and no index is too long for one."""
        return self.finishes > 1 and self.latest is None and (tokens or 0) > (requested or 2**31)


def _number(index: Any) -> int | str:
    return index if isinstance(index, int | str) else 0  # one without a number is the first
