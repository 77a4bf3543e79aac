"""The table of the server's own metrics."""

import json
from typing import Any

from ampacity.analysis.contract.stage import Server
from ampacity.analysis.contract.summary import read_summary
from ampacity.reports.render.table import Table
from ampacity.reports.render.tables import server_table
from tests.support.contract import blank
from tests.support.sample_summary import one_stage, stage


def table_of(*servers: dict[str, Any] | None) -> Table | None:
    stages = [
        stage(i, float(2**i), 0.1, 1.0, server=held and blank(Server) | held)
        for i, held in enumerate(servers)
    ]
    return server_table(read_summary(one_stage() | {"stages": stages}))


def test_only_the_columns_that_a_stage_knows_are_shown() -> None:
    table = table_of(
        {"samples": 9, "running": 4.0, "kv_cache_usage_max": 0.5},
        {"running": 12.25, "preemptions": 3.0, "gpu_memory_used_bytes": 3 * 2**30},
        None,
    )
    assert [c.head for c in table.columns] == json.loads("""["load", "running", "KV cache",
        "preemptions", "GPU memory"]""")
    assert [[c.text for c in row][1:] for row in table.rows] == [
        ["4.00", "50.0%", "–", "–"],
        ["12.2", "–", "3", "3.00"],
    ]
    assert table.notes == ["not on its page"]


def test_without_samples_there_is_no_table() -> None:
    assert table_of(None) is None
