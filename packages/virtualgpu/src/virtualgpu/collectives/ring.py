"""How long a collective takes: a ring over the links of its nodes, each rank sending to the next; an
all_reduce over many nodes, a tree.

Each kind has a time to begin and a rate, for two ranks and for four. They were fitted on collectives
of 16 MiB and more on H200s with NVLink (torch 2.11, NCCL 2.28.9; least relative squares): twelve runs
of two ranks, the fastest of each size, and three runs of four ranks, the median of each size. Below
that size a collective lasts as long as its host needs to launch it. Three ranks lie in the middle,
assumed. Each rank beyond four adds a time to pass on, assumed. The bytes are those of a ring (NCCL's
tests, PERFORMANCE.md). Other models: the rate in proportion to `p2p_bytes_per_second` of their
profiles, assumed. With NCCL_P2P_DISABLE=1, NCCL's own switch, all goes through the host's memory:
twice over PCIe, assumed, as between GPUs without NVLink. Lesson 10's lab takes 31.7 ms so at width
4096, where two H200s took 28.2 to 29.0, and 3.9 ms at width 1024, where they took 4.3 to 4.8 (torch
2.11, three runs on 2026-11-25).

Between nodes nothing was measured: each GPU has a network adapter of its own, as many rings as a node
has ranks share the bytes, and a step takes what NCCL's own choice of an algorithm counts for it
(hwLat of LL128 and the number of steps in src/graph/tuning.cc).
"""

import os
from collections.abc import Callable, Sequence
from math import ceil, log2

from virtualgpu import profiles
from virtualgpu.cluster import Cluster
from virtualgpu.profiles import Profile

# By number of ranks and kind: seconds until the first byte moves, and bytes per second that one rank sends.
_RATES = {
    2: {
        "all_reduce": (20.7e-6, 302e9),
        "broadcast": (13.7e-6, 365e9),
        "all_gather": (26.6e-6, 261e9),
        "reduce_scatter": (26.5e-6, 259e9),
        "all_to_all": (22.3e-6, 294e9),
        "reduce": (12.5e-6, 377e9),
        "send": (11.7e-6, 362e9),
    },
    4: {
        "all_reduce": (24.7e-6, 340e9),
        "broadcast": (27.9e-6, 378e9),
        "all_gather": (37.7e-6, 326e9),
        "reduce_scatter": (38.1e-6, 326e9),
        "all_to_all": (34.3e-6, 313e9),
        "reduce": (36.9e-6, 368e9),
        "send": (13.7e-6, 358e9),
    },
}
_HOP_SECONDS = 1.5e-6
_NETWORK_RING_SECONDS, _NETWORK_TREE_SECONDS = 4.0e-6, 8.5e-6  # of a step from node to node
_TREE_RATE = 0.9  # of a ring's
_LAUNCH_SECONDS = 32e-6  # host time of one collective, from those of 1 KiB to 4 MiB,
_ALL_TO_ALL_LAUNCH_SECONDS = 36e-6  # which launches a send and a receive for each rank

# Bytes that each rank sends to the next, for each byte that the caller gives: of n ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "all_gather": lambda n: n - 1.0,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "reduce": lambda n: 1.0 if n > 1 else 0.0,
    "send": lambda n: 1.0,
}


def collective_seconds(
    profile: Profile, kind: str, nbytes: int, ranks: Sequence[int], cluster: Cluster
) -> float:
    """Seconds from the moment when the last rank enters. `nbytes` are those of one rank's input, `ranks` are numbered as in the world."""
    begin, rate = _begin_and_rate(kind, len(ranks))
    rate *= _link_rate(profile) / profiles.load("H200").p2p_bytes_per_second
    by_node = cluster.ranks_by_node(ranks)
    nodes, sent = len(by_node), nbytes * _SENT[kind](len(ranks))
    passed_on = min(len(ranks), max(_RATES)) - 1  # within the time to begin
    begin += max(0, len(ranks) - nodes - passed_on) * _HOP_SECONDS
    if nodes == 1:
        return begin + sent / rate
    rate = min(rate, max(by_node.values()) * cluster.network)
    passes = 2 if kind == "all_reduce" else 1
    ring = begin + passes * (nodes - 1) * _NETWORK_RING_SECONDS + sent / rate
    if kind != "all_reduce":
        return ring
    tree = begin + passes * ceil(log2(nodes)) * _NETWORK_TREE_SECONDS + sent / (_TREE_RATE * rate)
    return min(ring, tree)


def _begin_and_rate(kind: str, ranks: int) -> tuple[float, float]:
    """Return the seconds until the first byte moves and the bytes per second that one rank sends."""
    (begin_2, rate_2), (begin_4, rate_4) = _RATES[2][kind], _RATES[4][kind]
    share = min(max(ranks - 2, 0), 2) / 2
    return begin_2 + share * (begin_4 - begin_2), 1 / ((1 - share) / rate_2 + share / rate_4)


def _link_rate(profile: Profile) -> float:
    """Bytes per second from one GPU of a node to another."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") == "0":
        return profile.p2p_bytes_per_second
    return min(
        profile.p2p_bytes_per_second,
        profile.pinned_d2h_bytes_per_second / 2,
        profile.pinned_h2d_bytes_per_second / 2,
    )


def launch_seconds(kind: str) -> float:
    """Host seconds of one call."""
    return _ALL_TO_ALL_LAUNCH_SECONDS if kind == "all_to_all" else _LAUNCH_SECONDS
