"""Machines with virtual GPUs and the network between them, on which the ranks of a program run."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_BITS = {"Gb/s": 1e9, "Gbit/s": 1e9, "GB/s": 8e9}
NETWORK = "400Gb/s"  # default rate of one GPU's network adapter


def parse_rate(text: str) -> float:
    """Convert a rate such as "400Gb/s" or "50GB/s" to bytes per second.

    Raises ValueError for other units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\S+)\s*", text)
    if match is None or match[2] not in _BITS or float(match[1]) == 0:
        raise ValueError(
            f"network={text!r}: give the rate of one GPU's network adapter, such as '400Gb/s' "
            "(units: Gb/s, Gbit/s, GB/s)"
        )
    return float(match[1]) * _BITS[match[2]] / 8


@dataclass(frozen=True)
class Cluster:
    """The distribution of ranks over machines (nodes).

    per_node: ranks on each node; with None all ranks are on one node
    network: bytes per second of each GPU's network adapter
    """

    per_node: int | None = None
    network: float = parse_rate(NETWORK)

    def ranks_by_node(self, ranks: Sequence[int]) -> Counter[int]:
        """Return how many of these ranks are on each node."""
        if not self.per_node:
            return Counter(0 for _ in ranks)
        return Counter(rank // self.per_node for rank in ranks)
