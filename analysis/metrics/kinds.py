"""Name how requests end, in a summary: the statuses of the records, with HTTP errors by their code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.loadgen.rundir.records import FAILED_KINDS, KINDS, REFUSED, STATUSES, kind_of

__all__ = ["FAILED_KINDS", "KINDS", "REFUSED", "kinds_of"]


def kinds_of(table: pa.Table) -> npt.NDArray[Any]:
    """Return the kind of each row as an index into ``KINDS``; -1 for an unknown status."""
    found = pc.fill_null(pc.index_in(table["status"], value_set=pa.array(STATUSES)), -1)
    kinds = np.array(found.to_numpy(), dtype=np.int64)
    errors = np.flatnonzero(kinds == STATUSES.index("http_error"))
    codes = pc.fill_null(table["http_status"].take(pa.array(errors)), 0).to_numpy()
    each, which = np.unique(codes, return_inverse=True)
    numbers = [KINDS.index(kind_of("http_error", int(code))) for code in each]
    kinds[errors] = np.array(numbers, dtype=np.int64)[which]
    return kinds
