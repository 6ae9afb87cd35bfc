"""Start ranks from a notebook with PyTorch's own torchrun.

`labkit.torchrun` prints what the ranks print, returns their results, and leaves no process behind.
"""

import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.machine import virtual_by_default
from labkit.ranks.job import TorchrunJob
from labkit.ranks.job_result import Ranks, TorchrunError, result
from labkit.ranks.printing import RankPrinter
from labkit.torchrun_options import CELL_TIMEOUT, MAX_RESTARTS, NODES, RANKS
from virtualgpu import profiles
from virtualgpu.cluster import NETWORK, parse_rate
from virtualgpu.machines import MAXIMUM, check_memory, checked_request
from virtualgpu.script import check_script, module_file

__all__ = ["Ranks", "TorchrunError", "torchrun"]

# The path of a socket has at most 104 bytes on macOS, and 108 on Linux.
_LONGEST_SOCKET_PATH = 90
# What a job adds to the folder of temporary files: its own folder, and one for its nvidia-smi.
_ADDED_TO_FOLDER = "labkit-12345678/labkit-smi-12345678-12345678/socket~"


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
    """Run a script in several processes, the ranks, with PyTorch's own `torchrun`.

    `labkit.torchrun("train.py", "--epochs", 2, ranks=4).outputs[0]` is what rank 0 printed.

    Each rank runs the script as `torchrun` would, with RANK, WORLD_SIZE and LOCAL_RANK in the
    environment. If the script leaves plain data in its variable `result`, the data is returned.
    Tensors in it become lists.

    If this computer has a GPU for each rank, the ranks use them, and `init_process_group()` chooses
    NCCL. Otherwise, or if LABKIT_VIRTUAL is set, the ranks see no GPU, and `init_process_group()`
    chooses gloo. With `like`, each rank has a virtual GPU, and the backend is a virtual NCCL.

    No process is left when the call ends, even if it ends in an error or is interrupted.

    Args:
        script: the path of a Python script.
        arguments: the script's arguments, as on a command line.
        module: whether `script` is the name of a module or package, to be run as by `python -m`.
        ranks: the number of ranks on all nodes together, from 1 to 16 per node.
        nodes: the number of nodes among which the ranks are divided. All nodes are on this
            computer, and each one has an agent of torchrun.
        timeout: the seconds that the ranks may run, without their start. None means no limit.
        max_restarts: how often torchrun starts all ranks again after one has failed.
        devices: "cuda" for a real GPU per rank, or "cpu" for no GPU. The default is a GPU per rank
            if this computer has that many.
        like: the model of virtual GPUs, such as "H200". Each node is a machine with one virtual
            GPU per rank.
        memory: the memory of each virtual GPU in bytes, or as text such as "16GiB". The default is
            the memory of the model.
        values: if False, virtual GPUs keep shapes, memory, order and time, but compute no values.
        virtual_time: whether Python's `time` returns the model's times in ranks with virtual GPUs.
            Then times are the same on every computer.
        host: how many times slower the CPU is than the recorded one, for times of virtual GPUs.
        network: the rate of a virtual GPU's adapter to other nodes, such as "400Gb/s" or "25GB/s".
        trace: whether to record what the virtual GPUs do. The result's attribute `trace` has the
            trace of all ranks. In it, cuda:2 is the GPU of rank 2.
        simulate: run only rank 0 of a world of this many ranks, on `nodes` machines. The other
            ranks are assumed to do the same at the same time. The rank has a virtual GPU without
            values (by default an H100), and Python's `time` returns virtual times.
        live: whether to print lines as they come. By default the ranks' output is printed one rank
            after the other, so that the text never depends on timing.
        quiet: print nothing.

    Raises:
        TorchrunError: a rank failed or took too long. The message names the rank that failed
            first. A note shows that rank's traceback or its last lines.
        SyntaxError: the script is not valid Python. No rank was started.
        ValueError, TypeError: an argument is not allowed. The message says what is.
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
    """Return the request that tells agents and ranks how to run the cell of a notebook.

    The arguments are those of `torchrun`. Raises ValueError or TypeError if one is not allowed.
    """
    simulated = None
    if simulate is not None:
        _refuse_options_of_several_ranks(ranks, max_restarts, devices)
        # An import of torch, for which other calls need not wait.
        from virtualgpu import simulated_world

        simulated_world.check(simulate, nodes)
        simulated = {"world": simulate, "nodes": nodes, "network": network, "host": host}
        ranks, nodes, like = 1, 1, like or simulated_world.LIKE
        virtual_time, values = True, False
    _check_ranks(ranks, nodes, max_restarts)
    _check_timeout(timeout)
    if devices not in (None, "cpu", "cuda"):
        raise ValueError(f"devices={devices!r}: choose 'cpu', 'cuda' or None")
    virtual = None
    if like is not None:
        if devices == "cuda":
            raise ValueError(
                "devices='cuda' asks for real GPUs, and like= for virtual ones: "
                "leave one of them out"
            )
        asked = checked_request(ranks // nodes, like, memory, values, host=host)
        if asked.memory is not None:
            check_memory(asked.memory)
        virtual = asdict(asked)
        virtual["name"] = profiles.load(like).name
        virtual["time"] = virtual_time
        virtual["network"] = parse_rate(network)
    elif memory is not None or values is not True or virtual_time or host != 1:
        raise ValueError(
            "memory=, values=, virtual_time= and host= are options of virtual GPUs. "
            "Also name a model, such as like='H200'"
        )
    elif trace:
        raise ValueError("trace=True records virtual GPUs. Also name a model, such as like='H200'")
    if devices is None and virtual_by_default():
        devices = "cpu"
    return {
        "arguments": [],
        "nodes": nodes,
        "ranks_of_node": ranks // nodes,
        "max_restarts": max_restarts,
        "devices": devices,
        "virtual": virtual,
        "simulated": simulated,
        "script": None,
        "name": "cell.py",
        "module": None,
        "trace": trace,
    }


def _refuse_options_of_several_ranks(ranks: Any, max_restarts: Any, devices: Any) -> None:
    """Raise ValueError if one of these options was chosen for a single simulated rank.

    The options have a meaning only for several ranks.
    """
    unfit = []
    if ranks != RANKS:
        unfit.append("ranks=")
    if max_restarts != MAX_RESTARTS:
        unfit.append("max_restarts=")
    if devices is not None:
        unfit.append("devices=")
    if unfit:
        raise ValueError(f"simulate= starts no other rank: leave out {', '.join(unfit)}")


def _check_ranks(ranks: Any, nodes: Any, max_restarts: Any) -> None:
    """Raise ValueError if a number is out of range, or if the nodes would not have equal shares."""
    _check_number("nodes", nodes, 1, MAXIMUM)
    _check_number("ranks", ranks, nodes, MAXIMUM * nodes)
    _check_number("max_restarts", max_restarts, 0, 100)
    if ranks % nodes:
        fewer = ranks - ranks % nodes
        raise ValueError(
            f"ranks={ranks} cannot be divided among nodes={nodes}: "
            f"choose {fewer} or {fewer + nodes}"
        )


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: choose a whole number from {least} to {most}")


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < 1e9:
        raise ValueError(
            f"timeout={timeout!r}: choose a positive number of seconds, or None for no limit"
        )


def torchrun_cell(source: str, request: dict[str, Any], timeout: float | None, live: bool) -> Ranks:
    """Run the text of a notebook's cell as a script.

    The request comes from `cell_request`. Raises TorchrunError and SyntaxError as `torchrun` does.
    """
    return _run(source.encode(), request, timeout, live, quiet=False)


def _run(
    source: bytes, request: dict[str, Any], timeout: float | None, live: bool, quiet: bool
) -> Ranks:
    """Start the ranks, wait for them, and return their results.

    If the request names no script, `source` is written to a file and becomes the script.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank gives the same warnings
        compile(source, request["name"], "exec", dont_inherit=True)
    with tempfile.TemporaryDirectory(
        prefix="labkit-", dir=short_folder(), ignore_cleanup_errors=True
    ) as folder:
        if request["script"] is None:
            cell = Path(folder, request["name"])
            cell.write_bytes(source)
            request["script"] = str(cell)
        Path(folder, "request.json").write_text(json.dumps(request))
        printer = RankPrinter(request["ranks_of_node"] * request["nodes"], live, quiet)
        job = TorchrunJob(folder, request, printer)
        try:
            job.run(timeout)
        except KeyboardInterrupt as error:
            # IPython shows these lines in place of a traceback.
            shown = ["KeyboardInterrupt: all ranks are stopped."]
            vars(error)["_render_traceback_"] = lambda: shown
            raise
        return result(job, timeout)


def short_folder() -> str | None:
    """Return a folder for temporary files whose name leaves enough bytes for that of a socket.

    None means Python's own choice.
    """
    if len(os.fsencode(tempfile.gettempdir())) + len(_ADDED_TO_FOLDER) < _LONGEST_SOCKET_PATH:
        return None
    return "/tmp"
