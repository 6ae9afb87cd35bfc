"""Machines with virtual GPUs, and the network between them: where the ranks of a program are, or would be."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_BITS = {"Gb/s": 1e9, "Gbit/s": 1e9, "GB/s": 8e9}
NETWORK = "400Gb/s"  # what the adapter of one GPU carries to other nodes, unless a program says otherwise


def parse_rate(text: str) -> float:
    """Return the bytes per second of "400Gb/s" or "50GB/s". Raises ValueError naming the units."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\S+)\s*", text)
    if match is None or match[2] not in _BITS or float(match[1]) == 0:
        raise ValueError(f"network={text!r}: give what the adapter of one GPU carries, such as '400Gb/s' (units: Gb/s, Gbit/s, GB/s)")
    return float(match[1]) * _BITS[match[2]] / 8


@dataclass(frozen=True)
class Cluster:
    """How ranks lie on nodes: `per_node` of them on each, all on one if it is None. `network` is in bytes per second of a GPU's adapter."""

    per_node: int | None = None
    network: float = parse_rate(NETWORK)

    def ranks_by_node(self, ranks: Sequence[int]) -> Counter[int]:
        """How many of these ranks each node has."""
        return Counter(rank // self.per_node if self.per_node else 0 for rank in ranks)
