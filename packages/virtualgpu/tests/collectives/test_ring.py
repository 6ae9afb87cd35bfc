"""The time of collectives within a node and between nodes."""

import pytest

from virtualgpu import profiles
from virtualgpu.cluster import Cluster
from virtualgpu.collectives.ring import collective_seconds

H100, LARGE = profiles.load("H100"), 1 << 30
NODE = Cluster(8, 400e9 / 8)


def seconds(kind, nbytes, ranks, cluster=NODE):
    return collective_seconds(H100, kind, nbytes, ranks, cluster)


def test_in_a_node_the_network_does_not_matter():
    assert seconds("all_reduce", LARGE, range(8, 16)) == seconds(
        "all_reduce", LARGE, range(8), Cluster(None, 1.0)
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_between_nodes_the_adapters_limit_the_rate(kind):
    few, many = seconds(kind, LARGE, [0, 8]), seconds(kind, LARGE, [0, 1, 2, 3, 8, 9, 10, 11])
    slower = seconds(kind, LARGE, [0, 8], Cluster(8, 200e9 / 8))
    assert slower == pytest.approx(2 * few, rel=0.01)
    # An all_gather moves seven times as many bytes, and the other kinds move fewer.
    assert many < few * 7.1
    assert seconds(kind, LARGE, [0, 1]) < few


def test_a_send_to_another_node_goes_by_one_adapter():
    assert seconds("send", LARGE, [0, 8]) == pytest.approx(LARGE / NODE.network, rel=0.01)


def test_a_small_all_reduce_over_many_nodes_goes_by_a_tree():
    first_ranks = [range(0, 8 * nodes, 8) for nodes in (64, 128)]
    tree = [seconds("all_reduce", 1024, ranks) for ranks in first_ranks]
    ring = [seconds("all_gather", 1024, ranks) for ranks in first_ranks]
    # one more step in each direction, and 64 more
    assert tree[1] - tree[0] < 20e-6 < 200e-6 < ring[1] - ring[0]


def test_nccls_switch_sends_through_the_host(monkeypatch):
    def slower(name):
        monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
        before = collective_seconds(profiles.load(name), "all_reduce", LARGE, [0, 1], NODE)
        monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
        assert collective_seconds(profiles.load(name), "all_reduce", LARGE, [0, 1], NODE) == before
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        return collective_seconds(profiles.load(name), "all_reduce", LARGE, [0, 1], NODE) / before

    assert slower("H200") == pytest.approx(376e9 / (55.3e9 / 2), rel=0.01)  # over PCIe twice
    assert slower("T4") == pytest.approx(1.0)  # goes through the host in either case


# Medians of three runs on four H200s (torch 2.11, NCCL 2.28.9): kind, MiB of the smaller tensor,
# seconds.
FOUR_H200S = [
    ("all_reduce", 16, 98.25e-6),
    ("broadcast", 16, 72.56e-6),
    ("all_gather", 16, 191.39e-6),
    ("reduce_scatter", 16, 191.79e-6),
    ("all_to_all", 16, 74.02e-6),
    ("reduce", 16, 82.85e-6),
    ("all_reduce", 64, 326.96e-6),
    ("broadcast", 64, 202.68e-6),
    ("all_gather", 64, 664.89e-6),
    ("reduce_scatter", 64, 670.89e-6),
    ("all_to_all", 64, 199.0e-6),
    ("reduce", 64, 216.62e-6),
    ("all_reduce", 256, 1192.46e-6),
    ("broadcast", 256, 745.22e-6),
    ("all_gather", 256, 2479.22e-6),
    ("reduce_scatter", 256, 2472.69e-6),
    ("all_to_all", 256, 668.65e-6),
    ("reduce", 256, 773.83e-6),
]


def test_large_collectives_of_four_ranks_take_as_long_as_on_four_h200s():
    errors = []
    for kind, mebibytes, measured in FOUR_H200S:
        ranks = 4 if kind == "reduce_scatter" else 1  # the input is as large as four outputs
        modelled = collective_seconds(
            profiles.load("H200"), kind, ranks * mebibytes << 20, range(4), NODE
        )
        errors.append(abs(modelled / measured - 1))
    assert max(errors) < 0.03


def test_the_time_of_three_ranks_lies_between():
    times = [seconds("all_reduce", LARGE, range(ranks)) for ranks in (2, 3, 4)]
    assert times == sorted(times)
