"""Pooling, resampling and padding.

Their kernels write one output. They read gradients whose dimensions are in the image's order in
memory, and copy other gradients first (aten/src/ATen/native/cuda/AdaptiveAveragePooling.cu,
AveragePool2d.cu, DilatedMaxPool2d.cu, FractionalMaxPool2d.cu, UpSample*.cu, ReflectionPad.cu and
others). Compared with an H200's allocations for PyTorch's operator and module databases (torch
2.11).
"""

from typing import Any

import torch

from virtualgpu.ops import operators
from virtualgpu.ops.call import (
    Call,
    Work,
    asserts,
    cuda_kernel,
    device_time,
    handles,
    temporaries,
)
from virtualgpu.ops.elementwise import contiguous_copies, contiguous_gradient
from virtualgpu.ops.half import lacks, sums_in_float32
from virtualgpu.ops.integers import INTEGERS
from virtualgpu.ops.sequence import OUT, perform

# Clocks per element of the larger image (ATen/native/cuda/DilatedMaxPool2d.cu).
POOLED, POOLED_BACKWARD = 0.3, 2.3
# A thread computes one pixel of all samples and channels, one after the other. Each takes this many
# clocks (upsample_bilinear2d_out_frame, ATen/native/cuda/UpSampleBilinear2d.cu).
PIXEL = 450
# Clocks per element of a gradient that is added atomically.
BLENDED_BACKWARD = 4.0
AVERAGED_BACKWARD = 4.4  # clocks per element of the image (ATen/native/cuda/AveragePool2d.cu)

aten = torch.ops.aten
sums_in_float32(
    aten.grid_sampler_2d,
    aten.grid_sampler_3d,
    aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward,
)

# The CPU has no kernels in half precision for these operators.
sums_in_float32(aten.avg_pool3d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
# The names and dtypes of CUDA's kernels are those of AveragePool2d.cu, AveragePool3d.cu,
# DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, UpSampleBilinear2d.cu (also with antialiasing),
# UpSampleBicubic2d.cu, GridSampler.cpp and MaxUnpooling.cu in ATen/native/cuda.
for _kernel, *_operators in (
    ("avg_pool2d_out_cuda_frame", aten.avg_pool2d),
    ("avg_pool3d_out_cuda", aten.avg_pool3d),
    ("max_pool2d_with_indices_out_cuda_frame", aten.max_pool2d_with_indices),
    ("max_pool3d_with_indices_out_frame", aten.max_pool3d_with_indices),
    ("upsample_bilinear2d_out_frame", aten.upsample_bilinear2d, aten._upsample_bilinear2d_aa),
    ("upsample_bicubic2d_out_frame", aten.upsample_bicubic2d, aten._upsample_bicubic2d_aa),
):
    for _operator in _operators:
        lacks(_kernel, _operator, INTEGERS)
cuda_kernel("grid_sampler_2d_cuda", "grid_sampler_2d")
cuda_kernel("grid_sampler_3d_cuda", "grid_sampler_3d")
asserts(
    "maxind >= 0 && maxind < outputImageSize", "max_unpool2d", cpu="^Found an invalid max index"
)

# The backward operators of resampling.
RESAMPLED = [
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward",
    "upsample_bicubic2d_backward",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d_backward",
    "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
]  # fmt: skip


@temporaries(
    "avg_pool2d_backward", "max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward"
)
def in_the_images_order(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of a copy of the gradient of a pooling's output.

    There is no copy if the gradient and the image are both contiguous, or if both have their
    channels last.
    """
    gradient, image = call.args[:2]
    if image.dim() == 4 and not image.is_contiguous():
        last = torch.channels_last
        if image.is_contiguous(memory_format=last) and gradient.is_contiguous(memory_format=last):
            return ()
    return contiguous_copies(gradient)


@temporaries("_adaptive_avg_pool2d_backward")
def averages(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of a contiguous copy of the gradient of an average pooling's output.

    With channels last, the kernel reads any gradient and needs no copy.
    """
    gradient, image = call.args[:2]
    if image.is_contiguous() or image.dim() != 4:
        return contiguous_copies(gradient)
    return ()


temporaries(
    "avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "max_pool3d_with_indices_backward",
    "adaptive_max_pool3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    *RESAMPLED,
)(contiguous_gradient)  # fmt: skip


@handles("fractional_max_pool2d_backward")
def copied_first(call: Call) -> Any:
    """Run the gradient of a pooling, after copying the output's gradient.

    CUDA makes this copy before it allocates the result.
    """
    if call.op.outs:
        return operators.into_given(call)
    copies = contiguous_copies(call.args[0])
    return perform(call, (*copies, OUT, *(-size for size in copies)))


@temporaries("unfold_backward")
def positions(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of a temporary with a 64-bit position for each index along a dimension.

    The gradient of `unfold` needs it (aten/src/ATen/native/UnfoldBackward.h).
    """
    sizes, dim = call.argument("input_sizes"), call.argument("dim")
    if sizes:
        return (8 * sizes[dim],)
    return ()


@device_time("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a max pooling, per element of the input.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(moved, clocks=POOLED * call.args[0].numel())


@device_time("upsample_bilinear2d")
def bilinear_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a bilinear resampling. One thread computes all channels of a pixel.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    samples, channels = call.args[0].shape[:2]
    return Work(moved, serial=PIXEL * samples * channels)


@device_time("upsample_bilinear2d_backward")
def bilinear_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of the gradient of a bilinear resampling, per element of its output.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(moved, clocks=BLENDED_BACKWARD * call.args[0].numel())


@device_time("avg_pool2d_backward")
def average_pool_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of the gradient of an average pooling, per element of its input.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(moved, clocks=AVERAGED_BACKWARD * call.args[1].numel())


@device_time("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of the gradient of a max pooling, per element of its input.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(moved, clocks=POOLED_BACKWARD * call.args[1].numel())
