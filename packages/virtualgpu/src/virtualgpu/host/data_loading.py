"""Data loaders with worker processes.

The work of the workers takes none of the host's time, because it depends on the real speed of other
processes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from virtualgpu.hardware import Machine


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    loader = _MultiProcessingDataLoaderIter
    yield loader, {"_try_get_data": receiving(machine, loader._try_get_data)}
    yield worker, {"_worker_loop": working(machine, worker._worker_loop)}


def receiving(machine: Machine, receive: Callable[..., Any]) -> Callable[..., Any]:
    """Return `receive`, which gets a batch from a worker, changed to take no host time.

    A batch can arrive early, while the loader waits for another one.
    """

    def try_get_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        with machine.selected.without_time():
            return receive(self, *args, **kwargs)

    return try_get_data


def working(machine: Machine, work: Callable[..., None]) -> Callable[..., None]:
    """Return `work`, the main loop of a worker process, changed to leave its operators alone.

    A forked worker has no GPU, and instrumenting its operators would double their cost.
    """

    @functools.wraps(work)  # a spawned worker looks the function up by its name
    def worker_loop(*args: Any, **kwargs: Any) -> None:
        uninstrumented = _disable_current_modes() if machine.forked else nullcontext()
        with uninstrumented:
            work(*args, **kwargs)

    return worker_loop
