"""`labkit torchrun --simulate 1024`: one rank of a large world, in this process or in a child of it, without values."""

import json
import os
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.processes import forkserver
from labkit.processes.supervision import kill_job, rank_environment
from virtualgpu.cluster import Cluster, parse_rate
from virtualgpu.collectives import simulated
from virtualgpu.commands import set_up_for_times
from virtualgpu.instruments import Span
from virtualgpu.machines import MAXIMUM, VirtualGPUs, gibibytes, use, with_maker
from virtualgpu.script import check_script, run_script

LARGEST = 1 << 20  # ranks of a world
AT_ONCE = 2  # processes: more would not be sooner done on two cores
_PROGRAM = str(Path(__file__).with_name("simulated_rank.py"))


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


def results(script: str | os.PathLike, worlds: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """What the script leaves in `result` as rank 0 of each of these worlds, in their order; two run at a time, a process each.

    A world is `arguments` for the script, and `world`, `nodes`, `network`, `like` and `memory` as of `set_up`. Raises RuntimeError with
    what a script raised.
    """
    check_script(script)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        started: list[Any] = []
        try:
            for number, world in enumerate(worlds):
                for ahead in range(len(started), min(number + AT_ONCE, len(worlds))):
                    started.append(_started(folder, os.fspath(script), ahead, worlds[ahead]))
                started[number].wait()
                yield _told(folder, number, world)
        finally:
            kill_job(folder)
            for process in started:
                process.wait()


def _started(folder: str, script: str, number: int, world: dict[str, Any]) -> Any:
    Path(folder, f"{number}.json").write_text(json.dumps(world))
    with Path(os.devnull).open("wb") as nowhere:
        return forkserver.popen(
            [_PROGRAM, folder, script, str(number)], rank_environment(folder), output=nowhere.fileno(), with_caller=True
        )


def _told(folder: str, number: int, world: dict[str, Any]) -> Any:
    file = Path(folder, f"{number}.result")
    kind, what = pickle.loads(file.read_bytes()) if file.exists() else ("ended", "its process ended without a word")
    if kind != "result":
        raise RuntimeError(f"rank 0 of {world['world']:,} simulated ranks: {what}")
    return what


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


def names_rank_variable(text: str) -> bool:
    """Whether an error's text names a variable that torchrun gives each rank."""
    names = set(_environment(1, 0, 1))
    return not names.isdisjoint(re.findall(r"\w+", text))


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
