"""Simulation of one rank of a large world in this process, on virtual GPUs without values.

The other ranks do not exist. `virtualgpu.collectives.simulated` describes what replaces them.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from virtualgpu.cluster import Cluster, parse_rate
from virtualgpu.collectives import simulated
from virtualgpu.commands import set_up_for_times
from virtualgpu.instruments import Span
from virtualgpu.machines import MAXIMUM, VirtualGPUs, gibibytes, use, with_maker
from virtualgpu.rank_variables import rank_variables
from virtualgpu.script import run_script

LARGEST = 1 << 20  # the most ranks of a world
LIKE = "H100"  # the model of GPUs, unless a program says otherwise
Tell = Callable[[str], object]  # receives a sentence about the world


def check(world: int, nodes: int) -> None:
    """Raise ValueError if `world` ranks cannot be divided among `nodes` machines."""
    if not 1 <= world <= LARGEST:
        raise ValueError(f"--simulate {world}: choose a whole number from 1 to {LARGEST}")
    if nodes < 1 or world % nodes or world // nodes > MAXIMUM:
        parts = f"{world} ranks do not divide into so many machines of 1 to {MAXIMUM} GPUs each"
        raise ValueError(f"--nodes {nodes}: {parts}")


def described(rank: int, world: int, nodes: int, name: str) -> str:
    """Return a sentence that says which rank of which world is simulated.

    It names the GPU model `name`.
    """
    several = "s" * (nodes > 1)
    gpus = f"{world // nodes} virtual {with_maker(name)}"
    return f"rank {rank} of {world:,} simulated, on {nodes:,} node{several} of {gpus}."


def set_up(
    world: int,
    nodes: int,
    rank: int,
    network: str,
    like: str | None,
    memory: str | None,
    tell: Tell,
    host: float = 1.0,
) -> VirtualGPUs:
    """Make this process rank `rank` of `world` ranks, until it ends.

    The world has `nodes` machines, and one virtual GPU per rank. Raises ValueError for an argument
    that is not possible, and changes nothing then.
    """
    check(world, nodes)
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank}: choose a whole number from 0 to {world - 1}")
    per_node = world // nodes
    cluster = Cluster(per_node, parse_rate(network))
    gpus = use(per_node, like or LIKE, memory, values=False, host=host)
    gpus.machine.cluster = cluster
    os.environ.update(rank_variables(world, rank, per_node))
    set_up_for_times(gpus, virtual_time=True)
    simulated.put_in_place()
    tell(described(rank, world, nodes, gpus.name))
    between = f" {network} from each GPU to other nodes," if nodes > 1 else ""
    tell(f"assumed:{between} all ranks alike, and none late. No values are computed.")
    return gpus


def run(gpus: VirtualGPUs, script: str, arguments: list[str], module: bool, tell: Tell) -> None:
    """Run a script as a simulated rank, then report its memory, time and collectives.

    `tell` is called with each line of the report. Raises the script's errors.
    """
    sent: Counter[str] = Counter()
    gpus.machine.clock.listen(lambda work: sent.update(_collective(work)))
    try:
        run_script(script, arguments, module)
    finally:
        _sum_up(gpus.machine, sent, tell)


def _collective(work: Any) -> list[str]:
    """Return [kind of collective] if `work` is a collective of NCCL on a stream, else []."""
    if isinstance(work, Span) and work.name.startswith("nccl "):
        return [work.name.removeprefix("nccl ")]
    return []


def _sum_up(machine: Any, sent: Counter[str], tell: Tell) -> None:
    """Report the memory of each GPU that was used, the virtual time and the collectives.

    `sent` counts the collectives by kind, and `tell` is called with each line of the report.
    """
    for gpu in machine.gpus:
        reserved = gpu.allocator.peak_reserved
        if reserved:
            total = gibibytes(machine.total_memory)
            allocated = gibibytes(gpu.allocator.peak_allocated)
            tell(f"peak of {allocated} allocated and {gibibytes(reserved)} reserved, of {total}.")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(sent.items()))
    tell(f"{machine.clock.host:.3g} s of virtual time. Collectives: {kinds or 'none'}.")
