"""Answers that checks try in ranks are graded in the sandbox, with virtual GPUs and without."""

import pytest

from .handed_in import solution

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", ["10.1", "10.5"])
def test_ranks_meet_in_the_sandbox(number, tried):
    examined = tried(number, "import torch.distributed as dist", solution(number))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, []), (
        examined.exercises
    )
