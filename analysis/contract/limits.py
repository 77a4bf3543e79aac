"""Limits of the endpoint, and what to try: the ``limits`` of summary.json."""

from __future__ import annotations

from typing import Literal

from ampacity.analysis.contract.part import Part


class Quota(Part, frozen=True, kw_only=True):
    """The requests or tokens a minute that the endpoint accepts before it answers 429.

    ``binds``: it is met at a lower load than the SLOs' limit, so no capacity of the hardware is
    known. ``stated``: by the answers' headers, in ``stated_window_s`` where they say so.
    """

    text: str
    unit: Literal["requests", "tokens"]
    per_min: float | None
    reason: str | None
    stated: float | None
    stated_window_s: float | None
    refused: int
    binds: bool


class Evidence(Part, frozen=True, kw_only=True):
    """A figure that a rule read; ``stage``: the name of the stage that it comes from.

    ``unit``: ``share`` (of 1), ``s``, or empty where the figure names its own.
    """

    figure: str
    value: float | str | None
    stage: str | None
    unit: str


class Limit(Part, frozen=True, kw_only=True):
    """The answer of one rule. ``holds`` None: it cannot tell, ``reason`` names what is missing.

    ``strength``: figure / threshold of a rule that holds, for ranking; 0 otherwise. ``tested``: what
    this run shows of what would refute it, and ``refuted`` whether it did; None: open.
    """

    rule: str
    holds: bool | None
    title: str
    lever: str
    refuted_by: str
    evidence: tuple[Evidence, ...]
    tested: tuple[Evidence, ...]
    refuted: bool | None
    strength: float
    reason: str | None = None
