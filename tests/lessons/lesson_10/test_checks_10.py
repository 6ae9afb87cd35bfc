"""The judges of lesson 10 on observations written by hand."""

import random
from pathlib import Path

import pytest

from gpulessons.lesson_10 import checks as lesson_10
from gpulessons.lesson_10.checks import judge_accumulation, judge_gradients, judge_lives, judge_rows

CASE = [[[1, 2, 3], [4, 5], None], [[3, 4, 5], [0, 1], None]]
MEANS = [[2.0, 3.0, 4.0], [2.0, 3.0], None, None]
GOOD = {"gradients": MEANS, "parameters": [[1.0] * 3, [1.0] * 2, [1.0] * 2]}


@pytest.mark.parametrize(
    ("second", "hint"),
    [
        (GOOD, None),
        (
            GOOD | {"parameters": [[0.5] * 3, [1.0] * 2, [1.0] * 2]},
            "rank 1 of 2 has changed its parameters",
        ),
        (
            GOOD | {"gradients": [[4.0, 6.0, 8.0], *MEANS[1:]]},
            r"the mean over all ranks is [2, 3, 4], and it has [4, 6, 8] now",
        ),
        (GOOD | {"gradients": [MEANS[0], None, None, None]}, "and it has none now"),
        (
            GOOD | {"gradients": [*MEANS[:3], [0.0, 0.0]]},
            "a parameter without a gradient has [0, 0] on rank 1 of 2 now",
        ),
    ],
)
def test_gradients_are_judged_on_every_rank(second, hint):
    verdict = judge_gradients([[GOOD, second]], [CASE])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


EPOCHS = {"count": 9, "ranks": 2, "epochs": [3, 8, 3]}
THIRD, EIGHTH = ([4, 0, 2, 7, 6], [1, 3, 8, 5]), ([0, 5, 8, 2, 1], [4, 3, 7, 6])
DRAWN = ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("epochs", "drawn", "hint"),
    [
        ((THIRD, EIGHTH, THIRD), DRAWN, None),
        ((("int", "int"),) * 3, DRAWN, "returned int"),
        (
            (([4, 0], [1, 3]), EIGHTH, THIRD),
            DRAWN,
            "of 9 rows, 5 went to none of 2 ranks in epoch 3, and 0 came up once more",
        ),
        (
            (THIRD, ([0, 5, 8, 2, 1], [4, 3, 7, 5]), THIRD),
            DRAWN,
            "1 went to none of 2 ranks in epoch 8, and 1 came up once more",
        ),
        ((THIRD, ([0, 5, 8, 2, 1, 4], [3, 7, 6]), THIRD), DRAWN, "the ranks have [6, 3] rows"),
        ((THIRD, ([1, 3, 8, 5, 0], [4, 2, 7, 6]), THIRD), DRAWN, "most rows follow the same row"),
        (
            (THIRD, ([7, 4, 6, 0, 2], [5, 1, 8, 3]), THIRD),
            DRAWN,
            "the same rows are together on a rank",
        ),
        (
            ([[0, 2, 4, 6, 8], [1, 3, 5, 7]],) * 3,
            DRAWN,
            "in epoch 3 the rows come in their original order",
        ),
        ((THIRD, EIGHTH, EIGHTH), DRAWN, "asked again for epoch 3"),
        (
            (THIRD, EIGHTH, THIRD),
            ([0.1, 0.2, 0.3], [0.4, 0.2, 0.6]),
            "random draws the same on all ranks",
        ),
        (
            (THIRD, EIGHTH, THIRD),
            (DRAWN[0], [0.4, 0.5, 0.7]),
            "rank 1 had a random state of its own",
        ),
    ],
)
def test_rows_are_judged_over_ranks_and_epochs(epochs, drawn, hint):
    told = [
        {
            "rows": [shares[rank] for shares in epochs],
            "drawn": drawn[rank],
            "undisturbed": DRAWN[rank],
        }
        for rank in range(2)
    ]
    verdict = judge_rows([told], [EPOCHS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


# Rank 0 has the rows (1, 0) and (0, 2), and rank 1 has (2, 0) and (0, 0). The weights are 0.5, so
# (row · w)² has the gradient (x0 + x1) · row.
PARTS = [[[[1, 0]], [[0, 2]]], [[[2, 0]], [[0, 0]]]]
SENT_ONCE = {
    "gradient": [1.25, 1.0],
    "messages": 1,
    "weight": [0.5, 0.5],
    "rows": [1, 1],
    "waiting": 1,
}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"weight": [0.4, 0.5]}, "the weights have changed"),
        ({"messages": 0}, "nothing was sent"),
        (
            {"gradient": [2.5, 2.0]},
            "rank 0 has the gradient [2.5, 2]. The gradient of all ranks' rows in one batch is "
            "[1.25, 1]",
        ),
        ({"gradient": None}, "has the gradient none"),
        ({"messages": 2}, "but it was sent 2 times. Once is enough for 2 micro-batches"),
        (
            {"rows": [2]},
            "the model got batches of [2] rows. Expected 2 micro-batches of 1, one at a time",
        ),
        ({"waiting": 2}, "the outputs of 2 others were still there"),
    ],
)
def test_accumulation_is_judged_by_gradient_and_messages(change, hint):
    verdict = judge_accumulation([SENT_ONCE | change] * 2, PARTS)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


# Momenta 8, 12, 14 with gradients of 8: the weight falls by an eighth of their sum.
LIVES = {"steps": 3, "dies": 1, "gradients": [8, 8, 8]}
NOTHING = {"saved": 0, "placed": 0, "removed": 0, "moved": 0, "overwritten": 0}
SAVED = NOTHING | {"saved": 2, "placed": 2}
FIRST = {"begun": [0, 1], "files": [None, 7], "weight": 0.0, "momentum": 8.0}
SECOND = {"begun": [1, 2], "weight": -3.25, "momentum": 14.0} | NOTHING


def lives(first=FIRST | SAVED, other=FIRST | NOTHING, second=SECOND, third=()):
    return [[first, other], [SECOND, second], [{"begun": list(third)}] * 2]


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        (lives(), None),
        (
            lives(FIRST | SAVED | {"begun": [0, 1, 2]}),
            "should do the steps 0 to 1, in which it dies. It did the steps [0, 1, 2]",
        ),
        (
            lives(FIRST | SAVED | {"files": [None, None]}),
            "after step 0, the file was not there. Save after every step",
        ),
        (lives(FIRST | SAVED | {"files": [7, 7]}), "after step 0, the file was as before"),
        (lives(other=FIRST | SAVED), "2 ranks saved the checkpoint"),
        (lives(FIRST | SAVED | {"placed": 0}), "was written in place"),
        (lives(FIRST | SAVED | {"overwritten": 1}), "was written in place"),
        (lives(FIRST | SAVED | {"moved": 1}), "was written in another folder, and moved"),
        (lives(FIRST | SAVED | {"removed": 1}), "the file was removed"),
        (
            lives(second=SECOND | {"begun": [0, 1, 2]}),
            "1 steps were done when the ranks died. After the restart, rank 1 did the steps "
            "[0, 1, 2] of 3",
        ),
        (
            lives(second=SECOND | {"weight": -2.0, "momentum": 12.0}),
            "The momentum was not restored",
        ),
        (
            lives(second=SECOND | {"weight": -2.0}),
            "rank 1 ends with the weight -2. Without the restart it would be -3.25. The weight",
        ),
        (lives(third=[2]), "all 3 steps were done. After another start, the ranks did [2]"),
    ],
)
def test_lives_are_judged_by_their_steps_and_their_end(told, hint):
    verdict = judge_lives(told, LIVES)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_a_life_finds_the_checkpoint_alone(monkeypatch):
    found = []

    def in_ranks(program, train, inputs):
        path = Path(inputs[0]["path"])
        found.append([entry.name for entry in path.parent.iterdir()])
        path.touch()
        path.with_suffix(".optimizer").touch()
        path.with_suffix(".parts").mkdir()

    monkeypatch.setattr(lesson_10, "in_ranks", in_ranks)
    lesson_10.observe_lives(None, {"dies": 2})
    assert found == [[], ["checkpoint.pt"], ["checkpoint.pt"]]


def test_the_rest_of_the_rows_is_too_much_for_one_rank():
    for seed in range(20):
        cases = lesson_10.draw_epochs(random.Random(seed))
        assert all(case["count"] % case["ranks"] for case in cases)
        assert any(case["count"] % case["ranks"] > 1 for case in cases)


def test_there_are_parts_enough_to_tell_who_keeps_their_graphs():
    assert min(len(lesson_10.draw_parts(random.Random(seed))[0]) for seed in range(20)) == 5
