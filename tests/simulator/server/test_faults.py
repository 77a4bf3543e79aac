"""The fault plan without a server: shares, limits and longer steps."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.simulator import SimulatorError
from ampacity.simulator.server.apierrors import ApiError
from ampacity.simulator.server.face import read_options
from ampacity.simulator.server.faults import (
    KINDS,
    Bucket,
    Drift,
    Fate,
    Faults,
    Limits,
    Plan,
    Spikes,
    Stall,
)


def test_shares_of_errors_are_what_was_asked_for() -> None:
    shares = {kind: 0.01 * (n + 1) for n, kind in enumerate(KINDS)}  # 1 % to 8 %
    faults = Faults(Plan(seed=4, errors=shares), 0.0)
    found = Counter(faults.draw(0.0).kind for _ in range(20_000))
    for kind, share in shares.items():
        spread = math.sqrt(20_000 * share * (1 - share))
        assert abs(found[kind] - 20_000 * share) < 4 * spread
    assert found[None] == 20_000 - sum(faults.injected.values())
    assert {kind: found[kind] for kind in KINDS} == dict(faults.injected)


def test_the_same_seed_gives_the_same_fates() -> None:
    plan = Plan(seed=9, errors={"503": 0.2, "garbage": 0.1}, spikes=Spikes(0.1, 2.0))

    def fates(plan: Plan) -> list[Fate]:
        faults = Faults(plan, 0.0)
        return [faults.draw(0.0) for _ in range(300)]

    assert fates(plan) == fates(plan)
    # A share of spikes more does not move the errors.
    more = Plan(seed=9, errors=plan.errors, spikes=Spikes(0.5, 2.0))
    assert [one.kind for one in fates(more)] == [one.kind for one in fates(plan)]
    assert fates(Plan(seed=10, errors=plan.errors)) != fates(plan)


def test_drift_leaves_the_median_and_raises_the_tail() -> None:
    faults = Faults(Plan(drift=Drift(share=0.03, seconds_per_minute=2.0, at_s=60.0)), 100.0)
    for minutes, p99 in ((0.5, 0.0), (1.0, 0.0), (2.0, 2.0), (6.0, 10.0)):
        delays = np.array([faults.draw(100.0 + 60.0 * minutes).delay_s for _ in range(5000)])
        assert np.quantile(delays, 0.5) == 0.0
        assert np.quantile(delays, 0.99) == pytest.approx(p99)
        # 150 expected, standard deviation 12
        assert (delays == pytest.approx(p99)) if not p99 else abs((delays > 0).sum() - 150) < 48


def test_where_a_fault_strikes() -> None:
    assert Fate("garbage", 0.0, 0.99).token(1) == 1
    assert {Fate("garbage", 0.0, place).token(4) for place in np.linspace(0, 0.999, 50)} == {
        2,
        3,
        4,
    }


@pytest.mark.parametrize(
    ("start_s", "end_s", "really"),
    [
        (0.0, 1.0, 1.0),  # before everything
        (9.5, 9.9, 9.9),
        (9.5, 10.5, 12.5),  # the whole stall lies in it
        (10.5, 10.6, 12.1),  # begins in the stall: waits for its rest
        (12.0, 12.5, 12.5),
        (20.0, 20.5, 21.0),  # half the capacity
        (19.9, 20.4, 20.4),  # began before
        (29.0, 29.6, 35.2),  # slowed to 1.2 s, and then the second stall of 5 s
        (40.0, 40.5, 40.5),  # capacity is back
    ],
)
def test_steps_are_stretched(start_s: float, end_s: float, really: float) -> None:
    plan = read_options(
        b'{"stalls": [{"at_s": 30, "for_s": 5}, {"at_s": 10, "for_s": 2}],'
        b' "capacity": [{"at_s": 20, "factor": 2}, {"at_s": 40, "factor": 1}]}',
        Plan,
        "faults",
    )
    expected = pytest.approx(1000.0 + really)
    assert Faults(plan, 1000.0).step_end(1000.0 + start_s, 1000.0 + end_s) == expected


@given(
    st.floats(0, 50),
    st.floats(0, 5),
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=4),
)
def test_no_step_ends_in_a_stall_or_early(
    start_s: float, length_s: float, given_: list[tuple[float, float]]
) -> None:
    faults = Faults(Plan(stalls=tuple(Stall(*one) for one in given_)), 0.0)
    end_s = faults.step_end(start_s, start_s + length_s)
    assert end_s >= start_s + length_s
    for at_s, for_s in given_:
        assert not at_s < end_s - 1e-9 < at_s + for_s - 2e-9


def test_a_bucket_gives_its_rate() -> None:
    """60 a minute: 60 at once, then one a second; never more than 60 + t in t seconds."""
    bucket = Bucket(60.0)
    taken = []
    for tick in range(100_000):
        now_s = tick * 0.001
        if bucket.wait_s(1, now_s) == 0:
            bucket.take(1)
            taken.append(now_s)
    assert taken[:60] == [n * 0.001 for n in range(60)]
    # the bucket refills from the first request on: the 61st fits after one second
    assert taken[60:63] == pytest.approx([1.0, 2.0, 3.0], abs=0.002)
    assert len(taken) == 159


def test_limits_say_what_is_left_and_when_to_come_back() -> None:
    faults = Faults(Plan(limits=Limits(requests_per_minute=2, tokens_per_minute=600)), 0.0)
    headers = faults.admit(100, 0.0)
    assert headers == json.loads("""{"x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "30.000s",
        "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10.000s"}""")
    with pytest.raises(ApiError) as caught:  # 510 - 500 left: 1 s at 10 tokens a second
        faults.admit(510, 0.0)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    assert caught.value.headers["retry-after-ms"] == "1000"
    faults.admit(510, 1.0)
    with pytest.raises(ApiError) as caught:  # one request each 30 s
        faults.admit(1, 1.0)
    assert caught.value.headers["Retry-After"] == "29"
    assert b'"type": "requests"' in caught.value.body
    faults.admit(1, 30.0)
    with pytest.raises(ApiError) as caught:
        faults.admit(601, 1e6)
    assert "Retry-After" not in caught.value.headers
    assert "never fits" in str(caught.value)
    assert faults.injected == {"limit_requests": 1, "limit_tokens": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"errors": {"oops": 0.1}}', "errors has no kind 'oops'; there are 500, 503"),
        ('{"errors": {"500": 1.5}}', r"`float` <= 1.0 - at `\$.errors\[...\]`"),
        ('{"errors": {"500": 0.6, "503": 0.6}}', "more than 1"),
        ('{"eror": {}}', "unknown field `eror`"),
        ('{"stalls": [{"at_s": 1}]}', r"missing required field `for_s` - at `\$.stalls\[0\]`"),
        ('{"stalls": [{"at_s": -1, "for_s": 1}]}', r">= 0.0 - at `\$.stalls\[0\].at_s`"),
        ('{"capacity": [{"at_s": 1, "factor": 0}]}', r">= 0.01 - at `\$.capacity\[0\].factor`"),
        (
            '{"spikes": {"share": 0.6}, "drift": {"share": 0.6}}',
            "spikes and drift add up to more than 1",
        ),
        ('{"limits": {"tokens_per_minute": 0}}', r">= 1.0 - at `\$.limits.tokens_per_minute`"),
        ("{", "not JSON"),
        ("[]", "Expected `object`"),
    ],
)
def test_a_bad_plan_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(SimulatorError, match=words) as caught:
        read_options(text.encode(), Plan, "faults")
    assert "\n" not in str(caught.value)
