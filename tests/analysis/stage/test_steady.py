"""Warm-up and stability on series with a known answer."""

from collections.abc import Callable

import numpy as np
import pytest

from ampacity.analysis.stage.steady import (
    _rises,
    find_window,
    in_flight_at,
    judge_stability,
    mser5,
    time_average_in_flight,
)

Floats = np.ndarray


def fifo(
    rng: np.random.Generator, rate: float, seconds: float, service_rps: float = 100.0
) -> tuple[Floats, Floats]:
    """Arrivals and departures of M/M/1 that starts empty."""
    n = rng.poisson(rate * seconds)
    arrival, done = (
        np.sort(rng.uniform(0, seconds, n)),
        np.cumsum(rng.exponential(1 / service_rps, n)),
    )
    return arrival, done + np.maximum.accumulate(arrival - np.concatenate([[0.0], done[:-1]]))


def stable(arrival: Floats, departure: Floats, seconds: float) -> bool | None:
    return judge_stability(0.0, seconds, arrival, departure, departure - arrival).stable


def test_mser5_cuts_an_exponential_warm_up() -> None:
    rng = np.random.default_rng(42)
    y = 1 + 4 * np.exp(-np.arange(1000) / 50) + rng.normal(0, 0.2, 1000)
    cut, settled = mser5(y)
    assert settled
    assert cut == pytest.approx(195, abs=30)
    assert y.mean() == pytest.approx(1.196, abs=0.02)
    assert y[cut:].mean() == pytest.approx(1.0, abs=0.02)


def test_mser5_does_not_settle_on_a_trend_and_cuts_little_of_noise() -> None:
    rng = np.random.default_rng(1)
    assert mser5(np.arange(500.0) + rng.normal(0, 5, 500)) == (250, False)
    cuts, unsettled = [], 0
    for _ in range(100):
        cut, settled = mser5(rng.normal(size=500))
        cuts.append(cut)
        unsettled += not settled
    assert np.median(cuts) <= 50
    assert unsettled <= 5


def test_in_flight_and_its_time_average_by_hand() -> None:
    begin, end = np.array([0.0, 1.0, 2.0, np.nan]), np.array([4.0, 3.0, np.nan, 1.0])
    assert in_flight_at(np.array([0.5, 1.0, 2.5, 3.0, 9.0]), begin, end).tolist() == [1, 2, 3, 2, 1]
    # over [1, 5]: 3 s of the first, 2 of the second; the third lasts to 5
    expected = pytest.approx(8 / 4)
    assert time_average_in_flight(1.0, 5.0, begin[:3], np.array([4.0, 3.0, 9.0])) == expected


def test_fixed_warm_up_and_its_cap() -> None:
    s = np.arange(100.0)
    window = find_window(0.0, 100.0, s, s + 0.5, np.full(100, 0.1), 20)
    assert (window.start_s, window.warmup_requests, window.method, window.reason) == (
        20.0,
        20,
        "fixed",
        None,
    )
    window = find_window(0.0, 100.0, s, s + 0.5, np.full(100, 0.1), 80)
    assert window.warmup_requests == 50
    assert "only 50 of the asked 80" in str(window.reason)
    assert find_window(0.0, 100.0, s, s + 0.5, np.full(100, 0.1), 0).start_s == 0.0


def test_a_ramp_is_cut_first_and_the_warm_up_is_what_comes_after_it() -> None:
    """Two requests a second for 60 s, each in flight for 8 s; a ramp of 10 s has the first 20 of
    them."""
    s, ttft = np.arange(120) / 2, np.full(120, 0.1)
    window = find_window(0.0, 60.0, s, s + 8, ttft, None, ramp_s=10.0)
    # those of the ramp are still in flight: the level stands at 16 from the ramp's end on,
    # nothing more is cut
    assert (window.start_s, window.warmup_requests, window.method) == (10.0, 20, "mser5")
    slow = np.where(np.arange(120) < 30, 3.0, ttft)  # ten more have a cold cache
    window = find_window(0.0, 60.0, s, s + 8, slow, None, ramp_s=10.0)
    assert (window.start_s, window.warmup_requests, window.settled) == (15.0, 30, True)
    window = find_window(0.0, 60.0, s, s + 8, ttft, 7, ramp_s=10.0)
    assert (window.start_s, window.warmup_requests, window.method) == (13.5, 27, "fixed")
    window = find_window(0.0, 60.0, s, s + 8, ttft, 0, ramp_s=10.0)
    assert (window.start_s, window.warmup_requests) == (10.0, 20)
    few = find_window(0.0, 30.0, s[:60], s[:60] + 8, ttft[:60], None, ramp_s=10.0)
    # 40 are too few for MSER-5
    assert (few.start_s, few.warmup_requests, few.method) == (10.0, 20, "none")
    cut = find_window(0.0, 6.0, s[:12], s[:12] + 8, ttft[:12], None, ramp_s=10.0)
    # ended within its ramp: nothing counts
    assert (cut.start_s, cut.end_s, cut.warmup_requests) == (6.0, 6.0, 12)


def test_warm_up_of_a_cold_start_is_found_in_scheduled_order() -> None:
    rng = np.random.default_rng(2)
    s = np.sort(rng.uniform(0, 20, 1000))
    ttft = np.exp(rng.normal(-2, 0.3, 1000)) * (1 + 20 * np.exp(-s / 0.5))
    window = find_window(0.0, 20.0, s, s + ttft, ttft, None)
    assert window.method == "mser5"
    assert 1.0 < window.start_s < 4.0
    assert window.end_s == 20.0


@pytest.mark.parametrize(("outage_s", "share"), [(4.0, 1.0), (8.0, 1.0)])
def test_an_outage_at_the_beginning_is_no_warm_up(outage_s: float, share: float) -> None:
    """Answers of 3 s behind it look like a start from empty; what failed before must not vanish."""
    rng = np.random.default_rng(5)
    s = np.sort(rng.uniform(0, 20, 1000))
    failed = (s < outage_s) & (rng.uniform(size=1000) < share)
    ttft = np.where(failed, np.nan, np.exp(rng.normal(-2, 0.3, 1000)))
    ended = s + np.where(failed, 0.01, 3.0)
    in_flight = in_flight_at(s, s, ended)
    assert s[mser5(in_flight)[0]] > outage_s  # what MSER-5 makes of it
    window = find_window(0.0, 20.0, s, ended, ttft, None)
    assert np.count_nonzero(failed & (s < window.start_s)) <= 0.05 * np.count_nonzero(failed)


def queue(name: str, load: float, seconds: float, seed: int) -> tuple[Floats, Floats, Floats]:
    """Arrivals, departures and waits of a steady server without any warm-up but the fill from
    empty."""
    from benchmarks.servers import SERVERS, stage_of

    server = SERVERS[name]()
    sent = stage_of(server, load * server.most_rps, seconds, np.random.default_rng(seed))
    return sent.arrival_s, sent.arrival_s + sent.e2e_s, sent.ttft_s


@pytest.mark.parametrize("name", ["mm1", "mg1", "mm8", "batch"])
def test_a_jam_of_a_steady_server_is_never_cut_as_warm_up(name: str) -> None:
    """MSER-5 alone cut a fifth and more of 57 in 200 such stages; a start-up is a few request
    times."""
    cut = []
    for seed in range(40):
        arrival, departure, ttft = queue(name, 0.85, 100.0, seed)
        window = find_window(0.0, 100.0, arrival, departure, ttft, None)
        cut.append(window.warmup_requests / len(arrival))
    assert np.mean(np.array(cut) > 0.2) <= 0.05
    assert np.median(cut) <= 0.05


def test_a_growing_queue_never_settles() -> None:
    arrival, departure = fifo(np.random.default_rng(3), 150, 10)
    window = find_window(0.0, 10.0, arrival, departure, departure - arrival, None)
    assert not window.settled
    assert window.warmup_requests <= 0.05 * len(arrival)  # a trend is no start-up
    assert "never settled" in str(window.reason)


@pytest.mark.parametrize("seconds", [8, 10, 30])
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 0.9])
def test_no_false_alarm_below_capacity(load: float, seconds: float) -> None:
    rng = np.random.default_rng(7)
    unstable = sum(stable(*fifo(rng, 100 * load, seconds), seconds) is False for _ in range(60))
    assert unstable <= 1


@pytest.mark.parametrize("seconds", [8, 10, 30])
@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
def test_overload_is_found_in_short_stages(load: float, seconds: float) -> None:
    rng = np.random.default_rng(8)
    assert all(stable(*fifo(rng, 100 * load, seconds), seconds) is False for _ in range(30))


def test_overload_of_processor_sharing_is_found() -> None:
    # everything is admitted at once and slows down: no queue, but nothing keeps up
    arrival = np.linspace(0, 10, 1500, endpoint=False)
    departure = arrival + 0.5 + 0.5 * arrival  # completions at 1/1.5 of the arrivals' rate
    assert stable(arrival, departure, 10.0) is False


def test_hardly_anything_ends() -> None:
    arrival = np.linspace(0, 10, 500, endpoint=False)
    departure, e2e = np.full(500, np.nan), 40.0 - arrival
    assert judge_stability(0.0, 10.0, arrival, departure, e2e).stable is None
    expected = "filling up and overload look the same"
    assert expected in str(judge_stability(0.0, 10.0, arrival, departure, e2e).reason)


def test_too_few_requests_to_tell() -> None:
    assert stable(np.arange(5.0), np.arange(5.0) + 1, 5.0) is None


def cut_off(arrival: Floats, departure: Floats, seconds: float) -> bool | None:
    """A stage that ended with Ctrl-C: what was still running has its age, the last requests hardly
    any."""
    ended = np.where(departure <= seconds, departure, np.nan)
    return judge_stability(
        0.0, seconds, arrival, ended, np.minimum(departure, seconds) - arrival
    ).stable


@pytest.mark.parametrize("answer_s", [0.0, 1.0])
@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
def test_overload_that_was_cut_off_is_no_steady_state(load: float, answer_s: float) -> None:
    rng = np.random.default_rng(10)
    for _ in range(20):
        arrival, departure = fifo(rng, 100 * load, 8)
        assert cut_off(arrival, departure + answer_s, 8.0) is False


@pytest.mark.parametrize("answer_s", [0.0, 1.0])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_a_stable_stage_that_was_cut_off_is_not_blamed(load: float, answer_s: float) -> None:
    rng = np.random.default_rng(11)
    found = []
    for _ in range(40):
        arrival, departure = fifo(rng, 100 * load, 8)
        found.append(cut_off(arrival, departure + answer_s, 8.0))
    assert found.count(False) <= 1


@pytest.mark.parametrize(
    ("e2e_s", "judged", "seed"),
    [(1.0, stable, 9), (3.0, stable, 9), *((e2e_s, cut_off, 12) for e2e_s in (1.0, 3.0, 6.0))],
)
def test_filling_up_with_long_requests_is_no_overload(
    e2e_s: float, judged: Callable[[Floats, Floats, float], bool | None], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):  # infinite servers: the in-flight count grows for one request's length
        arrival = np.sort(rng.uniform(0, 8, rng.poisson(8 * 80)))
        departure = arrival + e2e_s * np.exp(rng.normal(-0.18, 0.6, len(arrival)))
        assert judged(arrival, departure, 8.0) is not False


def test_completions_that_stand_still_below_the_arrivals_are_overload_however_long_requests_last() -> (
    None
):
    """100 arrive a second, and from 3 s on 30 end, in order: request i lasts 3 + 7i/300 s; cut off
    5 s after the stage.

    Nine of ten of the first 100 lasted up to 5.1 s, half of the stage; ages of 8 to 8.7 s are not
    twice the first 5.3 s."""
    i = np.arange(1000.0)
    arrival, departure = i / 100, 3 + i / 30
    ended = np.where(departure <= 15, departure, np.nan)
    found = judge_stability(0.0, 10.0, arrival, ended, np.minimum(departure, 15.0) - arrival)
    assert found.stable is False
    expected = "the queue kept growing by 70 requests/s: 500 arrived and 150 ended in the last 5 s"
    assert found.reason == expected


def test_completions_that_still_rise_towards_the_arrivals_are_no_overload() -> None:
    """Request x lasts 5 + 2(1 - e^(-x/2)) s: 100/(1 + e^(-x/2)) end a second, 50 at first and 84
    when the stage ends."""
    arrival = np.arange(1000.0) / 100
    assert stable(arrival, arrival + 5 + 2 * (1 - np.exp(-arrival / 2)), 10.0) is None


def test_pairs_of_which_it_is_not_known_which_lasted_longer_are_not_counted() -> None:
    """Ten of 2 s, then 20 at an age of 3 s (200 pairs up), ``quick`` of 1 s (10 pairs down each),
    the rest 1 s old."""
    e2e = np.concatenate([np.full(10, 2.0), np.full(20, 3.0), np.full(20, 1.0)])
    for quick, rises in ((6, True), (7, False)):  # 200 of 260 are 77 %, of 270 74 %
        ended = np.full(50, np.nan)
        ended[:10] = ended[30 : 30 + quick] = 9.0
        assert _rises(e2e, ended) is rises


@pytest.mark.parametrize(("load", "overload"), [(0.4, False), (0.9, False), (3.0, True)])
def test_answers_that_last_most_of_a_stage_hide_no_overload(load: float, overload: bool) -> None:
    """M/M/1 in front of answers of 4.5 s in stages of 8 s, cut off 5 s later."""
    rng = np.random.default_rng(13)
    for _ in range(50):
        arrival, departure = fifo(rng, 100 * load, 8)
        departure = departure + 4.5
        ended = np.where(departure <= 13, departure, np.nan)
        found = judge_stability(
            0.0, 8.0, arrival, ended, np.minimum(departure, 13.0) - arrival
        ).stable
        assert (found is False) is overload


def test_turns_due_after_the_stage_are_no_warm_up() -> None:
    """A stage of 10 s of steady load, whose sessions are played on for 100 s: their turns cut
    nothing of it."""
    scheduled = np.concatenate([np.arange(0, 10, 0.05), np.arange(10, 110, 0.2)])
    window = find_window(0.0, 10.0, scheduled, scheduled + 0.1, np.full(len(scheduled), 0.05), None)
    assert window.start_s <= 5.0  # at most half of the 200 that were due in it
    fixed = find_window(0.0, 10.0, scheduled, scheduled + 0.1, np.full(len(scheduled), 0.05), 400)
    assert fixed.start_s == 5.0
