"""The draws and the judges of lesson 12 on observations written by hand."""

import random

import pytest

from gpulessons.lesson_12.checks import (
    _common,
    _late_rank,
    _waits,
    draw_entries,
    draw_nodes,
    judge_steps,
    judge_sums,
)


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


@pytest.mark.parametrize(
    ("between", "hint"),
    [
        ([8], None),  # each rank sends its half, so the two ranks of a node send the whole tensor
        ([16], "may get 8 B from this rank. It got 16 B"),
        ([4], "collectives between nodes carried only 16 B. The sums of a node have 24 B"),
        ([], "collectives between nodes carried only 0 B"),
    ],
)
def test_the_sums_of_a_node_travel_in_collectives_of_a_share_each(between, hint):
    """Two nodes have two ranks each. A tensor has 16 B, or 24 B where too little is sent."""
    size = 24 if between == [4] else 16
    case = {"per_node": 2, "rows": [[1] * (size // 4)] * 4}
    told = [{"values": [4.0] * (size // 4), "bytes": size, "between": between}] * 4
    verdict = judge_sums(told, case)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_a_case_of_the_late_rank_misleads_who_rounds_the_waits():
    for seed in range(5):
        cases = draw_entries(random.Random(seed))
        rounded = [
            [sum(round(wait, 2) for wait in waits) for waits in _waits(_common(case))]
            for case in cases
        ]
        assert [sums.index(max(sums)) for sums in rounded] != [_late_rank(case) for case in cases]
