"""The orders of a pipeline's work, by rule and in torch.distributed.pipelining."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulessons.lesson_04.schedules import (
    BACKWARD,
    FORWARD,
    GPIPE,
    ONE_BATCH,
    ONE_F_ONE_B,
    SCHEDULES,
    bubble,
    launches,
    order,
)

sizes = st.integers(1, 6), st.integers(1, 9)


def short(actions) -> str:
    return " ".join(f"{work[0]}{index}" for work, index in actions)


def test_gpipe_does_all_forwards_first():
    assert short(order(GPIPE, 0, 2, 3)) == short(order(GPIPE, 1, 2, 3)) == "f0 f1 f2 b0 b1 b2"


def test_one_batch_is_not_split():
    assert short(order(ONE_BATCH, 0, 2, 3)) == "f0 b0"


def test_1f1b_goes_ahead_by_the_stages_behind():
    assert short(order(ONE_F_ONE_B, 0, 3, 4)) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert short(order(ONE_F_ONE_B, 2, 3, 4)) == "f0 b0 f1 b1 f2 b2 f3 b3"
    assert short(order(ONE_F_ONE_B, 0, 4, 2)) == "f0 f1 b0 b1"


@given(st.sampled_from(SCHEDULES), *sizes)
def test_all_is_launched_once_behind_what_it_needs(schedule, stages, micro_batches):
    orders = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    launched = launches(orders)
    assert sorted(launched) == sorted(
        (stage, *action) for stage, actions in enumerate(orders) for action in actions
    )
    at = {action: place for place, action in enumerate(launched)}
    for stage, work, index in launched:
        assert [action[1:] for action in launched if action[0] == stage] == orders[stage]
        if work == FORWARD and stage:
            assert at[stage - 1, FORWARD, index] < at[stage, work, index]
        if work == BACKWARD:
            assert at[stage, FORWARD, index] < at[stage, work, index]
            assert stage == stages - 1 or at[stage + 1, BACKWARD, index] < at[stage, work, index]


@given(*sizes)
def test_1f1b_keeps_at_most_as_many_micro_batches_as_stages_are_left(stages, micro_batches):
    for stage in range(stages):
        kept = most = 0
        for work, _ in order(ONE_F_ONE_B, stage, stages, micro_batches):
            kept += 1 if work == FORWARD else -1
            most = max(most, kept)
        assert most == min(micro_batches, stages - stage)


def test_stages_that_wait_for_each_other_are_named():
    with pytest.raises(
        ValueError, match="wait for each other: 0 before backward 0, 1 before backward 1"
    ):
        launches([[(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1)], [(FORWARD, 0), (BACKWARD, 1)]])


def test_the_bubble_by_formula():
    assert bubble(1, 5) == 0
    assert bubble(2, 1) == 0.5
    assert bubble(4, 8) == pytest.approx(3 / 11)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(
        ValueError, match="schedule='gpipe': choose one of 'one batch', 'GPipe', '1F1B'"
    ):
        order("gpipe", 0, 2, 2)
