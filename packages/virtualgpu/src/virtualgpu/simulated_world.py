"""This process as one rank of a large world, on virtual GPUs without values.

The other ranks are not there. See `virtualgpu.collectives.simulated` for what stands in for them.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from virtualgpu.cluster import Cluster, parse_rate
from virtualgpu.collectives import simulated
from virtualgpu.commands import set_up_for_times
from virtualgpu.instruments import Span
from virtualgpu.machines import MAXIMUM, VirtualGPUs, gibibytes, use, with_maker
from virtualgpu.script import run_script

LARGEST = 1 << 20  # ranks of a world
LIKE = "H100"  # the model of GPUs, unless a program says otherwise
Tell = Callable[[str], object]  # takes a sentence about the world


def check(world: int, nodes: int) -> None:
    """Raise ValueError if `world` ranks cannot be divided among `nodes` machines."""
    if not 1 <= world <= LARGEST:
        raise ValueError(f"--simulate {world}: choose a whole number from 1 to {LARGEST}")
    if nodes < 1 or world % nodes or world // nodes > MAXIMUM:
        parts = f"{world} ranks do not divide into so many machines of 1 to {MAXIMUM} GPUs each"
        raise ValueError(f"--nodes {nodes}: {parts}")


def described(rank: int, world: int, nodes: int, name: str) -> str:
    """Return a sentence that says which rank of which world is simulated."""
    several = "s" * (nodes > 1)
    per_node, model = world // nodes, with_maker(name)
    return f"rank {rank} of {world:,} simulated, on {nodes:,} node{several} of {per_node} virtual {model}."


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
    """Make this process rank `rank` of `world`, until it ends.

    The world has `nodes` machines, and a virtual GPU for each rank.

    Raises ValueError for an argument that is not one of the choices. Nothing is changed then.
    """
    check(world, nodes)
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank}: choose one from 0 to {world - 1}")
    per_node = world // nodes
    cluster = Cluster(per_node, parse_rate(network))
    gpus = use(per_node, like or LIKE, memory, values=False, host=host)
    gpus.machine.cluster = cluster
    os.environ.update(_environment(world, rank, per_node))
    set_up_for_times(gpus, virtual_time=True)
    simulated.put_in_place()
    tell(described(rank, world, nodes, gpus.name))
    between = f" {network} from each GPU to other nodes," if nodes > 1 else ""
    tell(f"assumed:{between} all ranks alike, and none late. No values are computed.")
    return gpus


def run(gpus: VirtualGPUs, script: str, arguments: list[str], module: bool, tell: Tell) -> None:
    """Run the script, and tell what it took. An error of the script is raised."""
    sent: Counter[str] = Counter()
    gpus.machine.clock.listen(lambda work: sent.update(_collective(work)))
    try:
        run_script(script, arguments, module)
    finally:
        _sum_up(gpus.machine, sent, tell)


def names_rank_variable(text: str) -> bool:
    """Whether an error's text names a variable that torchrun gives each rank."""
    names = set(_environment(1, 0, 1))
    return not names.isdisjoint(re.findall(r"\w+", text))


def _environment(world: int, rank: int, per_node: int) -> dict[str, str]:
    """Return the variables that torchrun gives a rank."""
    told: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": world // per_node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "simulated",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29400,
    }
    return {name: str(value) for name, value in told.items()}


def _collective(work: Any) -> list[str]:
    """Return the kind of a collective, if `work` is its time on a stream."""
    is_collective = isinstance(work, Span) and work.name.startswith("nccl ")
    return [work.name.removeprefix("nccl ")] if is_collective else []


def _sum_up(machine: Any, sent: Counter[str], tell: Tell) -> None:
    for gpu in machine.gpus:
        reserved = gpu.allocator.peak_reserved
        if reserved:
            total = gibibytes(machine.total_memory)
            allocated = gibibytes(gpu.allocator.peak_allocated)
            tell(f"peak {allocated} allocated, {gibibytes(reserved)} reserved, of {total}.")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(sent.items())) or "none"
    tell(f"{machine.clock.host:.3g} s of virtual time; collectives: {kinds}.")
