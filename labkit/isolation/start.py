"""The first file that a worker runs: modules are looked for where the process looks that started it, and `__main__` is empty."""

import atexit
import ctypes
import json
import os
import sys
import types


def leave() -> None:
    """End at once: taking down an interpreter with torch in it takes a third of a second, and nothing there is used again."""
    ctypes.CDLL(None).fflush(None)  # what C code has written; Python's own streams keep nothing
    os._exit(status)


status = 1  # until all is done
atexit.register(leave)  # the first to be registered is the last to be called
sys.path[:] = json.loads(sys.argv.pop(1))
sys.modules["__main__"] = types.ModuleType("__main__")  # not this file: multiprocessing would run it again in its children

from labkit.isolation.worker import main  # noqa: E402

main(*sys.argv[1:])
status = 0
