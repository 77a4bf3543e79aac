"""Goodput per accepted result, where a checker judged the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.figures import by_load, count, load_of, share, significant
from reports.tables import Cell, Column, Table


def accepted_table(summary: Mapping[str, Any]) -> Table | None:
    """One row a stage; None where nobody judged the answers."""
    stages = [
        (s, s["accepted"]) for s in by_load(summary) if (s.get("accepted") or {}).get("requests") is not None
    ]
    table = Table("Accepted answers", [Column("load", text=True), Column("accepted", "inside SLOs")])
    table.columns += [Column("of requests"), Column("goodput", "accepted/s"), Column("output", "tokens/s", 2)]
    table.columns += [Column("unlabelled", "not accepted", 1), Column("a result", "USD", 1)]
    for stage, held in stages:
        unlabelled = held["unlabelled"]
        table.rows.append([
            Cell(load_of(stage)), Cell(count(held["requests"])), table.cell(held, "share", share),
            table.cell(held, "rps", significant), table.cell(held, "output_tokens_per_s", significant),
            Cell(count(unlabelled), state="unsure" if unlabelled else ""),
            table.cell({"cost_per_result_usd_reason": "no price is known (--gpu-hour), or nothing was accepted"} | held, "cost_per_result_usd", significant),
        ])  # fmt: skip
    return table if stages else None
