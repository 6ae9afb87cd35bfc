"""The allocations that a piece of code requests from a fresh virtual GPU."""

from collections.abc import Callable
from typing import Any

import torch

import virtualgpu


def asked(
    work: Callable[[], Any],
    backward: bool = False,
    like: str = "H200",
    setup: Callable[[], Any] | None = None,
) -> list[str]:
    """Return the sizes of allocations ("+4") and frees ("-4") of `work`, in order.

    With `backward`, they are those of the backward pass of its result. `setup` makes the argument
    of `work`.
    """
    with virtualgpu.use(gpus=1, like=like):
        inputs = () if setup is None else (setup(),)
        if not backward:
            return recorded(lambda: work(*inputs))[1]
        result = work(*inputs)
        gradient = torch.ones_like(result)
        return recorded(lambda: result.backward(gradient))[1]


def recorded(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call `work` while its allocations are recorded, and return (its result, the sizes).

    The result lives until after the recording.
    """
    torch.cuda.memory._record_memory_history(max_entries=1000, context=None)
    try:
        result = work()
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": "+", "free_completed": "-"}
    return result, [
        f"{signs[event['action']]}{event['size']}" for event in trace if event["action"] in signs
    ]
