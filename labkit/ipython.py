"""What `%load_ext labkit` adds to IPython: `%%torchrun`, and interrupted cells leave no child process of `multiprocessing` behind.

Jupyter interrupts the kernel together with its children. A child that has only begun to start misses that, and its parent, interrupted
while it starts it, does not know of it. A pool that is interrupted while it is made cannot be told to end, and goes on.
"""

import contextlib
import gc
import multiprocessing
import sys
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

_SPAWNED, _FORKSERVER = "from multiprocessing.spawn import", "from multiprocessing.forkserver import"  # in their command lines
ENDING = 10.0  # seconds until the system has ended what was killed
ROUNDS = 5  # at most: a pool of an earlier cell puts new workers there for ever
AGAIN = 0.3  # seconds in which a pool, which has not heard yet that it ends, puts a new worker in the place of a dead one


def end_children(result: Any) -> None:
    """IPython calls this after each cell, with its result: if the cell was interrupted, its kernel's children end."""
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
            child.join(ENDING)  # before psutil, or multiprocessing would miss that it has ended
        psutil.wait_procs(children, timeout=ENDING)
        time.sleep(AGAIN)


def _was_interrupted(error: BaseException | None) -> bool:
    """Also where clearing up after the interrupt has failed: a pool that has a CUDA tensor in its queue cannot be terminated."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _stop_half_made_pools() -> None:
    """End the threads that put new workers in the place of dead ones, as the method would that such pools lack yet."""
    for made in gc.get_objects():
        if issubclass(type(made), pool.Pool) and hasattr(made, "_worker_handler") and not hasattr(made, "_terminate"):
            keeper = made._worker_handler
            keeper._state = pool.TERMINATE
            made._change_notifier.put(None)  # wakes it, if it does not just put a worker there
            if keeper.is_alive():
                keeper.join(ENDING)


def _of_multiprocessing(known: set[int | None]) -> list[psutil.Process]:
    """The `known` children, and those forked or spawned of which nobody knows. The server of forks stays, for it serves the next cell."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())
            if child.pid in known or _SPAWNED in command:
                found.append(child)
            elif _FORKSERVER in command:
                found += child.children()
    return found


_PARSER = MagicParser(
    prog="%%torchrun",
    description="Run the cell as a script in several processes, the ranks. They share nothing with "
    "the notebook but its folder and its environment.",
)
_PARSER.add(OUTPUT)
add_job(_PARSER, timeout=CELL_TIMEOUT)
_PARSER.add(LIVE, SIMULATE, TRACE)


@magics_class
class TorchrunMagic(Magics):
    """`%%torchrun`: run a notebook's cell in several processes."""

    shell: Any  # IPython's

    @no_var_expand
    @line_cell_magic
    @documented(_PARSER)
    def torchrun(self, line: str, cell: str | None = None) -> None:
        found = _PARSER.read(line, cell)
        if found is None:
            return
        options: dict[str, Any] = vars(found)
        name, live = options.pop("output"), options.pop("live")
        if name is not None and not name.isidentifier():
            raise UsageError(f"{name!r} is no name of a variable: give one such as ranks")
        try:
            options["host"] = checked_host(options["host"])
            request = cell_request(**options)
        except (ValueError, TypeError) as error:
            _PARSER.error(str(error))
        source = f"\n{cell}"  # the magic's own line is the first that the reader counts
        try:
            ranks = torchrun_cell(source, request, options["timeout"], live)
        except SyntaxError as error:
            raise unreadable(_PARSER.prog, error) from None
        if name is not None:
            self.shell.user_ns[name] = ranks


def load(shell: Any) -> None:
    """Add both to this shell."""
    shell.register_magics(TorchrunMagic)
    if sys.platform != "win32":  # there, nobody forks, and an interrupt is the kernel's alone
        shell.events.register("post_run_cell", end_children)
