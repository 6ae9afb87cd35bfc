"""What matrix products do on a GPU, and what is made of them: convolutions, attention, recurrent layers.

The shares of a product's rate are read off benchmarks/timing/kernels.json (one H200, torch 2.11, cuDNN 9.19), rounded.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from virtualgpu.ops.kernels import UNVECTORIZED, Work, bytes_of, named, rule

Tensor = torch.Tensor

# Matrix products: the argument positions of the two factors.
PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1),
    "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmv": (1, 2), "addmv_": (1, 2),
}  # fmt: skip
FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}

CONVOLUTION, CONVOLUTION_BACKWARD = 0.85, 0.5
CHANNEL_TILE, CHANNEL_VECTOR = 128, 8  # output channels are computed so many at a time, input channels read so many at a time
ATTENTION, ATTENTION_BACKWARD = 0.62, 0.6
ATTENTION_HALF, ATTENTION_BACKWARD_HALF = 256, 512  # queries with which half of that is reached: the blocks of a short sequence are few
RECURRENT = 0.17  # of a product's rate: the steps of a sequence come one after the other


def product_format(dtype: torch.dtype) -> str:
    """The format in which cuBLAS multiplies."""
    return FORMATS.get(dtype, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32")


def cudnn_format(dtype: torch.dtype) -> str:
    """The format in which cuDNN multiplies: unless told otherwise, it takes float32 for tf32."""
    return FORMATS.get(dtype, "tf32" if torch.backends.cudnn.allow_tf32 else "float32")


def matrix_work(func: Any, args: tuple) -> tuple[int, int] | None:
    """Floating-point operations and output elements of a matrix product; None for another operator."""
    positions = PRODUCTS.get(func._schema.name.removeprefix("aten::"))
    if positions is None:
        return None
    left, right = args[positions[0]], args[positions[1]]
    terms = left.shape[-1]
    outputs = left.numel() // max(terms, 1) * (right.shape[-1] if right.dim() > 1 else 1)
    return 2 * outputs * terms, outputs


@rule(*PRODUCTS)
def product(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    flops, outputs = matrix_work(func, args) or (0, 0)
    return Work(moved, flops, product_format(args[0].dtype), outputs)


# Convolutions


@rule("convolution")
def convolution(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """A product, for which tensor cores want the channels last; a kernel of its own adds the bias (ATen/native/cudnn/ConvShared.cpp)."""
    given = named(func, args, kwargs)
    x, weight, transposed, out = given["input"], given["weight"], given["transposed"], results[0]
    if not x.numel() or x.dim() != weight.dim():  # nothing to do, or one sample without a batch
        return Work(moved)
    flops = _flops(x, weight, transposed, out.shape[2:]) / CONVOLUTION
    wasted = _wasted(x, weight, transposed, given["groups"])
    around, clocks = _reordered(x, weight, out), 0.0
    if given["bias"] is not None:
        around, clocks = around + 2 * bytes_of(out), UNVECTORIZED * out.numel()
    return Work(moved, flops * wasted, cudnn_format(x.dtype), round(out.numel() * wasted), clocks, around=around)


@rule("convolution_backward")
def convolution_backward(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    given = named(func, args, kwargs)
    grad, x, weight, transposed, mask = (given[name] for name in ("grad_output", "input", "weight", "transposed", "output_mask"))
    if not x.numel():
        return Work(moved)
    gradients = mask[0] + mask[1]
    flops = _flops(x, weight, transposed, grad.shape[2:]) * gradients / CONVOLUTION_BACKWARD
    wasted = _wasted(x, weight, transposed, given["groups"])
    around = gradients * _reordered(x, weight, grad) + mask[2] * bytes_of(grad)
    return Work(moved, flops * wasted, cudnn_format(x.dtype), round(grad.numel() * wasted), around=around)


def _in_tensor_cores(x: Tensor) -> bool:
    """Does the GPU have units of their own for the format? Kernels without them take the channels as they come."""
    rates = x._gpu.profile.peak_flops  # type: ignore[attr-defined]
    return rates[cudnn_format(x.dtype)] > rates["float32"]


def _wasted(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> float:
    """How many times more tensor cores compute than is asked for: channels come in tiles and vectors, but where a group is one channel."""
    into, out = (weight.shape[0] // groups, weight.shape[1]) if transposed else (weight.shape[1], weight.shape[0] // groups)
    if not weight.numel() or into == out == 1 or not _in_tensor_cores(x):
        return 1.0
    return -(-out // CHANNEL_TILE) * CHANNEL_TILE / out * (-(-into // CHANNEL_VECTOR) * CHANNEL_VECTOR / into)


def _reordered(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Bytes of reading and writing input and output once more: tensor cores want the channels last, unless the weight is a point."""
    last = x.dim() == 4 and any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight))
    return 0 if last or prod(weight.shape[2:]) == 1 or not _in_tensor_cores(x) else 2 * (bytes_of(x) + bytes_of(out))


def _flops(x: Tensor, weight: Tensor, transposed: bool, extent: Sequence[int]) -> int:
    """Floating-point operations: every output position has all weights, or every input position, of a transposed convolution."""
    return 2 * x.shape[0] * prod(x.shape[2:] if transposed else extent) * weight.numel()


# Attention and recurrent layers


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool = False) -> Work:
    """Two products forward, five backward; a causal mask spares half of them."""
    queries, outputs = q.shape[2], prod(q.shape[:3]) * v.shape[3]
    flops = 2 * k.shape[2] * prod(q.shape[:3]) * (q.shape[3] + v.shape[3]) * (2.5 if backward else 1) * (0.5 if causal else 1)
    share, half = (ATTENTION_BACKWARD, ATTENTION_BACKWARD_HALF) if backward else (ATTENTION, ATTENTION_HALF)
    moved = sum(map(bytes_of, (q, k, v))) + outputs * q.itemsize
    return Work(moved * (2 if backward else 1), flops / (share * queries / (queries + half)), product_format(q.dtype), outputs)


def recurrent(moved: int, rows: int, weights: int, outputs: int, dtype: torch.dtype) -> Work:
    """A layer's work for so many rows of input and elements of weights, that has so many `outputs`."""
    return Work(moved, 2 * rows * weights / RECURRENT, cudnn_format(dtype), outputs)
