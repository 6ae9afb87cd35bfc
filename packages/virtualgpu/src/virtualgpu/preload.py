"""Imported by the fork server of Python's multiprocessing, once for all the children that it forks: torch, and what virtual GPUs need.

The children ignore interrupts, which Jupyter sends to them too, and leave them to their parent, which ends them. A child that was
interrupted just when it has got the lock of a pool's queue would keep it, and the pool would wait for that lock when it ends.
"""

import contextlib
import signal

import virtualgpu.install  # noqa: F401

with contextlib.suppress(ImportError):  # a torch that was built without it
    import torch._dynamo  # torch itself imports it for the first optimizer, and for DistributedDataParallel
    import torch.distributed.tensor  # noqa: F401 - torch itself imports it at the first operator on a virtual GPU

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ignores it anyway
