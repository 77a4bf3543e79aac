"""A run directory as pandas DataFrames, and any percentile with its interval (docs/python.md).

Times of events are in seconds after the start of the run (``*_at_s``), durations in seconds
(``*_s``). What did not happen is NaN or <NA>.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.contract.summary import Summary, to_json
from ampacity.analysis.load_names import planned_name
from ampacity.analysis.metrics.chunks import read_chunks, tpot_s
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.observations import Observations
from ampacity.analysis.metrics.percentiles import LEVELS
from ampacity.analysis.metrics.requests import e2e_s, first_answer_s, ttft_s
from ampacity.analysis.stage.analyse import RunRecords, stage_records
from ampacity.analysis.stage.client import figure_without_client, without_client
from ampacity.analysis.summary import read_stages, summarise, warmup_of
from ampacity.experiments.windows import summarise_soak
from ampacity.loadgen.rundir.files import Run as RunDirectory
from ampacity.loadgen.rundir.files import RunDirError, load_run
from ampacity.loadgen.rundir.lists import LISTS
from ampacity.loadgen.rundir.meta import StageMeta

if TYPE_CHECKING:
    from collections.abc import Iterable

_NULLABLE = {
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.string(): pd.StringDtype(),
}


def load(path: str | Path) -> Run:
    """Read a run directory: complete, killed or still running.

    Raises RunDirError (a ValueError of one line) where it is none.
    """
    return Run(run_path(path))


def run_path(run: str | Path | Run) -> Path:
    """Return the path of a run. Raises RunDirError for what names none."""
    if isinstance(run, Run):
        return run.path
    if not isinstance(run, str | Path):
        raise RunDirError(f"{run!r} is no run directory: give its path")
    return Path(run)


class Run:
    """A run as measured; each table is made when it is first asked for, and kept.

    ``path``: the run directory. ``meta``: run.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory: RunDirectory = load_run(path)
        self.meta: dict[str, Any] = self._directory.meta

    def __repr__(self) -> str:
        return f"ampacity.load({str(self.path)!r})"

    @cached_property
    def summary(self) -> Summary:
        """Return the findings, computed anew: the typed form of summary.json (docs/summary.md)."""
        if self.meta.get("soak"):
            return summarise_soak(self.path, self.meta, keep=False)[1]
        return summarise(self._directory)

    @cached_property
    def _stages(self) -> tuple[list[StageMeta], RunRecords]:
        return read_stages(self._directory)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Return one row for each request and attempt, in the order in which they were due."""
        records = self._stages[1]
        table, r = records.table, records.requests
        times = [name for name in table.column_names if name.endswith("_ns")]
        plain = table.select([n for n in table.column_names if n not in (*LISTS, *times)])
        frame: pd.DataFrame = plain.to_pandas(types_mapper=_NULLABLE.get)
        for name in times:
            after_ns = pc.subtract(table[name], pa.scalar(records.origin_ns, pa.int64()))
            at_ns = after_ns.cast(pa.float64()).to_numpy()
            frame[f"{name.removesuffix('_ns')}_at_s"] = at_ns / 1e9
        frame = frame.iloc[r.row].reset_index(drop=True)
        for from_schedule, suffix in ((False, "_s"), (True, "_from_schedule_s")):
            frame[f"ttft{suffix}"] = ttft_s(r, from_schedule=from_schedule)
            frame[f"first_answer{suffix}"] = first_answer_s(r, from_schedule=from_schedule)
            frame[f"e2e{suffix}"] = e2e_s(r, from_schedule=from_schedule)
        frame["tpot_s"] = tpot_s(r, read_chunks(table, r))[0]
        frame["slip_s"] = frame["dispatched_at_s"] - frame["scheduled_at_s"]
        return frame

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """Return one row for each token-bearing chunk; some 40 bytes each."""
        records = self._stages[1]
        r, chunks = records.requests, read_chunks(records.table, records.requests)
        owner, rows = chunks.owner, self.requests.iloc[chunks.owner].reset_index(drop=True)
        first = chunks.starts[:-1][chunks.count > 0]
        since_s = chunks.at_us / 1e6
        gap_s = np.diff(since_s, prepend=0.0)
        gap_s[first] = np.nan
        tokens = np.ones(len(owner)) if chunks.tokens is None else chunks.tokens.astype(np.float64)
        tokens[~chunks.known[owner]] = np.nan
        return pd.DataFrame(
            {
                **{name: rows[name] for name in ("request_id", "attempt", "stage")},
                "chunk": np.arange(len(owner)) - chunks.starts[owner],
                "at_s": r.started_ns[owner] / 1e9 + since_s,
                "since_start_s": since_s,
                "gap_s": gap_s,
                "tokens": pd.Series(tokens).astype("Int32"),
            }
        )

    @cached_property
    def stages(self) -> pd.DataFrame:
        """Return one row for each stage, with the single figures of summary.json.

        A nested one has a dotted name: ``ttft_from_schedule_s.p99``.
        """
        found = [*self.summary.stages, *(s for f in self.summary.families for s in f.stages)]
        frame = pd.json_normalize([to_json(stage) for stage in found])
        if not len(frame):
            return frame
        nested = [c for c in frame if frame[c].map(lambda value: isinstance(value, list)).any()]
        return frame.drop(columns=nested).sort_values("index", ignore_index=True)

    @cached_property
    def server(self) -> pd.DataFrame:
        """Return the samples of the server's own metrics, about one a second; often none."""
        table = self._directory.server
        if table is None:
            return pd.DataFrame({"at_s": pd.Series(dtype="float64")})
        frame = table.to_pandas()
        frame.insert(0, "at_s", (frame.pop("at_ns") - self._stages[1].origin_ns) / 1e9)
        kept: pd.DataFrame = frame.dropna(axis="columns", how="all")
        return kept

    def percentiles(
        self,
        levels: float | str | Iterable[float | str] = (50, 95, 99),
        *,
        metric: str | None = None,
        stage: int | None = None,
    ) -> pd.DataFrame:
        """Return percentiles of every stage and metric, estimated as those of summary.json are.

        ``levels``: percents (99.9), or ``"min"`` and ``"max"``. ``metric``: only this one, as
        ``ttft_from_schedule_s`` or ``itl_s``. ``stage``: only this index. ``low_s`` and ``high_s``
        are the 95 % interval; NaN is an end that is not known. A value that the requests do not
        support is NaN, with the ``reason``. Raises ValueError for a level beyond 0 to 100, an
        unknown metric or stage.
        """
        levels = [levels] if isinstance(levels, str | int | float) else levels
        wanted = dict(map(_level, levels))
        known = [meta.index for meta in self._stages[0]]
        if stage is not None and stage not in known:
            raise ValueError(f"stage {stage!r}: choose one of {', '.join(map(str, known))}")
        rows = [
            {"stage": meta.index, "load": planned_name(meta), **row}
            for meta in self._stages[0]
            if stage is None or meta.index == stage
            for row in self._percentiles(meta, wanted, metric)
        ]
        return pd.DataFrame(rows, columns=list(_PERCENTILES)).astype(_PERCENTILES)

    def observed(self) -> dict[int, dict[str, Observations]]:
        """Return the samples that each stage is judged by, by stage index and metric."""
        return {meta.index: self._cohorts(meta)[0].observed for meta in self._stages[0]}

    def _percentiles(
        self, meta: StageMeta, levels: dict[str, float], metric: str | None
    ) -> Iterable[dict[str, Any]]:
        cohort, other = self._cohorts(meta)
        if metric is not None and metric not in cohort.observed:
            raise ValueError(f"metric {metric!r}: choose one of {', '.join(cohort.observed)}")
        for name, o in cohort.observed.items():
            if metric not in (None, name):
                continue
            for level, quantile in levels.items():
                without = None if other is None else other.observed[name]
                held = figure_without_client(o, without, quantile)
                low, high = held.ci or (None, None)
                value = {"value_s": held.value, "low_s": low, "high_s": high}
                why = held.reason or held.ci_reason
                yield {"metric": name, "percentile": level, "n": o.n, **value, "reason": why}

    def _cohorts(self, meta: StageMeta) -> tuple[Cohort, Cohort | None]:
        """Return the requests that a stage is judged by, and those without the client's delays."""
        records, complete = self._stages[1], self._directory.complete
        found = stage_records(records, meta, warmup_of(self.meta), run_complete=complete)
        return found.cohort, without_client(found.cohort, meta.audit, records.origin_ns)


_PERCENTILES = {
    "stage": "int64",
    "load": "object",
    "metric": "object",
    "percentile": "object",
    "n": "int64",
    "value_s": "float64",
    "low_s": "float64",
    "high_s": "float64",
    "reason": "object",
}


def _level(level: float | str) -> tuple[str, float]:
    """Return (p99.9, 0.999) of ``99.9`` or ``"p99.9"``, (max, 1) of ``100`` or ``"max"``."""
    if level in LEVELS:
        return str(level), LEVELS[str(level)]
    try:
        quantile = float(Decimal(str(level).removeprefix("p")) / 100)
    except ArithmeticError:
        quantile = -1.0
    if not 0 <= quantile <= 1:
        raise ValueError(f"percentile {level!r}: give a percent from 0 to 100, 'min' or 'max'")
    name = {0.0: "min", 1.0: "max"}.get(quantile, f"p{100 * quantile:g}")
    return level if isinstance(level, str) else name, quantile


def tables(run: Run, levels: Sequence[float | str]) -> dict[str, pd.DataFrame]:
    """Return every table of a run by its name, with percentiles at ``levels``."""
    named = {name: getattr(run, name) for name in ("requests", "stages", "server", "tokens")}
    return {**named, "percentiles": run.percentiles(levels)}
