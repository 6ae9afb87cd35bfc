"""Convolutions allocate the workspaces that were measured or estimated."""

from contextlib import nullcontext

import pytest
import torch

from virtualgpu import hardware
from virtualgpu.ops.nn.convolution import DEPTHWISE_LAUNCHES

from ..heard import spans
from ..recorded import check, recorded


@pytest.mark.parametrize("name", recorded(("conv",), every=3))
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_memory_returns(machine):
    layer = torch.nn.Conv2d(5, 9, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    layer(torch.randn(3, 5, 7, 7, device="cuda")).sum().item()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("transposed", [False, True])
def test_cudnn_by_name(machine, transposed):
    x, weight = torch.randn(1, 4, 6, 6, device="cuda"), torch.randn(4, 4, 3, 3, device="cuda")
    sizes = ([1, 1], [1, 1], [2, 2], [1, 1]) if transposed else ([1, 1], [2, 2], [1, 1])
    named = torch.cudnn_convolution_transpose if transposed else torch.cudnn_convolution
    plain = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    more = {"output_padding": 1} if transposed else {}
    assert torch.equal(
        named(x, weight, *sizes, 1, False, True, True), plain(x, weight, None, 2, 1, **more)
    )


@pytest.mark.parametrize(
    ("shape", "settings", "off", "backend"),
    [  # The answers of a CUDA build, after PyTorch's own test of convolutions.
        ((2, 6, 7, 8), {}, False, "Cudnn"),
        ((2, 6, 7, 8, 9), {"transposed": True}, False, "CudnnTranspose"),
        ((2, 6, 7, 8), {"groups": 6}, False, "CudaDepthwise2d"),
        ((2, 6, 7), {"groups": 6}, True, "CudaDepthwise2d"),
        ((2, 6, 7, 8, 9), {}, True, "SlowDilated3d"),
        ((2, 6, 7), {}, True, "Slow2d"),
        ((2, 6, 7, 8), {"dilation": 2}, True, "SlowDilated2d"),
        ((2, 6, 7, 8), {"transposed": True}, True, "SlowTranspose2d"),
        ((0, 6, 7, 8), {}, False, "Empty"),
    ],
)
def test_whose_kernels_convolve(machine, shape, settings, off, backend):
    dims, groups, transposed = (
        len(shape) - 2,
        settings.get("groups", 1),
        settings.get("transposed", False),
    )
    weight = torch.ones(*(6, 12) if transposed else (12, 6 // groups), *[3] * dims, device="cuda")
    dilation = [settings.get("dilation", 1)] * dims
    with torch.backends.cudnn.flags(enabled=not off):
        chosen = torch._C._select_conv_backend(
            torch.ones(shape, device="cuda"),
            weight,
            None,
            [1] * dims,
            [0] * dims,
            dilation,
            transposed,
            [0] * dims,
            groups,
        )
    assert chosen.name == backend


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("last", ["image", "weight", "neither"])
@pytest.mark.parametrize("transposed", [False, True])
def test_without_values_the_channels_lie_as_with_them(machine, dims, last, transposed):
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    convolve = getattr(torch.nn.functional, f"conv{'_transpose' * transposed}{dims}d")
    strides = []
    for computing in (nullcontext, machine.without_values):
        with computing():
            image, weight = (
                torch.ones(2, 4, *[6] * dims, device="cuda"),
                torch.ones(4, 4, *[2] * dims, device="cuda"),
            )
            image = image.to(memory_format=form) if last == "image" else image
            weight = weight.to(memory_format=form) if last == "weight" else weight
            strides.append(convolve(image, weight, stride=2).stride())
            del image, weight
    assert strides[0] == strides[1]
    assert (strides[0][1] == 1) == (last != "neither")


@pytest.mark.parametrize(
    ("groups", "form", "off", "calls"),
    [
        (1, torch.contiguous_format, False, 1),
        (2, torch.contiguous_format, False, 1),
        # PyTorch's own kernels compute groups of one channel.
        (6, torch.contiguous_format, False, 0),
        (6, torch.channels_last, False, 1),
        (1, torch.contiguous_format, True, 0),
    ],
)
def test_the_host_calls_cudnn_once_for_each_result(machine, groups, form, off, calls):
    profile = hardware.machine().profile
    image = torch.randn(2, 6, 7, 8, device="cuda").to(memory_format=form).requires_grad_()
    weight = torch.randn(12, 6 // groups, 3, 3, device="cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=not off):
        there = spans(lambda: torch.nn.functional.conv2d(image, weight, groups=groups))[-1]
        result = torch.nn.functional.conv2d(image, weight, groups=groups).sum()
        back = next(span for span in spans(result.backward) if span.name == "convolution_backward")
    launch = profile.launch_seconds
    if off and groups == 1:
        launch += profile.product_seconds  # the host's time of a cuBLAS product
    else:
        launch += DEPTHWISE_LAUNCHES * profile.launch_seconds  # PyTorch's own kernels run
    assert there.overhead == pytest.approx(calls * profile.cudnn_seconds or launch)
    assert back.overhead == pytest.approx(2 * calls * profile.cudnn_seconds or launch)
