"""Good answers that are not what they seem: cut off, with impossible counts, of another model."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.metrics.cohort import LONG
from ampacity.analysis.metrics.requests import PARTS, Bools, Requests, unseen
from ampacity.loadgen.rundir.records import CACHE, THEN, came_together

# of the usual length: a shorter answer without a finish reason may have been cut off
CUT_SHARE = 0.5
CUT_ALIKE = 0.1
LOST_SHARE = 0.9  # of the uncounted answers that came behind the last counted one
_BY_ITSELF = ("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete")
_BY_CALL = ("tool_calls", "tool_use", "function_call")
_BY_LIMIT = ("length", "max_tokens", "max_output_tokens", "model_length")
ENDINGS = frozenset((*_BY_ITSELF, *_BY_CALL, *_BY_LIMIT))
"""Finish reasons of whole answers."""

CONTRADICTED = "fewer tokens than chunks came, or others than asked for where as many chunks came"


@dataclass(frozen=True)
class OddAnswers:
    """Numbers of odd answers among ``good`` ones."""

    good: int = 0
    cut_short: tuple[int, int] = (0, 0)  # (may have been cut off, those looked at)
    unseen: int = 0  # of several tokens, none of which was sent
    impossible: dict[str, int] = field(default_factory=dict)  # by what is wrong
    strangers: dict[str, int] = field(default_factory=dict)  # by who answered
    endings: dict[str, int] = field(default_factory=dict)  # by a finish reason not in ENDINGS
    whole: int = 0  # of LONG tokens or more, that came in one piece
    usage_lost_ns: float | None = None  # when the first was due from which on none has a count


def odd_answers(table: pa.Table, requests: Requests, asked: Collection[str]) -> OddAnswers:
    """Return the odd ones among the good answers; ``asked``: the models that were asked for."""
    good = requests.take(requests.has_status("ok"))
    rows = pa.array(good.row)
    impossible = {
        f"more {part.replace('_', ' ')} than {whole.replace('_', ' ')}": pc.sum(
            pc.greater(table[part].take(rows), table[whole].take(rows))
        ).as_py()
        for part, whole in PARTS.items()
    }
    sources = table["token_source"].take(rows)
    by_server = pc.fill_null(pc.not_equal(sources, "chunks"), False).to_numpy()
    impossible[CONTRADICTED] = int(np.count_nonzero(good.uncounted & by_server))
    return OddAnswers(
        len(rows),
        cut_short(table, requests),
        int(np.count_nonzero(unseen(requests))),
        {what: n for what, n in impossible.items() if n},
        strangers_of(text_counts(table["answered_by"].take(rows)), asked),
        {
            reason: n
            for reason, n in text_counts(table["finish_reason"].take(rows)).items()
            if reason.lower() not in ENDINGS
        },
        _whole(good),
        _usage_lost_ns(good, pc.fill_null(pc.equal(sources, "chunks"), False).to_numpy()),
    )


def _usage_lost_ns(good: Requests, by_chunks: Bools) -> float | None:
    """Return from when on nothing is counted, where nearly all that is not counted came then."""
    order = np.argsort(good.scheduled_ns)
    lost = by_chunks[order]
    first = int(np.flatnonzero(~lost)[-1]) + 1 if not lost.all() else 0
    if not lost[first:].size or lost[first:].size < LOST_SHARE * np.count_nonzero(lost):
        return None
    return float(good.scheduled_ns[order][first])


def _whole(good: Requests) -> int:
    lasts_s = (good.last_token_ns - good.started_ns) * 1e-9
    span_s = (good.last_token_ns - good.first_token_ns) * 1e-9
    is_whole = came_together(span_s, lasts_s, good.output_tokens)
    return int(np.count_nonzero(is_whole & (good.output_tokens >= LONG)))


def text_counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Return the number of each text, the most frequent first."""
    found = Counter({v["values"]: v["counts"] for v in pc.value_counts(column).to_pylist()})
    return {text: n for text, n in found.most_common() if text is not None}


def models_asked(meta: Mapping[str, Any]) -> set[str]:
    """Return the models that a run asked for; ``meta``: run.json."""
    classes = (meta.get("workload") or {}).get("classes") or []
    models = [name for kind in classes for name in kind.get("models") or []]
    return {*models, str((meta.get("endpoint") or {}).get("model"))}


def strangers_of(answered_by: dict[str, int], asked: Collection[str]) -> dict[str, int]:
    """Return the answers by others than the models that were asked for.

    One other name for each model is an alias, unless some answers have the model's own.
    """
    names = {name for name in answered_by if name != CACHE and THEN not in name}
    others = names - set(asked)
    if not (others and names & set(asked)) and len(others) <= len(asked):
        others = set()
    return {name: n for name, n in answered_by.items() if name in {*others, CACHE} or THEN in name}


def cut_short(table: pa.Table, requests: Requests) -> tuple[int, int]:
    """Return (answers that may have been cut off, all good answers).

    The former have no finish reason and less than half of the usual chunks for their plan. Usual is
    the median of those that have a finish reason; where none has one, of all, if most of them are
    about as long.
    """
    good = requests.take(requests.has_status("ok") & (requests.output_tokens_planned > 0))
    ended = pc.is_valid(table["finish_reason"]).to_numpy(zero_copy_only=False)[good.row]
    share = good.chunks / good.output_tokens_planned
    if not len(share) or ended.all():
        return 0, len(share)
    usual = float(np.median(share[ended] if ended.any() else share))
    if not ended.any() and np.mean(np.abs(share - usual) <= CUT_ALIKE * usual) <= 0.5:
        return 0, len(share)  # they end where the model ends them
    return int(np.count_nonzero((good.chunks > 0) & ~ended & (share < CUT_SHARE * usual))), len(
        share
    )
