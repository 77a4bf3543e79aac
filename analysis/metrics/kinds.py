"""Name how requests end, in a summary: the statuses of the records, with HTTP errors by their code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.loadgen.rundir.records import FAILED_STATUSES, STATUSES

# Of equal fit the first counts. An ``http_error`` is left only where its code is not known.
HTTP_KINDS: dict[str, tuple[range, ...]] = {
    "rate_limited": (range(429, 430), range(529, 530)),
    "auth": (range(401, 402), range(403, 404), range(407, 408)),
    "overloaded": (range(503, 504),),
    "redirect": (range(300, 400),),
    "bad_request": (range(400, 500),),
    "upstream": (range(500, 600),),
}
KINDS = (*STATUSES, *HTTP_KINDS)
FAILED_KINDS = FAILED_STATUSES | HTTP_KINDS.keys()
REFUSED = {"rate_limited", "auth", "bad_request"}
"""Kinds that are answers of an endpoint that is alive."""


def kinds_of(table: pa.Table) -> npt.NDArray[Any]:
    """Return the kind of each row as an index into ``KINDS``; -1 for an unknown status."""
    found = pc.fill_null(pc.index_in(table["status"], value_set=pa.array(STATUSES)), -1)
    kinds = np.array(found.to_numpy(), dtype=np.int64)
    errors = np.flatnonzero(kinds == STATUSES.index("http_error"))
    codes = pc.fill_null(table["http_status"].take(pa.array(errors)), 0).to_numpy()
    for kind, ranges in reversed(HTTP_KINDS.items()):
        within = np.any([(codes >= r.start) & (codes < r.stop) for r in ranges], axis=0)
        kinds[errors[within]] = KINDS.index(kind)
    return kinds
