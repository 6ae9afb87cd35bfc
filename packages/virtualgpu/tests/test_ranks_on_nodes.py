"""The nodes of ranks, and the rate of a network."""

import pytest

from virtualgpu.cluster import Cluster, parse_rate


def test_ranks_are_counted_by_node():
    assert Cluster(4).ranks_by_node([0, 3, 4, 11]) == {0: 2, 1: 1, 2: 1}
    assert Cluster().ranks_by_node([0, 3, 4, 11]) == {0: 4}


@pytest.mark.parametrize(
    ("text", "rate"), [("400Gb/s", 50e9), ("25 GB/s", 25e9), ("2.5Gbit/s", 312.5e6)]
)
def test_a_rate_is_read_with_its_unit(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["400", "0Gb/s", "fast", "400gb", "-1Gb/s"])
def test_another_rate_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match=r"units: Gb/s, Gbit/s, GB/s"):
        parse_rate(text)
