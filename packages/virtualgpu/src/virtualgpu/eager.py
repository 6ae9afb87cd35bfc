"""Eager execution of code that PyTorch would compile: `torch.compile` and flex attention."""

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.tensor import VirtualTensor

# PyTorch's package has an operator with the name of this module, so it needs import_module.
flex_attention: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # variables that turn the compiler off
SAID = (
    "torch.compile does not compile for a virtual GPU. The code runs eagerly, and the times are "
    "those of eager code"
)


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch, {"compile": compile_eagerly(torch.compile)}
    yield (
        flex_attention,
        {
            "create_fw_bw_graph": _no_graph(flex_attention.create_fw_bw_graph),
            "FlexAttentionAutogradOp": _EagerAttention(flex_attention.FlexAttentionAutogradOp),
        },
    )


def compile_eagerly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.compile`, which is the function `original`.

    It does not compile. Code runs as with `backend="eager"`, and a warning says so once.
    """
    signature, said = inspect.signature(original), False

    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        nonlocal said
        signature.bind(model, **options)  # raises TypeError for an unknown option
        if model is None:
            return lambda model: compile(model, **options)
        if options.get("disable") or any(os.environ.get(switch) == "1" for switch in SWITCHES):
            return model
        backend = options.get("backend")
        if not said and getattr(backend, "__name__", backend) != "eager":
            said = True
            warnings.warn(SAID, stacklevel=2)
        return torch._dynamo.run(model)  # runs what has been compiled, which is nothing

    return compile


def _no_graph(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return `trace`, flex attention's tracing function, changed to skip virtual GPUs.

    The traced graphs compute gradients. They are not needed, because the operators that replace
    flex attention have gradients of their own.
    """

    def create_fw_bw_graph(
        score_mod: Callable[..., Any], index_values: tuple, other_buffers: tuple
    ) -> Any:
        if type(index_values[0]) is VirtualTensor:
            return score_mod, None
        return trace(score_mod, index_values, other_buffers)

    return create_fw_bw_graph


class _EagerAttention:
    """Flex attention with gradients, computed operator by operator on a virtual GPU."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, query: torch.Tensor, *args: Any) -> Any:
        """Compute flex attention with PyTorch's arguments.

        The operators run eagerly if `query` is on a virtual GPU.
        """
        if type(query) is not VirtualTensor:
            return self._original.apply(query, *args)
        key, value, score_mod, _, block_mask, scale, options, of_mask, *of_score = args
        tensors_of_score = tuple(of_score)
        return flex_attention.sdpa_dense(
            query, key, value, score_mod, block_mask, scale, options, tensors_of_score, of_mask
        )
