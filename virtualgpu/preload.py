"""What the server of forks of Python's multiprocessing imports, once for all the children that it forks.

They have torch then, and what virtual GPUs need. And they leave an interrupt, which Jupyter sends to them too, to their parent, which ends
them: one that is interrupted just when it has got the lock of a pool's queue would keep it, and the pool, told to end, waits for that lock.
"""

import contextlib
import signal

import virtualgpu.install  # noqa: F401

with contextlib.suppress(ImportError):  # a torch that was built without it
    import torch._dynamo  # torch itself imports it for the first optimizer, and for DistributedDataParallel
    import torch.distributed.tensor  # noqa: F401 - torch itself imports it at the first operator on a virtual GPU

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ignores it anyway
