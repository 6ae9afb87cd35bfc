"""What PyTorch's compiler would make is not made: on a virtual GPU all code runs eagerly, `torch.compile` and flex attention too."""

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.tensor import VirtualTensor

flex_attention: Any = importlib.import_module("torch._higher_order_ops.flex_attention")  # its package gives the operator under this name
SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # PyTorch's own, by which programs do without its compiler
SAID = "torch.compile compiles nothing for a virtual GPU: the code runs eagerly, and the times are those of eager code"


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch, {"compile": compile_eagerly(torch.compile)}
    yield (
        flex_attention,
        {
            "create_fw_bw_graph": _no_graph(flex_attention.create_fw_bw_graph),
            "FlexAttentionAutogradOp": _EagerAttention(flex_attention.FlexAttentionAutogradOp),
        },
    )


def compile_eagerly(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, whose models and functions are those that it gives, and run as with `backend="eager"`. It says so once."""
    signature, said = inspect.signature(original), False

    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        nonlocal said
        signature.bind(model, **options)  # raises for an option that there is not
        if model is None:
            return lambda model: compile(model, **options)
        if options.get("disable") or any(os.environ.get(switch) == "1" for switch in SWITCHES):
            return model
        backend = options.get("backend")
        if not said and getattr(backend, "__name__", backend) != "eager":
            said = True
            warnings.warn(SAID, stacklevel=2)
        return torch._dynamo.run(model)  # runs what is compiled already, which is nothing

    return compile


def _no_graph(trace: Callable[..., Any]) -> Callable[..., Any]:
    """The graphs that the gradient of flex attention is computed by, which are not needed where its parts have gradients."""

    def create_fw_bw_graph(score_mod: Callable[..., Any], index_values: tuple, other_buffers: tuple) -> Any:
        if type(index_values[0]) is VirtualTensor:
            return score_mod, None
        return trace(score_mod, index_values, other_buffers)

    return create_fw_bw_graph


class _EagerAttention:
    """Flex attention with gradients: operator by operator on a virtual GPU, as without gradients."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, query: torch.Tensor, *args: Any) -> Any:
        if type(query) is not VirtualTensor:
            return self._original.apply(query, *args)
        key, value, score_mod, _, block_mask, scale, options, of_mask, *of_score = args
        return flex_attention.sdpa_dense(query, key, value, score_mod, block_mask, scale, options, tuple(of_score), of_mask)
