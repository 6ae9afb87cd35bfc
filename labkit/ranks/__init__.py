"""Ranks from a notebook: PyTorch's own torchrun starts them, `labkit.torchrun` prints what they print and leaves nothing behind."""

import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.machine import virtual_by_default
from labkit.ranks.job import TorchrunJob
from labkit.ranks.printing import RankPrinter
from labkit.ranks.result import Ranks, TorchrunError, result
from labkit.torchrun_options import CELL_TIMEOUT, MAX_RESTARTS, NODES, RANKS
from virtualgpu import profiles
from virtualgpu.cluster import NETWORK, parse_rate
from virtualgpu.machines import MAXIMUM, check_memory, checked_request
from virtualgpu.script import check_script, module_file

__all__ = ["Ranks", "TorchrunError", "torchrun"]

_LONGEST = (
    90  # bytes of a folder's name that leave enough for a socket's: 104 on macOS, 108 on Linux
)


def torchrun(
    script: str | os.PathLike,
    *arguments: object,
    module: bool = False,
    ranks: int = RANKS,
    nodes: int = NODES,
    timeout: float | None = CELL_TIMEOUT,
    max_restarts: int = MAX_RESTARTS,
    devices: str | None = None,
    like: str | None = None,
    memory: str | int | None = None,
    values: bool = True,
    virtual_time: bool = False,
    host: float = 1.0,
    network: str = NETWORK,
    trace: bool = False,
    simulate: int | None = None,
    live: bool = False,
    quiet: bool = False,
) -> Ranks:
    """Run `script` in several processes, the ranks, with PyTorch's own `torchrun`; show what they print, and return what they found.

    Each rank runs the script as `torchrun` would: plain PyTorch, with RANK, WORLD_SIZE and LOCAL_RANK in the environment. Plain data that a
    script leaves in its variable `result` comes back, a tensor as lists. Ranks see this computer's GPUs if there is one for each, so that
    `init_process_group()` takes NCCL; otherwise they see none, and it takes gloo. Nor do they see one while LABKIT_VIRTUAL is set.
    With `like` each rank has a virtual GPU, and `init_process_group()` takes a virtual NCCL. When the call ends, however it ends, no
    process is left.

    Args:
        script: the path of a Python script.
        arguments: for the script, as on a command line.
        module: `script` is the name of a module or package, which runs as after `python -m`.
        ranks: how many in all, 1 to 16 on each node.
        nodes: how many nodes the ranks are divided among. All are on this computer, with an agent of torchrun for each.
        timeout: seconds that the ranks may run, not counting their start. None: no limit.
        max_restarts: how often torchrun starts all ranks again after one has failed.
        devices: "cuda" for a GPU each, or an error; "cpu" for none; None as above.
        like: the model of virtual GPUs, such as "H200": each node is a machine that has one for each of its ranks.
        memory: of each virtual GPU, in bytes or as "16GiB". The default is the model's.
        values: False keeps the shapes, memory, order and time of virtual GPUs, but computes nothing.
        virtual_time: let Python's `time` tell the model's times in ranks with virtual GPUs: the same on every computer.
        host: how many times as long the CPU takes as the recorded one, for the times of virtual GPUs.
        network: what the adapter of a virtual GPU carries to other nodes, such as "400Gb/s" or "25GB/s".
        trace: record what the ranks' virtual GPUs do; the trace of all, in which cuda:2 is the GPU of rank 2, is the result's `trace`.
        simulate: run only rank 0 of a world of this many ranks, on `nodes` machines. The other ranks are taken to do the same at the
            same time. The rank has a virtual GPU without values (the default is an H100), and Python's `time` tells virtual times.
        live: print lines as they come. Otherwise in the order of the ranks: the same text whatever the timing.
        quiet: print nothing.

    Raises:
        TorchrunError: a rank failed, or took too long. Its message names the rank that failed first, its note shows
            that rank's traceback or last lines; `TorchrunError` lists its attributes.
        SyntaxError: of the script; no rank was started.
        ValueError, TypeError: an argument is not one of the choices, which the message names.
    """
    path = Path(module_file(str(script)) if module else script)
    check_script(path)
    request = cell_request(
        ranks=ranks,
        nodes=nodes,
        timeout=timeout,
        max_restarts=max_restarts,
        devices=devices,
        like=like,
        memory=memory,
        values=values,
        virtual_time=virtual_time,
        host=host,
        network=network,
        trace=trace,
        simulate=simulate,
    )
    request |= {
        "arguments": [str(argument) for argument in arguments],
        "script": os.path.abspath(path),
        "name": str(path),
        "module": str(script) if module else None,
    }
    return _run(path.read_bytes(), request, timeout, live, quiet)


def cell_request(
    *,
    ranks: Any,
    nodes: Any,
    timeout: Any,
    max_restarts: Any,
    devices: Any,
    like: Any,
    memory: Any,
    values: Any,
    virtual_time: bool,
    host: float,
    network: str,
    trace: bool,
    simulate: int | None = None,
) -> dict[str, Any]:
    """Return what agents and ranks need to know to run a notebook's cell.

    Raises ValueError or TypeError for an argument that is not one of the choices.
    """
    if os.name != "posix":
        raise NotImplementedError("labkit.torchrun works on Linux and macOS, not on this system")
    simulated = None
    if simulate is not None:
        _check_alone(
            ranks=(ranks, RANKS), max_restarts=(max_restarts, MAX_RESTARTS), devices=(devices, None)
        )
        from virtualgpu import (
            simulated_world,
        )  # torch comes with it, for which other calls do not wait

        simulated_world.check(simulate, nodes)
        simulated = {"world": simulate, "nodes": nodes, "network": network, "host": host}
        ranks, nodes, like = 1, 1, like or simulated_world.LIKE
        virtual_time, values = True, False
    _check_number("nodes", nodes, 1, MAXIMUM)
    _check_number("ranks", ranks, nodes, MAXIMUM * nodes)
    _check_number("max_restarts", max_restarts, 0, 100)
    if ranks % nodes:
        fewer = ranks - ranks % nodes
        choices = f"choose {fewer} or {fewer + nodes}"
        raise ValueError(f"ranks={ranks} cannot be divided among nodes={nodes}: {choices}")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < 1e9):
        choices = "choose a positive number of seconds, or None for no limit"
        raise ValueError(f"timeout={timeout!r}: {choices}")
    if devices not in (None, "cpu", "cuda"):
        raise ValueError(f"devices={devices!r}: choose 'cpu', 'cuda' or None")
    virtual = None
    if like is not None:
        if devices == "cuda":
            both = "devices='cuda' asks for real GPUs, and like= for virtual ones"
            raise ValueError(f"{both}: leave one of them out")
        asked = checked_request(ranks // nodes, like, memory, values, host=host)
        if asked.memory is not None:
            check_memory(asked.memory)
        name = profiles.load(like).name
        rate = parse_rate(network)
        virtual = asdict(asked) | {"name": name, "time": virtual_time, "network": rate}
    elif memory is not None or values is not True or virtual_time or host != 1:
        raise ValueError(
            "memory=, values=, virtual_time= and host= are those of virtual GPUs: name their model too, such as like='H200'"
        )
    elif trace:
        raise ValueError(
            "trace=True records virtual GPUs: name their model too, such as like='H200'"
        )
    return {
        "arguments": [],
        "nodes": nodes,
        "ranks_of_node": ranks // nodes,
        "max_restarts": max_restarts,
        "devices": "cpu" if devices is None and virtual_by_default() else devices,
        "virtual": virtual,
        "simulated": simulated,
        "script": None,
        "name": "cell.py",
        "module": None,
        "trace": trace,
    }


def _check_alone(**chosen: tuple[Any, Any]) -> None:
    """Raise ValueError if an argument of several ranks, a pair of its value and its default, was chosen."""
    unfit = [f"{name}=" for name, (value, default) in chosen.items() if value != default]
    if unfit:
        raise ValueError(f"simulate= starts no other rank: leave out {', '.join(unfit)}")


def torchrun_cell(source: str, request: dict[str, Any], timeout: float | None, live: bool) -> Ranks:
    """Run the text of a notebook's cell as a script, as `cell_request` describes.

    Errors as of `torchrun`.
    """
    return _run(source.encode(), request, timeout, live, quiet=False)


def _run(
    source: bytes, request: dict[str, Any], timeout: float | None, live: bool, quiet: bool
) -> Ranks:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank gives them
        compile(source, request["name"], "exec", dont_inherit=True)
    with tempfile.TemporaryDirectory(
        prefix="labkit-", dir=_short_folder(), ignore_cleanup_errors=True
    ) as folder:
        if request["script"] is None:
            cell = Path(folder, request["name"])
            cell.write_bytes(source)
            request["script"] = str(cell)
        Path(folder, "request.json").write_text(json.dumps(request))
        job = TorchrunJob(
            folder, request, RankPrinter(request["ranks_of_node"] * request["nodes"], live, quiet)
        )
        try:
            job.run(timeout)
        except KeyboardInterrupt as error:
            vars(error)["_render_traceback_"] = lambda: [
                "KeyboardInterrupt: all ranks are stopped."
            ]  # what a notebook shows of it
            raise
        return result(job, timeout)


def _short_folder() -> str | None:
    """The folder of temporary files, or one with a shorter name: that of a socket is limited."""
    longest = _LONGEST - len("labkit-12345678/labkit-smi-12345678-12345678/socket~")
    return None if len(os.fsencode(tempfile.gettempdir())) < longest else "/tmp"


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: choose a whole number from {least} to {most}")
