"""Data loaders with workers: what these do, and when, depends on other processes' real speed, and takes none of the host's time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from virtualgpu.hardware import Machine


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield _MultiProcessingDataLoaderIter, {"_try_get_data": receiving(machine, _MultiProcessingDataLoaderIter._try_get_data)}
    yield worker, {"_worker_loop": working(machine, worker._worker_loop)}


def receiving(machine: Machine, receive: Callable[..., Any]) -> Callable[..., Any]:
    """What receives a worker's batch: it may come early, while another one is waited for."""

    def try_get_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, machine.selected.untimed = machine.selected.untimed, True
        try:
            return receive(self, *args, **kwargs)
        finally:
            machine.selected.untimed = before

    return try_get_data


def working(machine: Machine, work: Callable[..., None]) -> Callable[..., None]:
    """What a worker does. Forked, it has no GPU: nobody need look at its operators, which takes twice as long as they do."""

    @functools.wraps(work)  # also to be found by its name in a worker that is started afresh
    def worker_loop(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes() if machine.forked else nullcontext():
            work(*args, **kwargs)

    return worker_loop
