"""Collect the block ids (``hash_ids``) of prompts as integers."""

import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.traces.trace import Blocks
from ampacity.workloads.traces.values import has

_ID_MAX = 1 << 40
_NO_LIST = "rows have hash_ids that are no list: no blocks are known of their prompts"
_ODD = "rows have hash_ids with members that are"
_NOT_WHOLE = f"{_ODD} no whole numbers: 5.0 is taken for the id 5, others for none"


class BlockIds:
    """Chains of block ids, row by row. ``notes`` counts the rows of each kind of odd id."""

    def __init__(self) -> None:
        self._ids, self._start = array("q"), array("q", [0])
        self._names: dict[str, int] = {}
        self._scopes: dict[str, int] = {}
        self.notes: Counter[str] = Counter()
        self.first_odd: dict[str, str] = {}  # the first example of each note

    def add(self, record: Mapping[str, Any], column: str, where: str) -> None:
        """Add the chain of one row; ``where`` names the row in the notes."""
        ids = record.get(column)
        if isinstance(ids, str):
            try:
                ids = json.loads(ids)
            except (ValueError, RecursionError):
                ids = None
        if not isinstance(ids, list) and has(record, column):
            self.notes[_NO_LIST] += 1
        base = 0
        if record.get("hash_id_scope") == "local":
            scope = str(record.get("session")).partition("/")[0]
            base = (self._scopes.setdefault(scope, len(self._scopes)) + 1) << 40
        odd: dict[str, Any] = {}  # the first of each kind in this row
        for block in ids if isinstance(ids, list) else ():
            if type(block) is int and 0 <= block < _ID_MAX:  # fast path
                self._ids.append(base + block)
            elif kind := self._add_odd(block, base):
                odd.setdefault(kind, block)
        for kind, block in odd.items():
            self.notes[kind] += 1
            self.first_odd.setdefault(kind, f"{where}: {block!s:.20}")
        self._start.append(len(self._ids))

    def _add_odd(self, block: object, base: int) -> str:
        """Add an id that is not a small integer; return what is odd about it, or ""."""
        number, kind = _parse_block(block)
        if isinstance(number, int) and 0 <= number < _ID_MAX:
            self._ids.append(base + number)
        else:  # an invalid id becomes a block of its own, which no other row shares
            name = str(number) if number is not None else f"{len(self._ids)} is none"
            self._ids.append(~self._names.setdefault(name, len(self._names)))
        return kind

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of blocks of each row."""
        start = np.frombuffer(self._start, dtype=np.int64)
        return start[1:] - start[:-1]

    def blocks(self, kept: NDArray[np.int64] | None = None) -> Blocks | None:
        """Return the chains of the rows ``kept`` (None: all), or None where no row has any."""
        if not self._ids:
            return None
        chains = Blocks(np.array(self._ids, np.int64), np.array(self._start, np.int64))
        return chains if kept is None else chains.take(kept)


def _parse_block(block: object) -> tuple[int | str | None, str]:
    """Return (the id as a number or a name, None where invalid; what is odd about it, or "")."""
    if isinstance(block, int) and not isinstance(block, bool):
        return block, "" if block >= 0 else f"{_ODD} negative numbers: they are taken for ids"
    if isinstance(block, str) and block.strip():
        digits = block.isdecimal() and block.isascii() and len(block) < 19
        return int(block) if digits else f"text {block}", f"{_ODD} texts: they are taken for ids"
    if isinstance(block, Decimal | float):
        whole = math.isfinite(block) and block == int(block)
        return int(block) if whole else None, _NOT_WHOLE
    return None, f"{_ODD} none (null, lists, objects): nothing is shared from there on"
