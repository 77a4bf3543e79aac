"""Numbers in words, key figures and tables, against values written out by hand."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.analysis.contract.burst import Breaker
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.load_names import load_name
from ampacity.reports.charts.burst import _breaker
from ampacity.reports.charts.curves import latency_by_rate
from ampacity.reports.pages.findings import error_bound, findings
from ampacity.reports.render.figures import (
    Finding,
    at_least,
    exact,
    interval,
    quantile_text,
    rate,
    seconds,
    share,
    significant,
    why_null,
)
from ampacity.reports.render.plain import printable
from ampacity.reports.render.tables import (
    METRICS,
    Cell,
    all_percentiles,
    lengths_table,
    percentile_table,
    slo_table,
    stages_table,
)
from ampacity.reports.render.windows import windows_table
from tests.support import sample_summary
from tests.support.contract import blank


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (6.4, "6.40"),
        (0.3514, "0.351"),
        (9.996, "10.0"),
        (99.96, "100"),
        (0.000123, "0.000123"),
        (1234.4, "1,234"),
        (118.49, "118"),
        (-2.5, "-2.50"),
        (999.6, "1,000"),
        (1e7, "10,000,000"),
        (1.7975e308, "1.7975e+308"),  # three digits of it are more than a float holds
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_significant_digits_are_within_half_a_per_cent_and_without_exponent(value: float) -> None:
    text = significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.00501)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.00008, "80.0 µs"),
        (0.0007, "700 µs"),
        (0.0009996, "1.00 ms"),
        (0.4123, "412 ms"),
        (0.9996, "1.00 s"),
        (2.0, "2.00 s"),
        (151.2, "151 s"),
    ],
)
def test_durations_have_the_unit_that_suits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_values_that_were_set_keep_no_trailing_zeros() -> None:
    assert [exact(v) for v in (4.0, 2.5, 120, 0.25, 1000)] == ["4", "2.5", "120", "0.25", "1,000"]


def test_a_share_below_one_never_reads_as_all() -> None:
    assert [
        share(v) for v in (1.0, 0.99999, 0.9995, 0.97, 0.0)
    ] == "100% 99.999% 99.950% 97.0% 0%".split()


def test_an_interval_says_which_side_is_not_known() -> None:
    assert interval([6.0, 7.0]) == "6.00 to 7.00"
    assert interval([6.0, None]) == "from 6.00, no upper bound"
    assert interval([None, 0.5], seconds) == "up to 500 ms"
    assert interval([24.0, None], unit="req/s") == "from 24.0 req/s, no upper bound"
    assert interval([6.0, 7.0], unit="req/s") == "6.00 to 7.00 req/s"
    assert interval(None) is None
    assert interval([None, None]) is None


def test_a_reason_is_the_figures_own_or_that_of_its_object() -> None:
    held = msgspec.convert(
        blank(Percentiles) | {"p99_reason": "few", "reason": "none"}, Percentiles
    )
    assert (why_null(held, "p99"), why_null(held, "p50")) == ("few", "none")
    empty = msgspec.convert(blank(Percentiles), Percentiles)
    assert why_null(empty, "p99") == "this run holds nothing to tell it from"


def test_only_p99_is_marked_by_its_interval() -> None:
    held = {"p50": 0.857, "p99": 0.857, "p99_ci": [0.5, None]}
    read = msgspec.convert(blank(Percentiles) | held, Percentiles)
    assert (quantile_text(read, "p50"), quantile_text(read, "p99")) == ("857 ms", "≥ 857 ms")


def test_the_load_of_a_stage_in_words() -> None:
    assert load_name(4.0) == "4 req/s"
    assert load_name(None, 16) == "16 users"
    assert load_name(None, None, 3) == "stage 3"


def test_control_characters_are_made_harmless() -> None:
    assert printable("a\x1b[31mb\n\x07") == "a\ufffd[31mb\n\ufffd"


def found(summary: dict) -> dict[str, Finding]:
    return {finding.label: finding for finding in findings(read_summary(summary))}


def test_key_figures_of_an_open_sweep() -> None:
    got = found(sample_summary.open_sweep())
    assert got["Capacity"].value == "6.40 req/s"
    assert got["Capacity"].interval == "interval 6.00 to 7.00 req/s"
    assert "interpolated" in got["Capacity"].note
    assert "bound by ttft_p99=2s" in got["Capacity"].note
    assert (got["C_max"].value, got["C_max"].interval) == (
        "34.2 in flight",
        "interval 28.0 to 44.0 in flight",
    )
    assert "open loop" in got["C_max"].note
    assert got["Knee"].value == "31.0 in flight at 6.10 req/s"
    assert got["Knee"].interval == "region 24.0 to 40.0 in flight, 5.40 to 6.70 req/s"
    assert got["Little's Law"].value == "L ÷ λW = 0.990"
    assert (
        got["Little's Law"].note
        == "1 where the number in flight is rate × time; the median of the stages whose queue did not grow to the end"
    )
    assert got["Goodput peak"].value == "6.56 req/s"
    assert got["Fleet"].value == "25 instances (24 to 26), 100 GPUs"
    # 120 / 6.4 = 18.75, 19 × 1.3 = 24.7; 20 are needed below 120 / 19 = 6.32 each, 20 × 1.3 = 26
    sized = "19 instances for the peak of 120 req/s, the rest is reserve (safety factor 1.3); "
    assert got["Fleet"].note.startswith(
        f"{sized}below 6.32 req/s each the peak takes 20, with the reserve 26; "
    )
    priced = "$2.31 per million output tokens if every instance is always full, at 4 GPUs × $2.50/h"
    assert got["Fleet"].note.endswith(priced)
    assert got["Load generator"].value == "kept up, not disturbed"


@pytest.mark.parametrize(("high", "said"), [(7.02, False), (7.03, True)])
def test_what_no_stage_answered_is_called_so(high: float, said: bool) -> None:
    """The stage at 9/s answered the most: 7.02 requests/s."""
    summary = sample_summary.open_sweep()
    summary["capacity"] |= {"crossing": "pooled", "capacity_rps_ci": [6.0, high]}
    interval = str(found(summary)["Capacity"].interval)
    assert interval.endswith("req/s, at most 7.02 answered") is said
    keys = [key.label for key in latency_by_rate(read_summary(summary)).keys]
    assert any(label.endswith(", at most 7.02 answered)") for label in keys) is said


def test_a_cost_stands_beside_its_price_also_where_no_peak_sizes_a_fleet() -> None:
    summary = sample_summary.open_sweep()
    summary["fleet"] |= {
        "instances": None,
        "reason": "no peak rate given (--peak-rps)",
        "tensor_parallel": 1,
    }
    note = found(summary)["Fleet"].note
    assert note == (
        "set a peak in What if? or with --peak-rps; $2.31 per million output tokens if every "
        "instance is always full, at 1 GPU × $2.50/h"
    )


def test_a_null_figure_is_a_dash_with_its_reason() -> None:
    got = found(sample_summary.one_stage())
    assert (got["Capacity"].value, got["Capacity"].note) == ("–", "no stage could be decided")
    assert got["Knee"].note == "one stage only: a knee needs at least four"
    assert got["Fleet"].note == "no peak rate was given (--peak-rps)"
    assert found(sample_summary.no_slos())["Goodput peak"].note == "no SLO was given (--slo)"


def test_a_lower_bound_and_a_limited_client_are_said() -> None:
    summary = sample_summary.open_sweep()
    summary["capacity"]["crossing"] = "lower_bound"
    summary["audit"] |= {"client_limited": True, "client_limited_stages": [6, 7]}
    got = found(summary)
    assert got["Capacity"].value == "at least 6.40 req/s"
    assert got["C_max"].value == "at least 34.2 in flight"
    assert (got["Load generator"].value, got["Load generator"].state) == ("was the limit", "bad")
    assert got["Load generator"].note.startswith(
        "nothing measured at 7 req/s, 9 req/s is a finding"
    )


def test_what_goodput_counts_is_said_where_it_may_differ() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][0]["accepted"] |= {"requests": 3}
    note = found(summary)["Goodput peak"].note
    assert "itl_p99=100ms is applied to the gaps of each request here, and to all gaps of a" in note
    assert note.endswith("whether their answers were right stands under Accepted answers")
    summary["slos"] = [slo for slo in summary["slos"] if slo["metric"] != "itl"]
    assert "gaps" not in found(summary)["Goodput peak"].note


def test_reasons_hold_no_raw_names() -> None:
    summary = sample_summary.open_sweep()
    knee = summary["knee"]
    knee["methods"]["p99_p50_divergence"] |= {
        "concurrency": None,
        "reason": "never reached: p99/p50 of ttft_from_schedule_s",
    }
    assert "p99/p50 divergence: never reached: p99/p50 of TTFT;" in found(summary)["Knee"].note
    knee |= {
        "concurrency": None,
        "rps": None,
        "reason": "bounds: no ceiling is known; ttft_from_schedule_s",
    }
    assert found(summary)["Knee"].note == ("asymptotic bounds: no ceiling is known; TTFT")


def test_a_rate_in_a_label_has_four_digits() -> None:
    assert load_name(11.130434) == "11.13 req/s"


@pytest.mark.parametrize(
    ("open_at", "said"),
    [
        ([2, 2], "opens at 2 waiting"),
        ([0, 0], "opens as soon as a request waits"),
        ([8, 9], "opens at 8 to 9 waiting"),
    ],
)
def test_a_breaker_of_a_short_queue(open_at: list[int], said: str) -> None:
    held = {"open_at": open_at, "max_depth": 3, "acceptable_wait_s": 0.5, "rate_rps": 6.0}
    breaker = _breaker(msgspec.convert(blank(Breaker) | held, Breaker))
    assert breaker.value == said
    assert breaker.note == (
        "at 80 to 90 % of the 3 requests that may wait at most, 6.00 req/s x 0.500 s of acceptable "
        "wait"
    )


def test_a_closed_capacity_is_an_upper_limit_with_its_users() -> None:
    summary = sample_summary.closed_sweep()
    summary["capacity"] |= json.loads("""{"crossing": "saturated", "capacity_rps_ci": [22.2,
        22.2], "capacity_rps": 22.2, "c_max": 9.78, "users": 32}""")
    got = found(summary)
    assert (got["Capacity"].value, got["Capacity"].interval) == ("at most 22.2 req/s", None)
    note = got["Capacity"].note
    assert "users wait for the server: open arrivals violate the SLO at a lower rate" in note
    assert got["C_max"].value == "9.78 in flight"
    assert "mean concurrency of 32 users, who pause" in got["C_max"].note


@pytest.mark.parametrize(
    ("representative", "state"), [(True, "good"), (False, "bad"), (None, "unsure")]
)
def test_the_gap_is_coloured_by_what_it_means(representative: bool | None, state: str) -> None:
    summary = sample_summary.open_sweep()
    summary["littles_law"] |= {
        "representative": representative,
        "gap": 2.67,
        "ceiling_rps": 17.1,
        "reason": None,
    }
    shown = found(summary)["Little's Law"]
    assert (shown.value, shown.state) == ("gap 2.67", state)


def test_a_load_that_was_repeated_is_a_finding() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][6]["offered_rps"] = summary["stages"][5]["offered_rps"]
    summary["audit"] |= {
        "client_limited_stages": [5, 7],
        "repeated_stages": [5],
        "client_limited": True,
    }
    assert found(summary)["Load generator"].note == (
        "nothing measured at 9 req/s is a finding; requests left 700 µs late at p99 in the worst "
        "stage that counts, "
        "its warm-up included; loop lag p99 at most 400 µs; CPU at most 31.0% of a core"
    )
    expected = "(p99 of its loop's lag, worst stage that counts)"
    assert expected in str(error_bound(read_summary(summary)))
    summary["audit"] |= {"client_limited_stages": [5], "client_limited": False}
    shown = found(summary)["Load generator"]
    assert shown.value == "kept up"
    assert shown.note.startswith("disturbed by other work at 6 req/s, which was repeated; requests")
    # nothing counts
    summary["audit"]["client_limited_stages"] = list(range(len(summary["stages"])))
    assert "late at p99 in the worst stage, its" in found(summary)["Load generator"].note
    assert str(error_bound(read_summary(summary))).endswith("(p99 of its loop's lag, worst stage).")


def test_one_instance_and_one_gpu_are_singular() -> None:
    summary = sample_summary.open_sweep()
    summary["fleet"] |= json.loads("""{"instances": 1, "instances_ci": [1, 2], "gpus": 1,
        "instances_before_safety": 1, "tensor_parallel": 1, "safety_factor": 1.0,
        "one_replica_down": 2}""")
    summary["audit"] |= {"client_limited": True, "client_limited_stages": [7]}
    got = found(summary)
    assert got["Fleet"].value == "1 instance (1 to 2)"
    assert (
        "1 instance for the peak of 120 req/s, the rest is reserve (safety factor 1); below 120 req/s each the peak "
        "takes 2; 1 GPU an instance; 1 instance more to carry the peak with one down"
        in got["Fleet"].note
    )
    assert got["Load generator"].note.startswith("nothing measured at 9 req/s is a finding")


def test_the_method_is_in_the_definitions_not_in_the_card() -> None:
    note = found(sample_summary.open_sweep())["Capacity"].note
    expected = "bound by ttft_p99=2s; interpolated between the stages on both sides of the limit"
    assert note == expected


def test_a_summary_without_stages_gives_dashes() -> None:
    summary = read_summary(blank(Summary))
    shown = {finding.label: finding.value for finding in findings(summary)}
    assert shown.pop("Knee") == "not found"
    assert set(shown.values()) == {"–"}
    assert stages_table(summary).rows == slo_table(summary).rows == []


def test_the_table_of_stages_word_for_word() -> None:
    table = stages_table(read_summary(sample_summary.open_sweep()))
    assert [c.head for c in table.columns] == json.loads("""["load", "achieved",
        "in flight", "at most", "TTFT p50", "TTFT p99", "ITL p99", "E2E p99", "goodput",
        "errors", "steady", "SLO"]""")
    first, last = table.rows[0], table.rows[-1]
    assert [c.text for c in first[:5]] == ["1 req/s", "1.00", "2.70", "5", "101 ms"]
    assert first[5] == Cell("–", 1)
    # for the same reason: one footnote
    assert first[-1] == table.rows[6][-1] == Cell("inconclusive", 2, "unsure")
    assert last[-3:] == [
        Cell("27 of 600", None, "bad"),
        Cell("no", 4, "bad"),
        Cell("violated", None, "bad"),
    ]
    assert table.notes == json.loads("""["needs 299 requests, has 120",
        "ttft_p99=2s: p99 needs 299 requests", "infinite: 27 of 600 requests failed",
        "requests in flight grow by 2.0 a second"]""")


def test_what_arrived_is_shown_where_it_is_not_the_rate_that_names_the_stage() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][3]["arrived_rps"] = 3.998  # 4.00, as the name says
    assert "arrived" not in [c.head for c in stages_table(read_summary(summary)).columns]
    summary["stages"][4]["arrived_rps"] = 5.13
    table = stages_table(read_summary(summary))
    assert [c.head for c in table.columns][:3] == ["load", "arrived", "achieved"]
    assert [c.text for c in table.rows[4][:3]] == ["5 req/s", "5.13", "5.00"]


def test_why_a_stage_is_undecided_names_every_slo_that_is() -> None:
    summary = sample_summary.one_stage()
    inconclusive = [
        sample_summary.verdict(
            slo, "inconclusive", None, 1.0, 40, reason=f"0 of {n} over", cause=cause
        )
        for slo, n, cause in (
            ("a", 1, "too few"),
            ("b", 2, "too few"),
            ("c", 3, "on the edge"),
            ("d", 4, None),
        )
    ]
    met = sample_summary.verdict("e", "met", 0.1, 1.0, 40)
    summary["stages"][0] |= {"slo_met": None, "slo_verdicts": [*inconclusive, met]}
    table = stages_table(read_summary(summary))
    expected = "a, b: too few; c: on the edge; d: 0 of 4 over"
    assert table.notes[table.rows[0][-1].note - 1] == expected


def test_a_client_limited_stage_is_no_finding() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][2] |= {"client_limited": True, "client_limited_reason": "slip p99 of 80 ms"}
    table = stages_table(read_summary(summary))
    assert table.rows[2][-1].text == "no finding"
    expected = "the load generator was the limit: slip p99 of 80 ms"
    assert table.notes[table.rows[2][-1].note - 1] == expected


def test_percentiles_with_n_interval_and_infinite() -> None:
    summary = sample_summary.open_sweep()
    held = json.loads("""{"p50": 0.1, "p90": 0.2, "p95": 0.25, "p99": 0.4, "p99_ci": [0.35,
        0.6], "mean": 0.12, "n": 105, "infinite": 2}""")
    summary["stages"] = [summary["stages"][0] | {"ttft_s": held}]
    (row,) = percentile_table(read_summary(summary), "ttft_s").rows
    assert [cell.text for cell in row] == json.loads("""["1 req/s", "100 ms", "200 ms",
        "250 ms", "400 ms", "350 ms to 600 ms", "120 ms", "105", "2"]""")


def test_an_interval_with_an_unknown_end_has_a_footnote() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"] = summary["stages"][1:2]
    summary["stages"][0]["ttft_s"] |= {
        "p99_ci": [0.3, None],
        "p99_ci_reason": "too few independent requests",
    }
    table = percentile_table(read_summary(summary), "ttft_s")
    assert table.rows[0][5] == Cell("from 300 ms, no upper bound", 1)
    assert table.notes == ["too few independent requests"]


def test_a_metric_that_is_not_known_has_one_footnote() -> None:
    table = percentile_table(read_summary(sample_summary.one_stage()), "itl_s")
    assert [cell.text for cell in table.rows[0]] == ["2 req/s", *["–"] * 6, "0", "0"]
    assert table.notes == ["tokens of each chunk are not known"]


@pytest.mark.parametrize("name", sample_summary.ALL)
def test_every_table_is_rectangular_and_every_footnote_exists(name: str) -> None:
    summary = sample_summary.ALL[name]()
    tables = [
        stages_table(read_summary(summary)),
        slo_table(read_summary(summary)),
        lengths_table(read_summary(summary)),
        windows_table(read_summary(summary), sample_summary.meta(summary)),
        *all_percentiles(read_summary(summary)),
    ]
    assert len(tables) == 4 + len(METRICS)
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        used = {cell.note for row in table.rows for cell in row if cell.note}
        assert used == set(range(1, len(table.notes) + 1))


def test_slo_verdicts_one_row_each() -> None:
    table = slo_table(read_summary(sample_summary.open_sweep()))
    assert len(table.rows) == 16
    assert [cell.text for cell in table.rows[12]] == json.loads("""["7 req/s",
        "ttft_p99=2s", "inconclusive", "2.10 s", "98.5%", "80", "900"]""")
    assert slo_table(read_summary(sample_summary.no_slos())).rows == []


def test_lengths_planned_and_realised() -> None:
    rows = lengths_table(read_summary(sample_summary.open_sweep())).rows
    assert [row[0].text for row in rows] == json.loads("""["input, planned",
        "input, counted by the server", "output, planned", "output, received"]""")
    assert rows[0][1].text == "4,320"
    assert rows[0][7].text == "1,020"  # p50
    assert lengths_table(read_summary(sample_summary.all_failed())).rows[1][2].text == "–"


def test_windows_join_the_audit_of_run_json_by_stage() -> None:
    summary = sample_summary.closed_sweep()
    run = sample_summary.meta(summary)
    run["stages"][1]["audit"] = run["stages"][1]["audit"] | {"slip_max_s": 0.5}
    summary["stages"][1]["littles_law"] |= {"consistency": 1.2, "ok": False}
    table = windows_table(read_summary(summary), run)
    heads = [column.head for column in table.columns]
    assert table.rows[0][heads.index("slip max")].text == "2.10 ms"
    assert table.rows[1][heads.index("slip max")].text == "500 ms"
    assert table.rows[1][heads.index("L ÷ λW")] == Cell("1.20", 1, "bad")
    assert table.notes == ["outside its tolerance of 5.00%"]
    assert windows_table(read_summary(summary), {}).notes  # without run.json: dashes and a reason


def test_a_rate_has_its_unit() -> None:
    assert rate(7) == "7.00 req/s"


def test_a_figure_whose_interval_has_no_upper_end_is_at_least_that() -> None:
    assert at_least(0.857, [0.8, None]) == "≥ 857 ms"
    assert at_least(0.857, [None, 1.2]) == at_least(0.857, [0.8, 1.2]) == "857 ms"
    assert at_least(6.4, None, rate) == "≥ 6.40 req/s"  # no interval at all
