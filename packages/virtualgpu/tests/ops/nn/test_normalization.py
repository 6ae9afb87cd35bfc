"""The allocations of normalizations, forward and backward, as recorded on an H200."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import virtualgpu
from virtualgpu import hardware
from virtualgpu.ops.nn.normalization import LAUNCHES_BACK, LAUNCHES_BACK_IN_EVALUATION

from ..asked import asked
from ..heard import spans

CASES = {
    "layer norm, bfloat16": (
        lambda: nn.LayerNorm(256).bfloat16(), (64, 256), torch.bfloat16,
        "+32768 +256 +256", "+32768 +512 +512 -256 -256",
    ), "RMS norm": (lambda: nn.RMSNorm(512), (8, 16, 512), torch.float32, "+262144 +512",
    "+262144 +2048 -512"), "group norm": (
        lambda: nn.GroupNorm(4, 32), (2, 32, 16, 16), torch.float32,
        "+65536 +32 +32 +256 +256 -256 -256",
        "+65536 +128 +128 +256 +256 +32 +32 +256 -32 -32 -256 -256 -256 -32 -32",
    ), "batch norm, cuDNN": (lambda: nn.BatchNorm2d(3), (4, 3, 24, 24), torch.float32,
    "+27648 +12 +12", "+27648 +12 +12 -12 -12"), "batch norm, two dimensions": (
        lambda: nn.BatchNorm1d(10), (4, 10), torch.float32,
        "+160 +40 +40", "+40 +40 +40 +40 +160 -40 -40 -40 -40",
    ),
    "batch norm, evaluation": (
        lambda: nn.BatchNorm1d(64).eval(), (128, 64), torch.float32,
        "+32768 +256 +256", "+256 +256 +256 +256 +32768 -256 -256 -256 -256",
    ),
    "batch norm, evaluation, cuDNN": (
        lambda: nn.BatchNorm2d(3).eval(), (4, 3, 24, 24), torch.float32, "+27648", "+27648 +12 +12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sequences(name):
    module, shape, dtype, forward, backward = CASES[name]

    def setup() -> tuple:
        return module().cuda(), torch.randn(shape, device="cuda").to(dtype).requires_grad_()

    assert " ".join(asked(lambda given: given[0](given[1]), setup=setup)) == forward
    got = asked(lambda given: given[0](given[1]), setup=setup, backward=True)
    assert sorted(got) == sorted(backward.split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_agree_with_the_cpu(name, dtype):
    module = CASES[name][0]().to(dtype)
    torch.manual_seed(0)
    x = torch.randn(CASES[name][1]).to(dtype)
    there = x.clone().requires_grad_()
    expected = module.float()(there.float())
    expected.square().sum().backward()
    gradient, weight_gradient = there.grad, module.weight.grad.clone()
    module = CASES[name][0]().to(dtype)
    with virtualgpu.use(gpus=1, like="H200"):
        here = x.cuda().requires_grad_()
        module = module.cuda()
        got = module(here)
        assert got.dtype is dtype
        got.float().square().sum().backward()
        tolerance = (
            {"rtol": 2e-2, "atol": 6e-2}
            if dtype is not torch.float32
            else {"rtol": 1e-4, "atol": 1e-4}
        )
        assert_close(got.detach().cpu().float(), expected.detach(), **tolerance)
        assert_close(here.grad.cpu(), gradient, rtol=0.1, atol=0.1)
        assert_close(module.weight.grad.cpu().float(), weight_gradient, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_without_parameters_takes_half_precision(machine, dtype, training):
    norm, x = (
        torch.nn.BatchNorm1d(3, affine=False).to(dtype).train(training),
        torch.randn(8, 3).to(dtype),
    )
    there = copy.deepcopy(norm).cuda()
    given = x.cuda().requires_grad_()
    y = there(given)
    y.square().sum().backward()
    reference = torch.nn.BatchNorm1d(3, affine=False).train(training)
    whole = x.float().requires_grad_()
    expected = reference(whole)
    expected.square().sum().backward()
    torch.testing.assert_close(y.detach().cpu().float(), expected.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(given.grad.cpu().float(), whole.grad, rtol=3e-2, atol=5e-2)
    torch.testing.assert_close(
        there.running_var.cpu().float(), reference.running_var, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("shape", "weight", "message"),
    [
        ([], None, r"at least one element, but got normalized_shape = \[\]"),
        (
            [2, 2],
            None,
            r"Given normalized_shape=\[2, 2\], expected input with shape \[\*2, 2\], but got "
            r"input of size\[2, 2, 3\]",
        ),
        ([2, 3], [3], r"but got weight of shape \[3\] and normalized_shape = \[2, 3\]"),
    ],
)
def test_rms_norm_refuses_shapes_that_do_not_fit(machine, shape, weight, message):
    weight = None if weight is None else torch.ones(weight, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        nn.functional.rms_norm(torch.ones(2, 2, 3, device="cuda"), shape, weight)


@pytest.mark.parametrize(
    ("norm", "shape", "dtype", "by_cudnn"),
    [
        (nn.BatchNorm2d, (4, 3, 8, 8), torch.float32, True),
        (nn.BatchNorm2d, (4, 3, 8, 8), torch.bfloat16, False),
        (nn.BatchNorm1d, (4, 3), torch.float32, False),
    ],
)
def test_the_host_calls_cudnn_for_batches_of_images_in_its_types(
    machine, norm, shape, dtype, by_cudnn
):
    profile, layer = hardware.machine().profile, norm(3).cuda()
    there, back = (
        spans_of(layer, torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True), name)
        for name in NATIVE
    )
    expected = profile.cudnn_seconds if by_cudnn else profile.launch_seconds
    assert there == pytest.approx(expected)
    assert back == pytest.approx(expected + LAUNCHES_BACK * profile.launch_seconds)


def test_a_norm_in_evaluation_calls_no_cudnn(machine):
    launch, layer = hardware.machine().profile.launch_seconds, nn.BatchNorm2d(3).cuda().eval()
    pictures = torch.randn(4, 3, 8, 8, device="cuda", requires_grad=True)
    there, back = (spans_of(layer, pictures, name) for name in NATIVE)
    assert there == pytest.approx(launch)
    assert back == pytest.approx((1 + LAUNCHES_BACK_IN_EVALUATION) * launch)


NATIVE = ("native_batch_norm", "native_batch_norm_backward")


def spans_of(layer: nn.Module, x: torch.Tensor, name: str) -> float:
    """Return the host's seconds for launching the layer's work with this name."""
    return next(
        span.overhead for span in spans(lambda: layer(x).sum().backward()) if span.name == name
    )
