"""Passes of autograd functions that compute values themselves, and the races of these passes.

The operators that such a pass calls are compared with other launches. What it computes itself is
not an operator, so the detector of races is told about it here.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from virtualgpu.tensor import VirtualTensor, tensors

Pass = TypeVar("Pass", bound=Callable[..., Any])


def compared(run: Pass) -> Pass:
    """Return a `forward` or `backward` of an autograd function that also reports its races.

    The pass reads its arguments and writes its results. Tensors that the forward pass saved are
    not compared, because a backward pass may take them out only once.
    """

    @functools.wraps(run)
    def reporting(ctx: Any, *args: Any) -> Any:
        given = [x for x in tensors(args) if type(x) is VirtualTensor]
        if not given or not given[0]._gpu.machine.several_streams:
            return run(ctx, *args)
        gpu = given[0]._gpu
        name = run.__qualname__.partition(".")[0].strip("_").lower()
        return gpu.machine.races.compare_pass(name, given, gpu.stream, lambda: run(ctx, *args))

    return cast(Pass, reporting)
