"""Programs for several ranks, in plain torch: torchrun calls each once for every rank. What is to be read, a rank leaves in `result`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import machine
from virtualgpu import profiles
from virtualgpu.machines import DEFAULT_MODEL, with_maker

if TYPE_CHECKING:
    from labkit.ranks import Ranks


def rank_program(name: str) -> Path:
    """Where the program of this name lies, such as "collectives". Raises ValueError naming those there are."""
    there = {path.stem: path for path in Path(__file__).parent.glob("lesson_*/programs/[a-z]*.py")}
    if name not in there:
        raise ValueError(f"there is no program {name!r} for ranks; there are {', '.join(sorted(there))}")
    return there[name]


def on_gpus(ranks: int) -> bool:
    """Whether so many ranks get a real GPU each: of the machine in use, if it is not a virtual one."""
    used = machine.current()
    return used is not None and not used.virtual and used.count >= ranks


def badge(ranks: int) -> str:
    """Where the numbers of so many ranks come from."""
    where = f"{machine.in_use().name}, NCCL" if on_gpus(ranks) else "the CPU, gloo"
    return f"measured in {ranks} ranks on {where}"


def gpu_badge(ranks: int) -> str:
    """The same for ranks that get virtual GPUs where there are too few real ones."""
    return badge(ranks) if on_gpus(ranks) else f"{ranks} ranks, a virtual GPU each, modelled on {with_maker(_model())}"


def _model() -> str:
    """Of the virtual GPUs in use, or the usual one."""
    used = machine.current()
    return used.name if used is not None and used.virtual else profiles.load(DEFAULT_MODEL).name


def results(name: str, ranks: int, *arguments: Any) -> list[Any]:
    """What each rank of a program leaves in `result`, that of rank 0 first. Raises as labkit.torchrun does."""
    from labkit.ranks import torchrun

    devices = "cuda" if on_gpus(ranks) else "cpu"
    return torchrun(rank_program(name), *arguments, ranks=ranks, devices=devices, timeout=300, quiet=True).results


def gpu_run(name: str, ranks: int, *arguments: Any, trace: bool = False) -> "Ranks":
    """A program that needs a GPU for each rank, virtual ones, without values, where there are too few real ones. Raises as `results`.

    A `trace` is one of virtual GPUs.
    """
    from labkit.ranks import torchrun

    virtual: dict[str, Any] = {"like": _model(), "values": False, "virtual_time": True, "trace": trace}
    where = {"devices": "cuda"} if on_gpus(ranks) else virtual
    return torchrun(rank_program(name), *arguments, ranks=ranks, timeout=300, quiet=True, **where)
