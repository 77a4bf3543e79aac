"""Note what is in flight, so that a kill does not lose it: a server that hangs ends no request."""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
import pyarrow as pa

from ampacity.loadgen.plan import Ints, StagePlan
from ampacity.loadgen.receive.exchange import Exchange

Note = tuple[str, pa.RecordBatch]  # the name of its file, and its rows
_SEEN = ("scheduled_ns", "dispatched_ns", "started_ns", "first_token_ns", "attempt", "target")
_FIRST = _SEEN.index("first_token_ns")
_PLANNED = ("session", "turn", "class_index", "numbers", "input_tokens", "output_tokens")


class InFlightNotes:
    """Notes the requests in flight of one stage; each is looked at until it has a token."""

    def __init__(
        self,
        plan: StagePlan,
        in_flight: Mapping[Exchange, int],
        targets: Sequence[str | None],
        worker: int,
    ) -> None:
        """``in_flight``: of each its index in the schedule."""
        self._plan, self._in_flight, self._targets = plan, in_flight, targets
        self._worker = worker
        # by index in the schedule; 0: none, and no memory until it is written
        self._seen = np.zeros((len(plan.schedule), len(_SEEN)), dtype=np.int64)

    def forget(self, index: int) -> None:
        """Look at a request anew: it is sent again."""
        self._seen[index, _FIRST] = 0

    def take(self) -> Note:
        """Return a row for each request in flight now; -1 stands for what it has not."""
        at = np.fromiter(self._in_flight.values(), np.int64, len(self._in_flight))
        waiting = self._seen[at, _FIRST] == 0
        if waiting.any():
            looked = [self._look(e) for e in compress(self._in_flight, waiting.tolist())]
            self._seen[at[waiting]] = looked
        schedule, seen = self._plan.schedule, self._seen[at]
        seen[:, : _FIRST + 1][seen[:, : _FIRST + 1] == 0] = -1
        columns = dict(zip(_SEEN, seen.T, strict=True))
        for name in _PLANNED:
            column = getattr(schedule, name)
            columns[name] = np.full(len(at), -1) if column is None else column[at]
        number = at if schedule.numbers is None else columns["numbers"]
        columns["numbers"] = schedule.first_request_id + number
        facts = {
            **{"stage": self._plan.index, "worker": self._worker},
            **{"ended_ns": time.monotonic_ns()},
            **{"targets": self._targets, "classes": schedule.class_names},
        }
        arrays = [*map(_as_arrow, columns.values()), _in_first_row(json.dumps(facts), len(at))]
        batch = pa.RecordBatch.from_arrays(arrays, [*columns, "facts"])
        return f"in-flight-{self._plan.index}-{self._worker}.arrows", batch

    def _look(self, exchange: Exchange) -> tuple[int, ...]:
        record, target = exchange.record, self._targets.index(exchange.record.target)
        dispatched_ns, started_ns = record.dispatched_ns or 0, record.started_ns or 0
        first_ns = exchange.first_token_ns or 0
        return record.scheduled_ns, dispatched_ns, started_ns, first_ns, record.attempt, target


def _as_arrow(values: Ints) -> pa.Array:
    # ``pa.array`` would import pandas, where there is one
    data = pa.py_buffer(np.ascontiguousarray(values, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), len(values), [None, data])


def _in_first_row(text: str, rows: int) -> pa.Array:
    """Return a column with a text in its first row, and nothing below."""
    data = text.encode()
    ends = np.full(rows + 1, len(data), dtype=np.int32)
    ends[0] = 0
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])
