"""The time that a collective takes.

The ranks form a ring over the links of their nodes, and each rank sends to the next one. An
all-reduce over many nodes can use a tree instead.

Each kind of collective has a latency and a rate, for two ranks and for four. They were fitted to
collectives of 16 MiB and more on H200s with NVLink (torch 2.11, NCCL 2.28.9), with least relative
squares. For two ranks, we took the fastest of twelve runs for each size. For four ranks, we took
the median of three runs for each size. Smaller collectives last as long as the host needs to launch
them. The bytes are those of a ring (PERFORMANCE.md in NCCL's tests). The rest is assumed:

- Three ranks are halfway between two and four. Each rank beyond four adds one hop's time.
- The rate of another model is in proportion to `p2p_bytes_per_second` of its profile.
- With NCCL_P2P_DISABLE=1, NCCL's own switch, and between GPUs without NVLink, all data goes through
  the host's memory, so it crosses PCIe twice. Lesson 10's lab then takes 31.7 ms at width 4096,
  where two H200s took 28.2 to 29.0 ms. At width 1024 it takes 3.9 ms, where they took 4.3 to 4.8 ms
  (torch 2.11, three runs on 2026-11-25).

No traffic between nodes was measured. Each GPU is assumed to have a network adapter of its own. A
node with several ranks has as many rings, which share the bytes. A step takes what NCCL counts for
it when it chooses an algorithm (hwLat of LL128 and the number of steps in src/graph/tuning.cc).
"""

import os
from collections.abc import Callable, Sequence
from math import ceil, log2

from virtualgpu import profiles
from virtualgpu.cluster import Cluster
from virtualgpu.profiles import Profile

# For two and for four ranks, by kind: the latency in seconds until the first byte moves, and the
# bytes per second that one rank sends.
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
# Seconds of one step from node to node.
_NETWORK_RING_SECONDS, _NETWORK_TREE_SECONDS = 4.0e-6, 8.5e-6
_TREE_SHARE_OF_RING_RATE = 0.9
# Host seconds of one call, measured with collectives of 1 KiB to 4 MiB. An all_to_all launches a
# send and a receive for each rank.
_LAUNCH_SECONDS = 32e-6
_ALL_TO_ALL_LAUNCH_SECONDS = 36e-6

# Bytes that each of n ranks sends to the next one, for each byte of its input.
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
    """Return the seconds from the moment when the last rank enters until the collective is done.

    `kind` is a key of `_SENT`, and `nbytes` is the size of one rank's input. `ranks` are the ranks
    that take part, with their numbers in the world.
    """
    latency, rate = _latency_and_rate(kind, len(ranks))
    rate *= _link_rate(profile) / profiles.load("H200").p2p_bytes_per_second
    by_node = cluster.ranks_by_node(ranks)
    nodes, sent = len(by_node), nbytes * _SENT[kind](len(ranks))
    hops_in_latency = min(len(ranks), max(_RATES)) - 1
    latency += max(0, len(ranks) - nodes - hops_in_latency) * _HOP_SECONDS
    if nodes == 1:
        return latency + sent / rate
    rate = min(rate, max(by_node.values()) * cluster.network)
    passes = 1
    if kind == "all_reduce":
        passes = 2
    ring = latency + passes * (nodes - 1) * _NETWORK_RING_SECONDS + sent / rate
    if kind != "all_reduce":
        return ring
    tree_steps = passes * ceil(log2(nodes))
    tree_rate = _TREE_SHARE_OF_RING_RATE * rate
    tree = latency + tree_steps * _NETWORK_TREE_SECONDS + sent / tree_rate
    return min(ring, tree)


def _latency_and_rate(kind: str, ranks: int) -> tuple[float, float]:
    """Return the latency in seconds and the rate in bytes per second of a kind of collective.

    The latency lasts until the first byte moves. The rate is what one rank sends. Both are
    interpolated between the fitted values of two and four ranks.
    """
    (latency_2, rate_2), (latency_4, rate_4) = _RATES[2][kind], _RATES[4][kind]
    share = min(max(ranks - 2, 0), 2) / 2
    latency = latency_2 + share * (latency_4 - latency_2)
    return latency, 1 / ((1 - share) / rate_2 + share / rate_4)


def _link_rate(profile: Profile) -> float:
    """Return the bytes per second from one GPU of a node to another."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") == "0":
        return profile.p2p_bytes_per_second
    return min(
        profile.p2p_bytes_per_second,
        profile.pinned_d2h_bytes_per_second / 2,
        profile.pinned_h2d_bytes_per_second / 2,
    )


def launch_seconds(kind: str) -> float:
    """Return the host's seconds for one call of a collective of this kind."""
    if kind == "all_to_all":
        return _ALL_TO_ALL_LAUNCH_SECONDS
    return _LAUNCH_SECONDS
