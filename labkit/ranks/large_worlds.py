"""`labkit torchrun --simulate 1024`: one rank of a large world, in this process or in a child of it, without values."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from multiprocessing import connection
from pathlib import Path
from typing import Any

from labkit import machine
from labkit.processes import children, context
from virtualgpu.cluster import Cluster, parse_rate
from virtualgpu.collectives import simulated
from virtualgpu.commands import set_up_for_times
from virtualgpu.instruments import Span
from virtualgpu.machines import MAXIMUM, VirtualGPUs, gibibytes, use, with_maker
from virtualgpu.script import check_script, run_script

LARGEST = 1 << 20  # ranks of a world
AT_ONCE = 2  # child processes: more would not be sooner done on two cores


def set_up(world: int, nodes: int, rank: int, network: str, like: str | None, memory: str | None) -> VirtualGPUs:
    """Make this process rank `rank` of `world`, on `nodes` machines whose ranks have a virtual GPU each, until it ends. Says so.

    Raises ValueError for an argument that is not one of the choices; nothing is changed then.
    """
    if not 1 <= world <= LARGEST:
        raise ValueError(f"--simulate {world}: choose a whole number from 1 to {LARGEST}")
    if nodes < 1 or world % nodes or world // nodes > MAXIMUM:
        raise ValueError(f"--nodes {nodes}: {world} ranks do not divide into so many machines of 1 to {MAXIMUM} GPUs each")
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank}: choose one from 0 to {world - 1}")
    per_node = world // nodes
    cluster = Cluster(per_node, parse_rate(network))
    gpus = use(per_node, like or "H100", memory, values=False)
    gpus.machine.cluster = cluster
    os.environ.update(_environment(world, rank, per_node))
    set_up_for_times(gpus, virtual_time=True)
    simulated.put_in_place()
    _tell(f"rank {rank} of {world:,} simulated, on {nodes:,} node{'s' * (nodes > 1)} of {per_node} virtual {with_maker(gpus.name)}.")
    between = f" {network} from each GPU to other nodes," if nodes > 1 else ""
    _tell(f"assumed:{between} all ranks alike, and none late. No values are computed.")
    return gpus


def run(gpus: VirtualGPUs, script: str, arguments: list[str], module: bool) -> None:
    """Run the script, and say on standard error what it took. What it raises goes up."""
    sent: Counter[str] = Counter()
    gpus.machine.clock.listen(lambda work: sent.update(_collective(work)))
    try:
        run_script(script, arguments, module)
    finally:
        _sum_up(gpus.machine, sent)


def results(script: str | os.PathLike, worlds: Sequence[dict[str, Any]]) -> list[Any]:
    """What the script leaves in `result` as rank 0 of each of these worlds, in their order; two at a time, a child process each.

    A world is `arguments` for the script, and `world`, `nodes`, `network`, `like` and `memory` as of `set_up`. Raises RuntimeError with
    what a script raised.
    """
    check_script(script)
    found: list[Any] = []
    for start in range(0, len(worlds), AT_ONCE):
        pipes = [(context().Pipe(duplex=False), world) for world in worlds[start : start + AT_ONCE]]
        with (
            tempfile.TemporaryDirectory(prefix="labkit-") as folder,
            children(_child, [(theirs, folder, os.fspath(script), world) for (_, theirs), world in pipes]),
        ):
            for (ours, theirs), world in pipes:
                theirs.close()
                try:
                    kind, what = ours.recv()
                except EOFError:
                    kind, what = "ended", "its process ended without a word"
                ours.close()
                if kind != "result":
                    raise RuntimeError(f"rank 0 of {world['world']:,} simulated ranks: {what}")
                found.append(what)
    return found


def _child(line: connection.Connection, folder: str, script: str, world: dict[str, Any]) -> None:
    arguments = [str(argument) for argument in world["arguments"]]
    chosen: dict[str, Any] = {"nodes": 1, "rank": 0, "network": "400Gb/s", "like": None, "memory": None}
    chosen |= {name: value for name, value in world.items() if name != "arguments"}
    try:
        machine.use(None)  # a child has its parent's
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            tempfile.tempdir = folder  # its nvidia-smi goes with the folder, even if this process is killed
            set_up(**chosen)
            tempfile.tempdir = None
            run_script(script, arguments)
        line.send(("result", vars(sys.modules["__main__"]).get("result")))
    except BaseException as error:
        line.send(("raised", f"{type(error).__name__}: {error}"))


def _environment(world: int, rank: int, per_node: int) -> dict[str, str]:
    """What torchrun tells a rank."""
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
    """Its kind, if this is a collective's time on a stream."""
    return [work.name.removeprefix("nccl ")] if isinstance(work, Span) and work.name.startswith("nccl ") else []


def _sum_up(machine: Any, sent: Counter[str]) -> None:
    for gpu in machine.gpus:
        if reserved := gpu.allocator.peak_reserved:
            total = gibibytes(machine.total_memory)
            _tell(f"peak {gibibytes(gpu.allocator.peak_allocated)} allocated, {gibibytes(reserved)} reserved, of {total}.")
    collectives = ", ".join(f"{count:,} {kind}" for kind, count in sorted(sent.items())) or "none"
    _tell(f"{machine.clock.host:.3g} s of virtual time; collectives: {collectives}.")


def _tell(text: str) -> None:
    print(f"labkit torchrun: {text}", file=sys.stderr)
