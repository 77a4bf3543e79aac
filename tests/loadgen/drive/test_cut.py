"""What is left of a stage that was cut off."""

import numpy as np
import pytest

from ampacity.loadgen.drive.cut import rest_of
from ampacity.loadgen.plan import StagePlan
from tests.support.stage_driving import plan_of

WAITS = {"after_start": np.array([0, 0, 0, 1, 1]), "after": np.array([1])}


@pytest.mark.parametrize(
    ("plan", "gone", "elapsed_s", "ids", "due_s", "length_s"),
    [
        (plan_of("open", [0, 1, 2, 3, 4], 6.0), [10, 11, 12], 2.5, [13, 14], [0.5, 1.5], 3.5),
        # an id that has no record was not sent; it was due before, so it is due at once
        (plan_of("open", [0, 1, 2, 3], 6.0), [10, 11], 2.2, [12, 13], [0.0, 0.8], 3.8),
        # users that still rise: the ramp is run again, and what is measured is not shortened
        (plan_of("closed", [0] * 4, 10.0, ramp_s=2.0), [10, 12], 1.0, [13], [0.0], 10.0),
        (plan_of("closed", [0] * 4, 10.0, ramp_s=2.0), [10, 11], 5.0, [12, 13], [0, 0], 7.0),
        # 12 waits for 11, whose answer is lost: it is not sent
        (plan_of("open", [0, 1, 1, 3], 4.0, **WAITS), [10, 11], 2.0, [13], [1.0], 2.0),
    ],
    ids=["open", "not sent", "ramp", "closed", "sessions"],
)
def test_the_rest_of_a_stage_keeps_its_ids_and_times(
    plan: StagePlan,
    gone: list[int],
    elapsed_s: float,
    ids: list[int],
    due_s: list[float],
    length_s: float,
) -> None:
    rest = rest_of(plan, gone, elapsed_s)
    assert (rest.index, rest.schedule.ids.tolist()) == (4, ids)
    assert rest.schedule.scheduled_s.tolist() == pytest.approx(due_s)
    assert rest.duration_s == pytest.approx(length_s)


@pytest.mark.parametrize(("gone", "elapsed_s"), [([10, 11], 1.5), ([10], 2.0)])
def test_of_a_stage_that_was_played_nothing_is_left(gone: list[int], elapsed_s: float) -> None:
    assert rest_of(plan_of("open", [0, 1], 2.0), gone, elapsed_s) is None
