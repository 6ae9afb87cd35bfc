"""Device-side asserts: a kernel that meets a value it cannot work with stops its GPU for good.

The CPU's kernel raises at once. CUDA's call returns; the error surfaces at the next call that waits for the GPU, or at a launch after
the GPU has got there, and every later use of the GPU raises it again, until its machine is taken away (a real one: its process ends).
"""

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import errors
from virtualgpu.tensor import VirtualTensor, wrap_all

_OUT_OF_BOUNDS = '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
_GATHER = 'idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"'
_SCATTER = 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
_CLASS = "t >= 0 && t < n_classes"
# What CUDA's kernels assert, as torch 2.11 prints it on an H200 (benchmarks/fidelity/h200/probe.json), by operator.
ASSERTIONS = {
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"), _OUT_OF_BOUNDS),
    **dict.fromkeys(("gather", "scatter_add", "scatter_add_"), _GATHER),
    **dict.fromkeys(("scatter", "scatter_", "scatter_reduce", "scatter_reduce_"), _SCATTER),
    **dict.fromkeys(("index_select", "embedding", "embedding_renorm_", "_embedding_bag"), "srcIndex < srcSelectDimSize"),
    **dict.fromkeys(("index_add", "index_add_", "index_reduce", "index_reduce_"), "dstIndex < dstAddDimSize"),
    **dict.fromkeys(("index_copy", "index_copy_"), 'idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"'),
    **dict.fromkeys(("index_fill", "index_fill_"), 'idx >= -self_dim_size && idx < self_dim_size && "Index out of bounds"'),
    **dict.fromkeys(("take", "put", "put_"), 'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"'),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward"), _CLASS),
    **dict.fromkeys(("multi_margin_loss",), "target_k < dim"),
    **dict.fromkeys(("multinomial",), "probability tensor contains either `inf`, `nan` or element < 0"),
    **dict.fromkeys(("binary_cross_entropy",), "input_val >= zero && input_val <= one"),
    **dict.fromkeys(("_assert_async",), ""),
}


@dataclass
class Fault:
    """An assert that failed on a GPU at `time` (seconds on the machine's clock). `known` once the host has heard of it."""

    assertion: str
    time: float
    known: bool = False

    def surface(self) -> None:
        """Raises AcceleratorError. The first time, what the kernel printed is printed too, without its thread's number."""
        if not self.known:
            self.known = True
            print(f"device-side assertion `{self.assertion}` failed.", file=sys.stderr)
        raise errors.device_side_assert()


_MISFIT = object()
# What CPU kernels say about values.
_ABOUT_VALUES = re.compile(
    "out of range|out of bounds|smaller than num_classes|between 0 and 1|"
    "^probability tensor|^Expected Tensor with single nonzero|^invalid multinomial"
)


def survive(func: Any, args: tuple, kwargs: dict, error: Exception) -> Any:
    """What CUDA does where an operator on a GPU has raised this error: it says it in its own words, or goes on, and its GPU has a fault.

    Returns a result of the right shape in the second case.
    """
    try:
        if isinstance(error, errors.DifferentDevicesError):
            raise errors.of_operator(func, args, kwargs) from None
        assertion = ASSERTIONS.get(func._schema.name.removeprefix("aten::"))
        if assertion is None or not _ABOUT_VALUES.search(str(error)):
            raise errors.as_on_cuda(func, error) from None
        gpu = next(x._gpu for x in torch.utils._pytree.tree_leaves((args, kwargs)) if type(x) is VirtualTensor)
        shapes = _result_without_values(func, args, kwargs, error)
        gpu.launch(0, name=func._schema.name.removeprefix("aten::"))
        gpu.fault = Fault(assertion, gpu.stream.ready)
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            gpu.synchronize()
        return wrap_all(shapes, gpu)
    finally:
        del error  # its traceback holds this frame: a cycle, which would keep the operator's tensors until the next collection


def _result_without_values(func: Any, args: tuple, kwargs: dict, error: Exception) -> Any:
    """Tensors of the result's shape. Shapes and types that do not fit are seen before any kernel runs: they raise as they are."""
    from virtualgpu.ops.without_values import on_meta

    try:
        shapes = on_meta(func, args, kwargs)
    except (RuntimeError, IndexError):
        shapes = _MISFIT
    if shapes is _MISFIT:
        try:
            raise error
        finally:
            del error
    returns = func._schema.returns
    if not returns:
        return None
    if returns[0].alias_info is not None:  # written in place
        return next(x for x in (*kwargs.values(), *args) if type(x) is VirtualTensor) if "out" in kwargs else args[0]
    if shapes is None:
        raise error
    with _DisableTorchDispatch():
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), shapes)
