"""Limits of the endpoint, and what to try: the ``limits`` of summary.json."""

from __future__ import annotations

from ampacity.analysis.contract.part import Part


class Evidence(Part, frozen=True, kw_only=True):
    """A figure that a rule read; ``stage``: the name of the stage that it comes from."""

    figure: str
    value: float | str | None
    stage: str | None


class Limit(Part, frozen=True, kw_only=True):
    """The answer of one rule. ``holds`` None: it cannot tell, ``reason`` names what is missing.

    ``strength``: figure / threshold of a rule that holds, for ranking; 0 otherwise.
    """

    rule: str
    holds: bool | None
    title: str
    lever: str
    refuted_by: str
    evidence: tuple[Evidence, ...]
    strength: float
    reason: str | None = None
