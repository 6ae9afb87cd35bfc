"""The server of an answer's child processes, as a copy of the sandbox's process.

Python's multiprocessing forks children from such a server (`labkit.processes`). A server that is
started afresh imports torch, which takes seconds. The sandbox's process has imported it already.
"""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterable
from multiprocessing import connection, forkserver
from typing import NoReturn

from labkit.processes import PRELOADED


def load_for_children() -> None:
    """Import what the server imports, so that a copy of this process can be the server.

    The search path for modules and the handler of interrupts stay unchanged.
    """
    path, handler = sys.path[:], signal.getsignal(signal.SIGINT)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.path[:] = path
    signal.signal(signal.SIGINT, handler)


def fork_server(closing: Iterable[int] = ()) -> int:
    """Fork this process, make the copy the server of its children, and return the copy's number.

    The copy has imported what this process has imported, and knows nothing of what this process
    does later. It ends when this process and the children have ended.

    Args:
        closing: file descriptors that the copy closes.
    """
    server = vars(forkserver._forkserver)  # Python has no public way to name a server
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve(listener.detach(), alive, {ours, *closing})
    os.close(alive)
    server["_forkserver_address"], server["_forkserver_alive_fd"] = address, ours
    server["_forkserver_pid"] = pid
    return pid


def _serve(listener: int, alive: int, closing: Iterable[int]) -> NoReturn:
    """Fork children until all processes that hold the other end of `alive` have ended."""
    try:
        for fd in closing:
            os.close(fd)
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
