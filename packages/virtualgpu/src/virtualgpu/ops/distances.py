"""Distances between rows, and their gradients.

Sources: PyTorch's native/Distance.cpp and native/cuda/DistanceKernel.cu. Compared with an H200
(torch 2.11, CUDA 13.0).
"""

from typing import Any

import torch

from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, cuda_kernel, handles, refuses_half
from virtualgpu.ops.sequence import Out, Plan, perform

Tensor = torch.Tensor

refuses_half("_cdist", "_pdist")
cuda_kernel("cdist_cuda", "_cdist_forward", "_euclidean_dist")
cuda_kernel("pdist_cuda", "_pdist_forward")


@handles("dist")
def dist(call: Call) -> torch.Tensor:
    """Run the operator `dist`: the norm of the difference of two tensors.

    Source: aten/src/ATen/native/Distance.cpp.
    """
    if call.op.outs:
        return operators.into_given(call)
    x, y, p = *call.args[:2], call.argument("p")
    return torch.linalg.vector_norm(x - y, p)


@handles("_euclidean_dist")
def euclidean_distance(call: Call) -> Tensor:
    """Run the operator for Euclidean distances between rows, with one matrix product.

    Each row is extended by its own norm. Source: native/Distance.cpp.
    """
    x, y = call.args
    norm_x = x.pow(2).sum(-1, keepdim=True)
    one_x = torch.ones_like(norm_x)
    norm_y = y.pow(2).sum(-1, keepdim=True)
    one_y = torch.ones_like(norm_y)
    scaled = x.mul(-2)
    left = torch.cat([scaled, norm_x, one_x], -1)
    del norm_x, one_x, scaled
    right = torch.cat([y, one_y, norm_y], -1)
    del one_y, norm_y
    result = left @ right.mT
    del right, left
    return result.clamp_min_(0).sqrt_()


@handles("_cdist_backward")
def cdist_backward(call: Call) -> Any:
    """Run the gradient of `cdist`: a row of partial gradients for each pair, then their sum.

    Source: native/cuda/DistanceKernel.cu.
    """
    if call.kwargs:
        return operators.into_given(call)
    if call.args[3] == 0:  # the distances are constant
        return operators.compute(call)
    size = call.args[4].numel() * call.args[1].shape[-1] * call.args[1].itemsize
    return perform(call, (Out(0), size, -size))


@handles("_pdist_backward")
def pdist_backward(call: Call) -> Any:
    """Run the gradient of `pdist`: a matrix of partial gradients, then their sum."""
    if call.kwargs:
        return operators.into_given(call)
    n, m = call.args[1].shape
    size = max(n - 1, 0) * n * m * call.args[1].itemsize

    def plan(outputs: list[Any]) -> Plan:
        return Out(0), size, -size

    return perform(call, plan)
