"""Pooling, resampling and padding.

Their kernels write one output, and read a gradient that lies as the image does: another is copied first (aten/src/ATen/native/cuda/
AdaptiveAveragePooling.cu, AveragePool2d.cu, DilatedMaxPool2d.cu, FractionalMaxPool2d.cu, UpSample*.cu, ReflectionPad.cu and others).
Held against what PyTorch's operator and module databases asked an H200 for (torch 2.11).
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

POOLED, POOLED_BACKWARD = (
    0.3,
    2.3,
)  # clocks an element of the larger image (ATen/native/cuda/DilatedMaxPool2d.cu)

# A thread computes one pixel of all pictures and channels, one after the other, each in so many
# clocks (upsample_bilinear2d_out_frame, ATen/native/cuda/UpSampleBilinear2d.cu).
PIXEL = 450
# Clocks of an element that is added where others may be adding, too.
BLENDED_BACKWARD = 4.0
AVERAGED_BACKWARD = 4.4  # clocks of an element of the image (ATen/native/cuda/AveragePool2d.cu)

aten = torch.ops.aten
sums_in_float32(
    aten.grid_sampler_2d,
    aten.grid_sampler_3d,
    aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward,
)

# The CPU has no kernels in half precision of these.
sums_in_float32(aten.avg_pool3d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
# The names and the types of CUDA's kernels stand in ATen/native/cuda: AveragePool2d.cu,
# AveragePool3d.cu, DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, UpSampleBilinear2d.cu (antialiased
# kernels too), UpSampleBicubic2d.cu, GridSampler.cpp and MaxUnpooling.cu.
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

RESAMPLED = tuple(
    f"{prefix}upsample_{mode}_backward"
    for prefix, modes in (
        (
            "",
            (
                "nearest1d",
                "nearest2d",
                "nearest3d",
                "linear1d",
                "bilinear2d",
                "trilinear3d",
                "bicubic2d",
            ),
        ),
        (
            "_",
            (
                "nearest_exact1d",
                "nearest_exact2d",
                "nearest_exact3d",
                "bilinear2d_aa",
                "bicubic2d_aa",
            ),
        ),
    )
    for mode in modes
)


@temporaries(
    "avg_pool2d_backward", "max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward"
)
def in_the_images_order(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """A gradient lies as the image does, with its channels last or not."""
    gradient, image = call.args[:2]
    last = (
        image.dim() == 4
        and not image.is_contiguous()
        and image.is_contiguous(memory_format=torch.channels_last)
    )
    return (
        ()
        if last and gradient.is_contiguous(memory_format=torch.channels_last)
        else contiguous_copies(gradient)
    )


@temporaries("_adaptive_avg_pool2d_backward")
def averages(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """With channels last the kernel reads any gradient."""
    gradient, image = call.args[:2]
    return contiguous_copies(gradient) if image.is_contiguous() or image.dim() != 4 else ()


temporaries(
    "avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", *RESAMPLED,
)(contiguous_gradient)  # fmt: skip


@handles("fractional_max_pool2d_backward")
def copied_first(call: Call) -> Any:
    """The gradient is copied before there is room for the result."""
    if call.op.outs:
        return operators.into_given(call)
    copies = contiguous_copies(call.args[0])
    return perform(call, (*copies, OUT, *(-size for size in copies)))


@temporaries("unfold_backward")
def positions(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """The places along the dimension, as 64-bit numbers (aten/src/ATen/native/UnfoldBackward.h)."""
    sizes, dim = call.argument("input_sizes"), call.argument("dim")
    return (8 * sizes[dim],) if sizes else ()


@device_time("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    return Work(moved, clocks=POOLED * call.args[0].numel())


@device_time("upsample_bilinear2d")
def bilinear_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    pictures, channels = call.args[0].shape[:2]
    return Work(moved, serial=PIXEL * pictures * channels)


@device_time("upsample_bilinear2d_backward")
def bilinear_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    return Work(moved, clocks=BLENDED_BACKWARD * call.args[0].numel())


@device_time("avg_pool2d_backward")
def average_pool_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    return Work(moved, clocks=AVERAGED_BACKWARD * call.args[1].numel())


@device_time("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    return Work(moved, clocks=POOLED_BACKWARD * call.args[1].numel())
