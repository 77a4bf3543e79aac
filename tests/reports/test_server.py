"""The table of the server's own metrics."""

from __future__ import annotations

from ampacity.reports.render.tables import server_table


def test_only_the_columns_that_a_stage_knows_are_shown() -> None:
    stages = [
        {
            "kind": "open",
            "offered_rps": 2.0,
            "server": {
                "samples": 9,
                "running": 4.0,
                "kv_cache_usage_max": 0.5,
                "preemptions": None,
            },
        },
        {
            "kind": "open",
            "offered_rps": 4.0,
            "server": {
                "samples": 9,
                "running": 12.25,
                "kv_cache_usage_max": None,
                "preemptions": 3.0,
                "gpu_memory_used_bytes": 3 * 2**30,
            },
        },
        {"kind": "open", "offered_rps": 8.0, "server": None},
    ]
    table = server_table({"stages": stages})
    assert table is not None
    assert [c.head for c in table.columns] == [
        "load",
        "running",
        "KV cache",
        "preemptions",
        "GPU memory",
    ]
    assert [[c.text for c in row][1:] for row in table.rows] == [
        ["4.00", "50.0%", "–", "–"],
        ["12.2", "–", "3", "3.00"],
    ]
    assert table.notes == ["not on its page"]


def test_without_samples_there_is_no_table() -> None:
    assert server_table({"stages": [{"kind": "open", "offered_rps": 2.0, "server": None}]}) is None
