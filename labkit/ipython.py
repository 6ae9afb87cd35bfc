"""What `%load_ext labkit` adds to IPython.

It adds the magic `%%torchrun`. It also ends the child processes of `multiprocessing` when their
cell is interrupted. Jupyter interrupts the kernel and its children, but some children would
survive. A child that is just starting misses the interrupt, and its parent, which was interrupted
while it started the child, does not know of it. A pool that was interrupted while it was made has
no working `terminate`, and continues.
"""

import contextlib
import gc
import multiprocessing
import time
from multiprocessing import pool
from typing import Any

import psutil
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from gputrace.magics import MagicParser, documented, unreadable
from labkit.ranks import cell_request, torchrun_cell
from labkit.torchrun_options import CELL_TIMEOUT, LIVE, OUTPUT, SIMULATE, TRACE, add_job
from virtualgpu.commands import checked_host

# Parts of the command lines of processes that `multiprocessing` starts.
_SPAWNED = "from multiprocessing.spawn import"
_FORKSERVER = "from multiprocessing.forkserver import"
ENDING = 10.0  # seconds to wait for the end of a process that was killed
# How often to kill the children at most. A pool of an earlier cell replaces its workers for ever.
ROUNDS = 5
# Seconds between two rounds. In this time a pool that does not end yet may replace dead workers.
AGAIN = 0.3


def end_children(result: Any) -> None:
    """Kill the kernel's child processes of `multiprocessing` if a cell was interrupted.

    IPython calls this function after each cell, with the cell's result.
    """
    if not _was_interrupted(result.error_in_exec):
        return
    _stop_half_made_pools()
    for _ in range(ROUNDS):
        known = multiprocessing.active_children()
        children = _of_multiprocessing({child.pid for child in known})
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for child in known:
            child.join(ENDING)  # before psutil waits, or multiprocessing would miss the exit status
        psutil.wait_procs(children, timeout=ENDING)
        time.sleep(AGAIN)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether an error is an interrupt, or was raised while an interrupt was handled.

    For example, a pool with a CUDA tensor in its queue raises an error when it is terminated.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _stop_half_made_pools() -> None:
    """End the threads of interrupted pools that replace dead workers.

    Pools have a method for this, but an interrupted pool may not have it yet.
    """
    for found in gc.get_objects():
        if not issubclass(type(found), pool.Pool):  # isinstance could run code of the object
            continue
        if not hasattr(found, "_worker_handler") or hasattr(found, "_terminate"):
            continue
        handler = found._worker_handler
        handler._state = pool.TERMINATE
        found._change_notifier.put(None)  # wakes the thread if it waits
        if handler.is_alive():
            handler.join(ENDING)


def _of_multiprocessing(known: set[int | None]) -> list[psutil.Process]:
    """Return the known children, and the children of `multiprocessing` that it does not know.

    `known` has the process ids of the known children. The server that forks processes is not
    returned, because the next cell uses it.
    """
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())
            if child.pid in known or _SPAWNED in command:
                found.append(child)
            elif _FORKSERVER in command:
                found += child.children()
    return found


TORCHRUN = MagicParser(
    prog="%%torchrun",
    description="Run the cell as a script in several processes, the ranks. They share nothing with "
    "the notebook but its folder and its environment.",
)
TORCHRUN.add(OUTPUT)
add_job(TORCHRUN, timeout=CELL_TIMEOUT)
TORCHRUN.add(LIVE, SIMULATE, TRACE)
TORCHRUN.examples = {
    "--ranks 4 -o ranks": "Run the cell in four ranks, and keep the result as `ranks`.",
    "--ranks 4 --like H200 --trace": "Give each rank a virtual H200, and record all of them.",
    "--simulate 1024 --nodes 128 --like H100": "Run rank 0 of 1,024 ranks alone.",
}


@magics_class
class TorchrunMagic(Magics):
    """The magic `%%torchrun`, which runs a cell in several processes."""

    shell: Any  # IPython's

    @no_var_expand
    @line_cell_magic
    @documented(TORCHRUN)
    def torchrun(self, line: str, cell: str | None = None) -> None:
        found = TORCHRUN.read(line, cell)
        if found is None:
            return
        options: dict[str, Any] = vars(found)
        name = options.pop("output")
        live = options.pop("live")
        if name is not None and not name.isidentifier():
            raise UsageError(f"expected the name of a variable, such as ranks, got {name!r}")
        try:
            options["host"] = checked_host(options["host"])
            request = cell_request(**options)
        except (ValueError, TypeError) as error:
            TORCHRUN.error(str(error))
        source = f"\n{cell}"  # the magic is line 1 of the cell, so its code begins in line 2
        try:
            ranks = torchrun_cell(source, request, options["timeout"], live)
        except SyntaxError as error:
            raise unreadable(TORCHRUN.prog, error) from None
        if name is not None:
            self.shell.user_ns[name] = ranks


def load(shell: Any) -> None:
    """Add the magic to an IPython shell, and end the children of interrupted cells from now on."""
    shell.register_magics(TorchrunMagic)
    shell.events.register("post_run_cell", end_children)
