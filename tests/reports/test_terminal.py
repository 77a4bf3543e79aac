"""The terminal's findings at 80 and 160 columns, without colour."""

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from ampacity.analysis.contract.summary import Audit, Summary, read_summary
from ampacity.reports.pages.findings import error_bound
from ampacity.reports.pages.terminal import render_table
from tests.support.contract import blank
from tests.support.sample_summary import ALL, no_slos, one_stage, open_sweep


def rendered(summary: dict[str, Any], width: int) -> str:
    out = io.StringIO()
    render_table(
        read_summary(summary), Console(file=out, width=width, no_color=True, force_terminal=False)
    )
    return out.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("name", ALL)
def test_no_line_is_wider_than_the_console_and_the_verdict_is_first(name: str, width: int) -> None:
    summary = ALL[name]()
    text = rendered(summary, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert words(text).startswith(words(summary["verdict"]))
    assert "\x1b" not in text
    assert "…" not in text


def table_rows(text: str, count: int) -> list[list[str]]:
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("load"))
    return [line.split() for line in lines[head + 2 : head + 2 + count]]


def test_all_columns_at_160() -> None:
    text = rendered(open_sweep(), 160)
    rows = table_rows(text, 8)
    assert (
        rows[1] == "2 req/s 2.00 5.60 11 112 ms 319 ms 28.9 ms 9.09 s 2.00 0 of 600 yes met".split()
    )
    assert rows[0][7] == "–¹"
    assert rows[0][-1] == rows[6][-1] == "inconclusive²"
    assert rows[7][-2:] == ["no⁴", "violated"]
    assert "⁴ requests in flight grow by 2.0 a second" in text
    assert "Left out" not in text


def test_columns_are_dropped_by_priority_at_80_and_said() -> None:
    text = rendered(open_sweep(), 80)
    assert table_rows(text, 2)[1] == "2 req/s 2.00 319 ms 28.9 ms 2.00 0 of 600 yes met".split()
    assert "Left out at this width: in flight, at most, TTFT p50, E2E p99" in text


def test_errors_and_cut_off_requests_are_shown_at_80_columns() -> None:
    summary = open_sweep()
    for each in summary["stages"]:
        each |= {"requests": 12600, "offered_rps": each["offered_rps"] * 1000}
    summary["stages"][7]["errors"] |= {"unfinished": 1200}
    summary["errors"] |= {"unfinished": 1200}
    text = rendered(summary, 80)
    assert "27 of 12,600" in text
    assert "1,200" in table_rows(text, 8)[7]
    left_out = next(line for line in text.splitlines() if line.startswith("Left out"))
    assert "errors" not in left_out
    assert "cut off" not in left_out
    expected = "Errors 27 of 4,320 requests of the whole run; 1,200 cut off unfinished timeout 27"
    assert expected in words(text)
    summary["errors"] = {"unfinished": 5}
    expected = "Errors 0 of 4,320 requests of the whole run; 5 cut off unfinished"
    assert expected in words(rendered(summary, 160))


def test_footnotes_of_dropped_columns_are_dropped_and_the_rest_renumbered() -> None:
    summary = one_stage()
    summary["stages"][0]["ttft_from_schedule_s"] |= {
        "p50": None,
        "p50_reason": "only at 160 columns",
    }
    wide, narrow = rendered(summary, 160), rendered(summary, 80)
    assert "¹ only at 160 columns" in wide
    assert "only at 160 columns" not in narrow
    assert "¹ needs 299 requests, has 40" in narrow


def test_key_figures_warnings_and_errors() -> None:
    text = words(rendered(open_sweep(), 160))
    assert "Capacity 6.40 req/s (interval 6.00 to 7.00 req/s)" in text
    assert "Fleet 25 instances (24 to 26), 100 GPUs" in text
    assert "Errors 27 of 4,320 requests of the whole run timeout 27" in text
    assert (
        "Warning [undecided_stage] The stage at 7 req/s is inconclusive: 900 more requests would"
        in text
    )
    assert "Goodput peak – no SLO was given (--slo)" in words(rendered(no_slos(), 160))


def test_partial_and_predicted_are_said_before_any_figure() -> None:
    lines = rendered(
        open_sweep() | {"partial": "interrupted at stage 3", "predicted": True}, 160
    ).splitlines()
    assert lines[1] == "Partial: interrupted at stage 3"
    assert lines[2].startswith("Predicted:")


def test_hostile_text_is_neither_markup_nor_an_escape_sequence() -> None:
    text = rendered(open_sweep() | {"verdict": "[red]m[/red] \x1b[2J"}, 80)
    assert text.startswith("[red]m[/red] \ufffd[2J")


def test_the_client_s_own_error_stands_beside_the_percentiles() -> None:
    def bound(**audit: Any) -> str | None:
        return error_bound(read_summary(blank(Summary) | {"audit": blank(Audit) | audit}))

    lags = {"receive_delay_p99_s": 0.0004, "loop_lag_p99_s": 0.002}
    assert bound(**lags) == (
        "The load generator adds at most 400 µs to 99 of 100 of these times (p99 of read time − "
        "kernel time, worst stage)."
    )
    assert bound(**lags, dated_by_kernel=True, coalesced_share=0.0002) == (
        "Timestamps come from the kernel: the client's read delay is excluded. 0.0200% of the "
        "tokens were coalesced with the one before, a gap of 0 (worst stage)."
    )
    assert "one reading of a hundred 2.00 ms or more" in str(bound(loop_lag_p99_s=0.002))
    assert bound() is None
