"""Times of a log that are far from the others, in another unit, or make a replay without end."""

import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.workloads.arrivals.processes import arrival_times
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit.busy_hour import busy_hour
from ampacity.workloads.fit.profile import fit
from ampacity.workloads.fit.traffic import count_windows
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.times import check_replay_length, large_gaps, length_text, recorded
from tests.support.repeats import often

YEAR_S = 365 * 86_400


def log(folder: Path, times: Iterable[object], column: str = "timestamp") -> Path:
    path = folder / "log.csv"
    rows = (f"{at},{5 + i % 7},{3 + i % 5}\n" for i, at in enumerate(times))
    path.write_text(f"{column},input_tokens,output_tokens\n" + "".join(rows))
    return path


def fitted(path: Path) -> dict[str, object]:
    """The profile of a log, made within 64 MiB of memory, imports included."""
    tracemalloc.start()
    try:
        profile = fit(read_trace(path), "p")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    return profile


EPOCH = 1_700_000_000


@pytest.mark.parametrize(
    "times",
    [
        [0, *range(EPOCH, EPOCH + 99)],  # asked for 12.8 GiB
        [*range(EPOCH, EPOCH + 99), 3_900_000_000],  # a year beyond 2090
        [0, *range(EPOCH, EPOCH + 400), 3_900_000_000],  # one on each side
    ],
)
def test_a_stray_time_costs_nothing_and_does_not_void_the_rate(
    tmp_path: Path, times: list[int]
) -> None:
    """All but the strays come once a second."""
    strays = sum(not EPOCH <= t < EPOCH + 1000 for t in times)
    profile = fitted(log(tmp_path, times))
    measured = profile["measured"]
    assert isinstance(measured, dict)
    assert profile["arrivals"] == "constant"
    assert measured["requests"] == len(times)
    assert (measured["arrivals"]["mean_rps"], measured["arrivals"]["rps_max"]) == (1.0, 1.0)
    apart, left_out = measured["notes"]
    assert f"; the next longest is 1 s; {strays} of {len(times)} rows stand apart" in apart
    assert left_out.startswith(f"rates and gaps are without {strays} of {len(times)} requests, ")


def test_a_break_of_a_year_is_no_gap_of_the_traffic(tmp_path: Path) -> None:
    """Two parts of 200 s, a request a second: 400 requests in 399 s of traffic."""
    profile = fitted(log(tmp_path, [*range(200), *range(YEAR_S, YEAR_S + 200)], "timestamp_s"))
    assert profile["arrivals"] == "constant"
    measured = profile["measured"]
    assert isinstance(measured, dict)
    assert (measured["arrivals"]["span_s"], measured["arrivals"]["mean_rps"]) == (399, 1.0)
    assert "1 breaks of more than a day in the log (365 days)" in measured["notes"][1]


def test_the_hours_of_the_day_stay_over_a_break() -> None:
    """Two days whose first half is busy, a year and 7 h apart: 7 h of the gap are kept, so hour 0
    of a day is hour 0."""
    day = np.concatenate([np.arange(0, 43_200, 10.0), np.arange(43_200, 86_400, 100.0)])
    found = recorded(np.concatenate([day, day + YEAR_S + 86_400]))
    assert found.breaks_s == (YEAR_S + 100.0,)
    assert found.arrival_s[len(day)] == 86_400


def test_traffic_by_itself_has_no_gap_out_of_proportion() -> None:
    rng = np.random.default_rng(1)
    bursty = np.cumsum(rng.gamma(1 / 25, 25, 5000))  # CV 5
    assert large_gaps(bursty) is None
    # every pause is as long as the others
    pauses = np.cumsum([30.0 if i % 50 == 0 else 0.01 for i in range(1000)])
    assert large_gaps(pauses) is None
    nightly = np.concatenate([np.arange(0, 3600, 5.0) + night * 86_400 for night in range(5)])
    found = recorded(nightly)
    assert (found.strays, found.breaks_s) == (0, ())  # idle nights belong to the traffic
    assert len(found.arrival_s) == len(nightly)


@pytest.mark.parametrize(
    ("column", "times", "said"),
    [
        (
            "timestamp",
            [i * 500 for i in range(200)],
            "--time-unit ms",
        ),  # 2 requests/s, read as 0.002
        ("timestamp", [i * 60_000.5 for i in range(20)], "--time-unit ms"),
        ("timestamp", [i * 700_000 for i in range(200)], "--time-unit us"),
        ("t", [0, *(1000 + i * 99 for i in range(30))], "--time-unit ms"),  # 30 gaps in 3,871 s
        ("timestamp_s", [i * 500 for i in range(200)], ""),  # the column says it
        ("timestamp", [EPOCH + i * 500 for i in range(200)], ""),  # a time since 1970 is in seconds
        ("timestamp", [i * 2 for i in range(200)], ""),
        ("timestamp", [45_592 + i / 86_400 for i in range(20)], "days"),  # one a second, by Excel
        ("timestamp", [i / 3_600 / 2 for i in range(50)], "days"),  # hours: two a second
        ("timestamp", [i / 60 / 20 for i in range(50)], "days"),  # minutes: twenty a second
    ],
)
def test_an_implausible_rate_names_the_unit(
    tmp_path: Path, column: str, times: list[float], said: str
) -> None:
    notes = [n for n in read_trace(log(tmp_path, times, column)).notes if "if it holds" in n]
    assert len(notes) == bool(said)
    remedy = "minutes, hours or days, write them in seconds" if said == "days" else f"give {said}"
    assert all(n.endswith(remedy) for n in notes)


def test_mooncake_in_seconds_names_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {i / 2}, "input_length": 5, "output_length": 5}}\n' for i in range(50)
        )
    )
    (note,) = [n for n in read_trace(path).notes if "requests/s" in n]
    assert "2e+03 requests/s" in note
    assert note.endswith("if it holds seconds, give --time-unit s")
    assert not [n for n in read_trace(path, time_unit="s").notes if "requests/s" in n]


@pytest.mark.parametrize(
    ("column", "spans", "said"),
    [
        ("latency", (1500, 2500, 700), "seconds, by which 2 of 2 answers end after the next turn"),
        ("latency", (1.5, 2.5, 0.7), ""),
        ("latency_s", (1500, 2500, 700), ""),  # its name says it
        ("think_time", (0, 1400, 4300), "seconds, by which 2 of 2 pauses are longer than the time"),
        ("think_time", (0, 1.4, 4.3), ""),
        ("delay", (0, 1.4, 4.3), "milliseconds: if it holds seconds, rename it delay_s"),
        ("delay", (0, 1400, 4300), "milliseconds"),
    ],
)
def test_a_guessed_unit_of_durations_is_said_and_doubted(
    tmp_path: Path, column: str, spans: tuple[float, ...], said: str
) -> None:
    """Three turns, at 0, 3 and 9 s."""
    path = tmp_path / "log.csv"
    rows = (f"a,{at},5,3,{span}\n" for at, span in zip((0, 3, 9), spans, strict=True))
    path.write_text(f"session_id,timestamp,input_tokens,output_tokens,{column}\n" + "".join(rows))
    notes = [note for note in read_trace(path).notes if f"column {column} is read as" in note]
    assert len(notes) == bool(said)
    if said:
        assert said in notes[0]
        assert ("if it holds" in notes[0]) == (said != "milliseconds")


def test_a_replay_of_weeks_asks() -> None:
    with pytest.raises(WorkloadError) as caught:
        check_replay_length("t.csv", 1_728_956.0, 1_728_956.0, chosen=False)
    # 480.3 h
    assert str(caught.value) == (
        "t.csv: the replay would last 1,728,956 s (20 days): cut it (--trace-from, --trace-to), play it faster "
        "(--time-scale 100), or name the unit of its times (--time-unit); if it is meant, give --trace-to 481h"
    )
    check_replay_length("t.csv", 1_728_956.0, 1_728_956.0, chosen=True)
    check_replay_length("t.csv", 17_289.56, 1_728_956.0, chosen=False)  # a hundred times as fast
    with pytest.raises(WorkloadError, match=r"--time-unit\)$"):  # nobody means 54 years
        check_replay_length("t.csv", 1.7e9, 1.7e9, chosen=False)


def test_a_day_of_a_trace_is_not_laid_over_by_millions_of_steps(tmp_path: Path) -> None:
    path = log(tmp_path, [0, *range(EPOCH, EPOCH + 9)])
    with pytest.raises(WorkloadError, match=r"53\.9 years, more than 10000000 steps of 10 s"):
        arrival_times(f"diurnal:trace={path},step=10s", 5, 60, np.random.default_rng(1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (45, "45 s"),
        (119, "119 s"),
        (150, "2.5 min"),
        (5e4, "13.9 h"),
        (1_728_956, "20 days"),
        (1.7e9, "53.9 years"),
    ],
)
def test_a_length_in_words(seconds: float, text: str) -> None:
    assert length_text(seconds) == text


@settings(max_examples=often(37, 150), deadline=None)
@given(st.lists(st.floats(0, 500), min_size=1, max_size=60), st.sampled_from([1.0, 7.0, 60.0]))
def test_sparse_windows_say_what_dense_ones_do(times: list[float], width: float) -> None:
    at = np.sort(np.array(times)) - min(times)
    whole = int(at[-1] // width)
    dense = np.bincount((at // width).astype(int))
    dense = dense[:whole] if whole else dense
    found = count_windows(at, width)
    assert found.total == len(dense)
    assert found.mean() == pytest.approx(dense.mean())
    if dense.any():
        assert found.dispersion() == pytest.approx(dense.var() / dense.mean(), abs=1e-9)
    for q in (0.0, 0.01, 0.5, 0.95, 0.99, 1.0):
        assert found.quantile(q) == np.quantile(dense, q, method="inverted_cdf"), q


def test_the_busiest_hour_of_two_days_a_year_apart_is_theirs() -> None:
    """One request a second, two from 5:00 to 6:00 of the second day; the year between has none."""
    day = np.arange(86_400.0)
    busy = np.arange(18_000.5, 21_600.5)
    found = busy_hour(np.sort(np.concatenate([day, YEAR_S + day, YEAR_S + busy])))
    assert found["rps"] == pytest.approx(2, rel=0.01)
