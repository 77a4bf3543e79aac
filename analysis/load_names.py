"""One name for a stage in every output: its load, and its number where another shares it."""

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from ampacity.analysis.contract.stage import Stage
from ampacity.loadgen.rundir.meta import StageMeta


def load_name(rate_rps: float | None, users: float | None = None, index: object = "?") -> str:
    """Return the name of a load: ``12.5 req/s``, ``16 users``; ``stage 3`` where it is unknown."""
    if rate_rps is not None:
        return f"{_four_digits(rate_rps)} req/s"
    return f"stage {index}" if users is None else f"{_four_digits(users)} users"


def planned_name(meta: StageMeta) -> str:
    """Return the name of the load of an entry of run.json's stages."""
    return load_name(meta.offered_rps, meta.concurrency, meta.index)


def name_stages(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages with their names: the load, and the ``index`` of those that share it."""
    names = [load_name(s.offered_rps, s.concurrency_set, s.index) for s in stages]
    shared = Counter(names)
    return [
        structs.replace(s, name=f"{name} (stage {s.index})" if shared[name] > 1 else name)
        for s, name in zip(stages, names, strict=True)
    ]


def _four_digits(value: float) -> str:
    return f"{float(f'{value:.4g}'):,.10g}"
