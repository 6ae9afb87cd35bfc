"""The orders of a pipeline's work, by rule and in torch.distributed.pipelining."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpulessons import rank_programs
from gpulessons.lesson_04.schedules import BACKWARD, FORWARD, GPIPE, ONE_BATCH, ONE_F_ONE_B, SCHEDULES, bubble, launches, order

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
    assert sorted(launched) == sorted((stage, *action) for stage, actions in enumerate(orders) for action in actions)
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
    with pytest.raises(ValueError, match="wait for each other: 0 before backward 0, 1 before backward 1"):
        launches([[(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1)], [(FORWARD, 0), (BACKWARD, 1)]])


def test_the_bubble_by_formula():
    assert bubble(1, 5) == 0
    assert bubble(2, 1) == 0.5
    assert bubble(4, 8) == pytest.approx(3 / 11)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule='gpipe': choose one of 'one batch', 'GPipe', '1F1B'"):
        order("gpipe", 0, 2, 2)


@pytest.mark.slow
def test_two_ranks_keep_to_the_schedules_and_find_the_gradients_of_one_process():
    rows = [row for rank in rank_programs.results("stages", 2, 4, 16, 32) for row in rank]
    assert [(row["schedule"], row["rank"]) for row in rows] == [(s, r) for r in (0, 1) for s in ("GPipe", "1F1B")]
    for row in rows:
        due = order(row["schedule"], row["rank"], 2, 4)
        assert row["order"] == "".join("F" if work == FORWARD else "B" for work, _ in due)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    x = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)
    parts = list(zip(x.chunk(4), x.sin().chunk(4), strict=True))
    loss = sum(nn.functional.mse_loss(model(part), target) for part, target in parts) / len(parts)
    loss.backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    for schedule in ("GPipe", "1F1B"):
        first, last = (row for row in rows if row["schedule"] == schedule)
        assert first["gradients"] + last["gradients"] == pytest.approx(norms, rel=1e-4)
        assert (first["loss"], last["loss"]) == (None, pytest.approx(loss.item(), rel=1e-5))
