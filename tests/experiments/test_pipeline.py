"""A step of a pipeline: who waits, and what it keeps in memory."""

import pytest
import torch
from torch import nn

import labkit
from labkit.experiments import collect, pipeline_step
from labkit.experiments.pipeline import COLUMNS, Pipe, is_whole, peaks, stages, waiting_share
from labkit.experiments.schedules import GPIPE, ONE_BATCH, ONE_F_ONE_B, SCHEDULES, bubble

SMALL = {"width": 4096, "batch": 8192}


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_the_gpus_wait_as_long_as_the_formula_says(like):
    with labkit.use(gpus=2, like=like, quiet=True):
        result = collect(pipeline_step((2, 2), 4, **SMALL))
    assert waiting_share(result, ONE_BATCH) == pytest.approx(bubble(2, 1), abs=0.06)
    assert waiting_share(result, GPIPE) == pytest.approx(bubble(2, 4), abs=0.06)
    assert waiting_share(result, ONE_F_ONE_B) == pytest.approx(bubble(2, 4), abs=0.08)
    assert len(result.rows) == 2 * 2 * (1 + 4 + 4) and set(result.rows[0]) == set(COLUMNS)


def test_1f1b_keeps_less_and_least_on_the_last_stage():
    with labkit.use(gpus=3, virtual=True, quiet=True):
        result = collect(pipeline_step((1, 1, 1), 6, [GPIPE, ONE_F_ONE_B], **SMALL))
    gpipe, alternating = peaks(result, GPIPE), peaks(result, ONE_F_ONE_B)
    assert alternating[2] < alternating[1] < gpipe[1]
    assert alternating[0] < 0.8 * gpipe[0]


def test_a_slow_link_and_an_uneven_cut_make_the_gpus_wait():
    def waits(layers=(2, 2), link=1) -> float:
        return waiting_share(collect(pipeline_step(layers, 4, [GPIPE], link, **SMALL)), GPIPE)

    with labkit.use(gpus=2, virtual=True, quiet=True):
        even = waits()
        assert waits(link=16) > even + 0.1
        assert waits(layers=(3, 1)) > even + 0.1


def test_work_stands_behind_what_it_needs_and_never_overlaps_on_a_gpu():
    with labkit.use(gpus=3, virtual=True, quiet=True):
        result = collect(pipeline_step((1, 1, 1), 3, [ONE_F_ONE_B], width=256, batch=256))
    ends = {}
    for row in result.rows:
        before = (row["stage"] - 1, "forward") if row["work"] == "forward" else (row["stage"] + 1, "backward")
        assert row["start"] >= ends.get((*before, row["micro_batch"]), 0.0)
        assert row["start"] >= ends.get(row["stage"], 0.0) - 1e-9
        ends[row["stage"]] = ends[row["stage"], row["work"], row["micro_batch"]] = row["start"] + row["seconds"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [6, 7])
def test_values_and_gradients_are_those_of_one_gpu(schedule, rows):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        torch.manual_seed(0)
        halves = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(f"cuda:{index}") for index in range(2)]
        x = torch.randn(rows, 4, device="cuda:0")
        parts = x.chunk(1 if schedule == ONE_BATCH else 3)
        for part in parts:
            (halves[1](halves[0](part).to("cuda:1")).square().mean() / len(parts)).backward()
        due = [parameter.grad.cpu() for half in halves for parameter in half.parameters()]
        for half in halves:
            half.zero_grad()
        Pipe(halves).step(x, len(parts), schedule)
        for parameter, gradient in zip([p for half in halves for p in half.parameters()], due, strict=True):
            assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-6)


def test_a_stopped_run_has_no_share_of_a_step_that_it_did_not_see():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        run = pipeline_step((1, 1), 2, [ONE_BATCH, GPIPE], width=64, batch=64)
        assert run.total == 4 + 8
        for _ in range(6):
            next(run)
        run.close()
    result = run.result()
    assert is_whole(result, ONE_BATCH) and not is_whole(result, GPIPE) and stages(result) == 2
    assert waiting_share(result, GPIPE) is None and waiting_share(result, ONE_BATCH) > 0


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        first, second = (collect(pipeline_step((1, 1), 2, width=64, batch=64)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("seconds") == pytest.approx(second.column("seconds"))


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        pipeline_step()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        for layers in ((2, 2, 2, 2), (), (0, 1), 2):
            with pytest.raises(ValueError, match="layers=.*of each of 1 to 2 stages"):
                pipeline_step(layers)
        for schedules in ((), "GPipe", ["2F2B"]):
            with pytest.raises(ValueError, match="give one or more of 'one batch', 'GPipe', '1F1B'"):
                pipeline_step((1, 1), schedules=schedules)
        with pytest.raises(ValueError, match="micro_batches=9: a batch of 8 rows"):
            pipeline_step((1, 1), 9, batch=8)
        with pytest.raises(ValueError, match="link=0: give a whole number"):
            pipeline_step((1, 1), link=0)
        with pytest.raises(ValueError, match="width=100000: give at most 65536"):
            pipeline_step((1, 1), width=100000)


@pytest.mark.gpu(4)
def test_four_real_gpus_say_the_same():
    with labkit.use(gpus=4, virtual=False, quiet=True):
        result = collect(pipeline_step())
    assert waiting_share(result, ONE_BATCH) > 0.7
    assert waiting_share(result, GPIPE) == pytest.approx(bubble(4, 8), abs=0.1)
    assert peaks(result, ONE_F_ONE_B)[0] < peaks(result, GPIPE)[0]
