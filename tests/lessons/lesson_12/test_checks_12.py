"""The draws and the judges of lesson 12 on observations written by hand."""

import random

import pytest

from gpulessons.lesson_12.checks import draw_nodes, judge_steps


def test_a_node_has_one_rank_another_two_whatever_the_draw():
    """Draw one node with one rank and one with two, besides the first node with three."""
    drawn = [draw_nodes(random.Random(seed)) for seed in range(20)]
    assert {tuple(per_node) for per_node in drawn} == {(3, 1, 2), (3, 2, 1)}


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ([4, False], None),
        ([None, False], "The newest step that all ranks find is 4. On rank 1 you return None."),
        (["list", False], "returned list. Expected the number of a step, or None"),
        ([4, True], "your function changed the list that it was given"),
    ],
)
def test_the_newest_step_is_judged_and_the_list_is_left_as_it_was(answer, hint):
    verdict = judge_steps([[[4, False]], [answer]], [[[4, 5], [2, 4]]])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message
