"""Convolutions as cuDNN computes them: a workspace for the output, one for the input's gradient, one for the weight's.

cuDNN chooses its algorithm by itself, and no rule for its workspaces is known: these are estimates. The table beside this file holds
what it asked for on an H200 for 1,500 convolutions; others take the nearest entry of the same layer, in proportion to input and output,
or else the size of copies in the order that its kernels want (input, output, and weight with channels last), which is what it asks for
most often. Order of allocations: PyTorch's native/cudnn/ConvShared.cpp and native/Convolution.cpp.
"""

import json
from functools import lru_cache
from math import log, prod
from pathlib import Path
from typing import Any

import torch

from labkit.vgpu import footprint, operators
from labkit.vgpu.footprint import reductions
from labkit.vgpu.footprint.sequence import Out, Plan, bytes_of, perform

Tensor = torch.Tensor
OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)


@lru_cache(maxsize=1)
def _recording() -> tuple[dict[str, list[int]], dict[str, list[tuple[tuple[int, ...], list[int]]]]]:
    """Workspaces by case, and by layer with the batch and size of each."""
    measured = json.loads(Path(__file__).with_name("cudnn_convolution_h200.json").read_text())["measured"]
    layers: dict[str, list[tuple[tuple[int, ...], list[int]]]] = {}
    for key, figures in measured.items():
        layer, batch, size = key.rsplit(" ", 2)
        layers.setdefault(layer, []).append(((int(batch), *map(int, size.split(","))), figures))
    return measured, layers


def _joined(numbers: Any, dims: int) -> str:
    numbers = list(numbers)
    return ",".join(map(str, numbers * dims if len(numbers) == 1 else numbers))


@lru_cache(maxsize=4096)
def workspaces(layer: str, extent: tuple[int, ...], x: int, y: int, w: int, itemsize: int, last: bool) -> tuple[int, ...]:
    """Bytes of the three workspaces, of `x`, `y`, `w` bytes of input, output, weight; a fourth figure marks PyTorch's own kernel."""
    measured, layers = _recording()
    if known := measured.get(f"{layer} {extent[0]} {','.join(map(str, extent[1:]))}"):
        return tuple(known)
    if near := layers.get(layer):
        other, figures = min(near, key=lambda entry: abs(log(prod(entry[0]) / max(prod(extent), 1))))
        scale = prod(extent) / prod(other)
        return tuple(round(n * scale) if n > 0 and i < 3 else n for i, n in enumerate(figures))
    copies = 0 if last else x + y + w
    return copies, copies, copies


def _layer(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> tuple[str, bool]:
    dims = x.dim() - 2
    last = dims == 2 and any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight))
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    settings = " ".join(_joined(n, dims) for n in (weight.shape[2:], stride, padding, dilation))
    name = str(x.dtype)[6:]
    return f"{name} {'last' if last else 'first'} {'FT'[transposed]} {x.shape[1]} {channels} {settings} {groups}", last


def figures(x: Tensor, y: int, weight: Tensor, *settings: Any) -> tuple[int, ...]:
    if x.dtype is torch.float64 and x.dim() == 4:
        return 0, 0, 0  # cuDNN's kernels for float64 asked for none
    layer, last = _layer(x, weight, *settings)
    return workspaces(layer, (x.shape[0], *x.shape[2:]), bytes_of(x), y, bytes_of(weight), x.itemsize, last)


def _takes(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.dim() > 2 and x.numel() > 0


@footprint.handles("convolution")
def convolution(func: Any, args: tuple, kwargs: dict) -> Any:
    x, weight, _, stride, padding, dilation, transposed, _, groups = args
    if kwargs or not _takes(x):
        return operators.compute(func, args, kwargs)
    gpu, moved = operators.common_gpu(args, kwargs)

    def plan(outputs: list[Any]) -> Plan:
        space = figures(x, bytes_of(outputs[0]), weight, stride, padding, dilation, transposed, groups)[OUTPUT]
        return Out(0), space, -space

    return perform(func, args, kwargs, plan, gpu, moved, flops=_flops(args[0], weight, transposed))


@footprint.handles("convolution_backward")
def convolution_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """The input's gradient, the weight's, then the bias's as a sum; a gradient that does not lie dense is copied first."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    if kwargs or not _takes(x):
        return operators.compute(func, args, kwargs)
    gpu, moved = operators.common_gpu(args, kwargs)
    spaces = figures(x, bytes_of(grad), weight, stride, padding, dilation, transposed, groups)
    spaces = tuple(max(0, n) for n in spaces)
    copy = 0 if grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last) else bytes_of(grad)
    steps: list[Any] = [copy]
    gradients = [(Out(0), spaces[INPUT_GRADIENT], mask[0]), (Out(1), spaces[WEIGHT_GRADIENT], mask[1])]
    for out, space, wanted in reversed(gradients) if len(spaces) > 3 else gradients:
        if wanted:
            steps += [out, space, -space]
    if mask[2]:
        dims = [d for d in range(grad.dim()) if d != 1]
        sums = reductions.staging(grad, dims, reductions.sum_bytes(grad.dtype))
        steps += [Out(2), *sums, *(-size for size in reversed(sums))]
    steps.append(-copy)
    flops = _flops(x, weight, transposed) * (mask[0] + mask[1])
    return perform(func, args, kwargs, lambda outputs: tuple(steps), gpu, moved, flops=flops)


def _flops(x: Tensor, weight: Tensor, transposed: bool) -> int:
    """Those of a convolution with stride 1 and padding; an upper bound for others."""
    return 2 * x.shape[0] * prod(x.shape[2:]) * (x.shape[1] * prod(weight.shape[1:]) if transposed else weight.numel())
