"""The judges of lesson 11 on observations written by hand."""

import random

import pytest
import torch

from gpulessons.lesson_11 import checks as lesson_11
from gpulessons.lesson_11 import continued_training, observed_in_ranks
from gpulessons.lesson_11.checks import (
    judge_adam,
    judge_backward,
    judge_budgets,
    judge_layers,
    judge_mean,
    judge_meshes,
    judge_training,
)
from gpulessons.lesson_11.continued_training import UNCHANGED, UNREADABLE
from gpulessons.lesson_11.observed_in_ranks import RIGHT, due_groups

LAYERS = {
    "ranks": 2,
    "x": [[1, 2]],
    "first": [[1, 1], [-1, 0]],
    "first_bias": [1, 0],
    "second": [[2, 5]],
    "second_bias": [3],
}


def test_what_an_answer_changes_of_its_layers_is_told():
    def two_layers(x, first, first_bias, second, second_bias):
        second_bias /= 2
        return x

    assert observed_in_ranks.cut_layers(two_layers, LAYERS | {"rank": 0})["changed"] == [
        "second_bias"
    ]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({"type": "Tensor", "shape": [1, 1], "values": [11.0]}, None),
        ({"type": "tuple"}, "rank 1 of 2 returned tuple"),
        (
            {"type": "Tensor", "shape": [1, 2], "values": [11.0, 11.0]},
            "a tensor of [1, 2]. Expected [1, 1], the whole output",
        ),
        (
            {"type": "Tensor", "shape": [1, 1], "values": [14.0]},
            "rank 1 of 2 has [14] from element 0 on, where the whole layers give [11]",
        ),
        ({"changed": ["second_bias"]}, "rank 1 of 2 has changed second_bias"),
        ({"sent": 5000}, "Leave the weights where they are"),
    ],
)
def test_cut_layers_are_judged_on_every_rank(answer, hint):
    good = {"type": "Tensor", "shape": [1, 1], "values": [11.0], "changed": [], "sent": 4}
    verdict = judge_layers([[good, good | answer]], [LAYERS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_budgets_are_judged_by_the_fewest_gpus_that_are_enough():
    case = [100, 10, 480]  # 1,600 bytes in rooms of 400
    assert judge_budgets([4], [case]).passed
    for answer, hint in (
        (5, "4 GPUs are enough and fewer are not. You say 5"),
        (3, "You say 3"),
        ("float", "returned float"),
    ):
        assert hint in judge_budgets([answer], [case]).message


def test_the_whole_layer_matters_in_some_drawn_budget():
    for seed in range(20):
        cases = lesson_11.draw_budgets(random.Random(seed))
        needed = [
            -(-16 * parameters // (memory - 8 * layer)) for parameters, layer, memory in cases
        ]
        assert min(needed) == 1 < max(needed)
        assert needed != [-(-16 * parameters // memory) for parameters, _, memory in cases]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({}, None),
        ({"returned": "Tensor"}, "rank 1 returned Tensor. Expected two tensors"),
        (
            {"x": "the sum over the ranks"},
            "on rank 1, the gradient of x is the sum over the ranks.",
        ),
        (
            {"part": "other numbers"},
            "on rank 1, the gradient of this rank's rows of the weight is other numbers.",
        ),
        ({"changed": ["upstream"]}, "rank 1 has changed upstream"),
        ({"to_all": True}, "Which collective gives each rank only its own part?"),
        ({"peak": 2.5}, "rank 1 held 2.5 times the weight's bytes"),
        ({"peak": float("nan")}, "What does not have to be whole at the same time?"),
    ],
)
def test_a_backward_is_judged_by_its_gradients_and_by_what_was_whole(answer, hint):
    good = {"x": RIGHT, "part": RIGHT, "changed": [], "to_all": False, "peak": 1.5}
    verdict = judge_backward([good, good | answer], {})
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({}, None),
        ({"returned": "Adam"}, "returned Adam. Expected the function `step`"),
        ({"still": [0, 2]}, "in step 2, 2 of 3 parameters with a gradient did not move on rank 1"),
        (
            {"wrong": [1, 0]},
            "after step 1, 1 of 4 parameters on rank 1 are not those of Adam with lr=0.5",
        ),
        ({"altered": [0, 4]}, "step 2 has changed the gradient of 4 of 4 parameters on rank 1"),
        ({"drew": ["NumPy"]}, "changed the random state of NumPy on rank 1"),
        ({"kept": 7 << 10}, "rank 1 keeps 7 KiB. Adam's whole state is 10 KiB"),
        (
            {"others": 1},
            "all 3 ranks together keep 15 KiB. Adam's whole state is 10 KiB. "
            "What does more than one rank keep?",
        ),
    ],
)
def test_sharded_adam_is_judged_by_its_steps_and_by_what_each_rank_keeps(answer, hint):
    good = {"still": [0, 0], "wrong": [0, 0], "altered": [0, 0], "kept": 5 << 10, "whole": 10 << 10}
    good["drew"] = []
    others = answer.pop("others", 0)
    verdict = judge_adam(
        [good, good | answer, *[good] * others], {"layers": 2, "steps": 2, "lr": 0.5}
    )
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({}, None),
        ({"groups": "DeviceMesh"}, "returned DeviceMesh. Expected a pair of groups"),
        ({"groups": [[0, 1, 2], "int"]}, "for the column of rank 1 you returned int"),
        (
            {"groups": [[1, 4], [0, 1, 2]]},
            "in a mesh of 2 × 3 ranks, the row of rank 1 has the ranks [0, 1, 2]. "
            "Your group has [1, 4]",
        ),
        (
            {"reached": [[0, 1, 2], [1]]},
            "the groups of rank 1 of 2 × 3 ranks added up [[0, 1, 2], [1]]",
        ),
    ],
)
def test_groups_are_judged_by_who_is_in_them_and_whom_they_reach(answer, hint):
    meshes = [[3, 2], [2, 3]]
    told = [
        [{"groups": due_groups(rank, *mesh), "reached": due_groups(rank, *mesh)} for mesh in meshes]
        for rank in range(6)
    ]
    told[1][1] |= answer
    verdict = judge_meshes(told, meshes)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_the_groups_that_are_due_are_rows_and_columns():
    assert due_groups(4, 2, 3) == [[3, 4, 5], [1, 4]] and due_groups(4, 3, 2) == [[4, 5], [0, 2, 4]]


TENSORS = {"shape": [2], "values": [[1, 4], [2, 4], [3, 4]]}
MEAN = {"type": "Tensor", "shape": [2], "values": [2.0, 4.0]}
TWO_HALVES = [["c10d::_reduce_scatter_base_", 12], ["c10d::_allgather_base_", 4]]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({}, None),
        ({"answer": {"type": "list"}}, "rank 2 of 3 returned list, not a tensor"),
        (
            {"answer": MEAN | {"shape": [1, 2]}},
            "returned a tensor of [1, 2]. Return the shape of x.",
        ),
        (
            {"answer": MEAN | {"values": [6.0, 12.0]}},
            "has [6, 12] from element 0 on, where the mean is [2, 4]",
        ),
        ({"changed": True}, "has changed x"),
        ({"calls": [["c10d::allreduce_", 8]]}, "called another collective, allreduce"),
        (
            {"calls": [["c10d::_reduce_scatter_base_", 28], TWO_HALVES[1]]},
            "gave 28 bytes to a reduce_scatter, and x has only 8",
        ),
        ({"calls": [["c10d::_allgather_base_", 8]]}, "gave only 0 bytes of x to a reduce_scatter"),
        (
            {"calls": [TWO_HALVES[0], ["c10d::_allgather_base_", 12]]},
            "gave 12 bytes to an all_gather",
        ),
    ],
)
def test_a_mean_is_judged_by_its_values_and_by_the_collectives(answer, hint):
    good = {"answer": MEAN, "changed": False, "calls": TWO_HALVES}
    verdict = judge_mean([[good], [good], [good | answer]], [TENSORS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({}, None),
        ({"returned": "Adam"}, "rank 0 of 2 returned Adam, not the model"),
        ({"built": []}, "did not call build()"),
        ({"built": ["cuda"]}, "built the whole model on cuda"),
        ({"whole": 2}, "2 of 6 parameters are not divided"),
        ({"apart": 1}, "only 1 of 3 layers"),
        ({"undivided": ["cuda"]}, "gave memory on cuda to whole layers"),
        ({"saved": UNREADABLE}, "no checkpoint with the weights and averages"),
        ({"saved": UNCHANGED}, "the checkpoint from before the training"),
        (
            {"saved": "those of a training without clipping"},
            "They are those of a training without clipping.",
        ),
    ],
)
def test_a_continued_training_is_judged_by_how_it_is_divided_and_by_what_it_saved(answer, hint):
    good = {
        "built": ["meta"],
        "whole": 0,
        "parameters": 6,
        "undivided": [],
        "apart": 3,
        "layers": 3,
        "saved": RIGHT,
    }
    verdict = judge_training([good | answer, good], {"ranks": 2})
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_a_layer_notes_where_its_parameters_got_memory_while_they_were_whole():
    noted = []
    with torch.device("meta"):
        model = continued_training.network({"width": 2, "layers": 2}, noted)
    assert noted == []
    model.to_empty(device="cpu")
    assert noted == ["cpu"] * 4
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_the_gradients_of_one_continued_step_are_not_clipped():
    """Clipping would hide a loss that is too large by a factor."""
    for seed in range(5):
        case = lesson_11.draw_training(random.Random(seed))
        torch.manual_seed(case["seed"])
        model, norms = continued_training.network(case), []
        for x, y in continued_training.batches(case, 0, 1, "cpu"):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        assert [norm < 1 for norm in norms] == [scale == 1 for scale in case["scales"]]


def test_tensors_in_the_memory_of_the_host_are_counted():
    before = observed_in_ranks.host_bytes()
    kept = torch.zeros(1000)
    assert observed_in_ranks.host_bytes() - before == kept.nbytes


def test_six_ranks_also_form_a_row_and_a_column():
    assert sorted(lesson_11.draw_meshes(random.Random(1))) == [[1, 6], [2, 3], [3, 2], [6, 1]]
