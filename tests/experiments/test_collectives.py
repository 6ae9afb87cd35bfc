"""What ranks hold before and after a collective, as real ranks say."""

import pytest

from labkit.experiments import collect
from labkit.experiments.collectives import COLLECTIVES, collectives

pytestmark = pytest.mark.slow


def test_two_ranks_say_what_they_hold():
    result = collect(collectives(ranks=2))
    assert result.badge == "measured in 2 ranks on the CPU, gloo"
    assert len(result.rows) == collectives(ranks=2).total == 2 * len(COLLECTIVES)
    brought, sums = [[10, 11], [20, 21]], [30, 32]
    for collective in COLLECTIVES[:3]:
        assert result.column("before", collective=collective) == brought
    assert result.column("after", collective="broadcast") == [brought[0]] * 2
    assert result.column("after", collective="all_reduce") == [sums] * 2
    assert result.column("after", collective="reduce_scatter") == [[30], [32]]
    assert result.column("before", collective="all_gather") == [[30], [32]]
    assert result.column("after", collective="all_gather") == [sums] * 2


@pytest.mark.parametrize("ranks", [0, 1, 9, 2.0])
def test_other_numbers_of_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks}"):
        collectives(ranks)
