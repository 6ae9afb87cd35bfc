"""Imports for the fork server of Python's multiprocessing, made once for all its children.

The children ignore interrupts, which Jupyter sends to them, too. Their parent ends them instead. A
child that was interrupted while it holds the lock of a pool's queue would keep the lock, and the
pool would wait for it forever.
"""

import contextlib
import gc
import signal

import virtualgpu.install  # noqa: F401
from virtualgpu.ops import faults

with contextlib.suppress(ImportError):  # a torch that was built without these modules
    import torch._dynamo  # torch imports it for the first optimizer, and for DDP
    import torch.distributed.tensor  # noqa: F401 - torch imports it at the first operator

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server itself ignores interrupts anyway

faults.native_functions()  # reads a long list, which each child would read again

# Children do not look for garbage among what was imported here, which would take each of them more
# time than its work, and copy the memory.
gc.collect()
gc.freeze()
