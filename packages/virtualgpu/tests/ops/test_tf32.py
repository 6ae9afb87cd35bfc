"""TF32 rounds the factors of float32 products, if the GPU has it and the program allows it."""

import math
import struct
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from virtualgpu import profiles
from virtualgpu.hardware import OPERATIONS, Machine
from virtualgpu.hardware import machine as current_machine
from virtualgpu.ops.tf32 import round_to_tf32

UNIT = 2.0**-10  # the distance of two TF32 numbers next to 1
SETTINGS = {
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "matmul.fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32_precision": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore PyTorch's defaults after the test: TF32 for cuDNN, and none for cuBLAS."""
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture
def matmul_tf32(machine) -> None:
    """Use virtual H200s on which a program has allowed TF32 in matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = True


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return `x` rounded to TF32 by arithmetic in float64, with ties away from zero."""
    if x.is_complex():
        return torch.complex(rounded(x.real), rounded(x.imag))
    # the mantissa is at least 0.5 and less than 1, so 11 bits are kept
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2**11
    return torch.ldexp(torch.sign(scaled) * torch.floor(scaled.abs() + 0.5), exponent - 11).to(
        x.dtype
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Rounding


def test_every_float32_is_rounded_to_the_nearest_with_ties_away_from_zero():
    bits = torch.randint(
        -(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(1)
    ).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny) & (x.abs() < 1e38)]
    assert len(x) > 90_000
    assert_close(round_to_tf32(x), rounded(x), rtol=0, atol=0)
    ties = torch.tensor([1 + UNIT / 2, -1 - UNIT / 2, 1 + 1.5 * UNIT, 1 + 0.499 * UNIT])
    assert round_to_tf32(ties).tolist() == [1 + UNIT, -1 - UNIT, 1 + 2 * UNIT, 1.0]


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFFC00000])
def test_no_pattern_of_a_nan_becomes_a_number(pattern):
    x = (
        torch.tensor(struct.unpack("i", struct.pack("I", pattern)))
        .to(torch.int32)
        .view(torch.float32)
    )
    assert round_to_tf32(x).isnan().all()


def test_infinities_zeros_and_what_has_few_bits_stay():
    x = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1.0, -3.0, 2048.0, 1 + UNIT])
    assert torch.equal(round_to_tf32(x).view(torch.int32), x.view(torch.int32))


def test_the_given_tensor_and_its_layout_stay():
    x = random(4, 6).t()
    before = x.clone()
    result = round_to_tf32(x)
    assert torch.equal(x, before)
    assert result.stride() == x.stride()
    wide = random(1, 6).expand(4, 6)
    assert torch.equal(round_to_tf32(wide), rounded(wide))


def test_a_conjugate_and_a_negative_view_are_rounded_as_they_read():
    x = torch.complex(random(5), random(5, seed=1))
    assert torch.equal(round_to_tf32(x.conj()), rounded(x.conj().resolve_conj()))
    assert torch.equal(round_to_tf32(x.conj().imag), rounded(x.conj().imag.resolve_neg()))


# Settings


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_way_to_allow_it_changes_a_product(machine, setting):
    a, b = random(8, 8), random(8, 8, seed=1)
    # by default cuBLAS multiplies in float32
    assert torch.equal((a.cuda() @ b.cuda()).cpu(), a @ b)
    SETTINGS[setting]()
    assert torch.equal((a.cuda() @ b.cuda()).cpu(), rounded(a) @ rounded(b))


FORBIDDEN = {
    "allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "conv.fp32_precision": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.mark.parametrize("setting", FORBIDDEN)
def test_a_convolution_uses_it_until_a_program_forbids_it(machine, setting):
    x, weight = random(2, 8, 6, 6), random(8, 8, 3, 3, seed=1)

    def convolve() -> torch.Tensor:
        return F.conv2d(x.cuda(), weight.cuda()).cpu()

    assert_close(convolve(), F.conv2d(rounded(x), rounded(weight)))
    assert (convolve() - F.conv2d(x, weight)).abs().max() > 1e-4
    FORBIDDEN[setting]()
    assert_close(convolve(), F.conv2d(x, weight))


@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_old_and_new_settings_raise_no_error_in_an_operator(machine, setting):
    """Check that operators run, even if PyTorch refuses to read `allow_tf32`."""
    SETTINGS[setting]()
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    x = random(2, 8, 6, 6).cuda()
    F.conv2d(x, random(8, 8, 3, 3).cuda())
    assert (x @ x).shape == x.shape


@pytest.mark.parametrize("name", profiles.names())
def test_gpus_before_ampere_have_none(name):
    torch.backends.cuda.matmul.allow_tf32 = True
    profile = profiles.load(name)
    gpu = Machine(profile, 1).gpus[0]
    assert [gpu.multiplies_in_tf32(operation) for operation in OPERATIONS] == [
        profile.major >= 8
    ] * 3
    assert (name == "T4") == (profile.major < 8)


def test_nvidias_variable_forbids_it(machine, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    gpu = Machine(profiles.load("H100"), 1).gpus[0]
    assert not gpu.multiplies_in_tf32("conv")


# Products


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda a, b, c: a[0] @ b[0],
    "mm into a tensor": lambda a, b, c: torch.mm(a[0], b[0], out=torch.empty_like(c[0])),
    "mm of a transposed matrix": lambda a, b, c: a[0] @ b[0].mT,
    "bmm": lambda a, b, c: torch.bmm(a, b),
    "matmul": lambda a, b, c: a @ b[0],
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0]),
    "addmm_": lambda a, b, c: c[0].clone().addmm_(a[0], b[0], beta=0.5, alpha=2),
    "addmm onto a factor": lambda a, b, c: (x := a[0].clone()).addmm_(x, b[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b),
    "baddbmm_": lambda a, b, c: c.clone().baddbmm_(a, b),
    "addbmm": lambda a, b, c: torch.addbmm(c[0], a, b),
    "addbmm_": lambda a, b, c: c[0].clone().addbmm_(a, b),
    "linear": lambda a, b, c: F.linear(a, b[0], c[0, 0]),
    "linear in inference mode": torch.inference_mode()(lambda a, b, c: F.linear(a, b[0], c[0, 0])),
    "einsum": lambda a, b, c: torch.einsum("bij,bjk->ik", a, b),
    "chain": lambda a, b, c: torch.linalg.multi_dot([a[0], b[0]]),
    "named arguments": lambda a, b, c: torch.ops.aten.addmm(c[0], mat1=a[0], mat2=b[0]),
}
UNROUNDED: dict[str, Callable[..., torch.Tensor]] = {
    "mv": lambda a, b, c: a[0] @ b[0, 0],
    "addmv": lambda a, b, c: torch.addmv(c[0, 0], a[0], b[0, 0]),
    "dot": lambda a, b, c: a[0, 0] @ b[0, 0],
    "addr": lambda a, b, c: torch.addr(c[0], a[0, 0], b[0, 0]),
    "*": lambda a, b, c: a * b + c,
    "sparse": lambda a, b, c: torch.sparse.mm(a[0].to_sparse(), b[0]),
}


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [random(2, 8, 8, seed=seed, dtype=dtype) for seed in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_rounds_its_factors_and_nothing_else(matmul_tf32, name, dtype):
    a, b, c = operands(dtype)
    result = PRODUCTS[name](a.cuda(), b.cuda(), c.cuda()).cpu()
    if name == "addmm onto a factor":
        expected = torch.addmm(a[0], rounded(a[0]), rounded(b[0]))
    else:
        expected = PRODUCTS[name](rounded(a), rounded(b), c)
    assert_close(result, expected)
    assert (result - PRODUCTS[name](a, b, c)).abs().max() > 1e-4


@pytest.mark.parametrize("name", UNROUNDED)
def test_products_with_vectors_and_of_sparse_matrices_are_not_rounded(matmul_tf32, name):
    a, b, c = operands()
    assert_close(UNROUNDED[name](a.cuda(), b.cuda(), c.cuda()).cpu(), UNROUNDED[name](a, b, c))


GUARDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pinv": torch.linalg.pinv,
    "svd": torch.linalg.svdvals,
    "cholesky": torch.linalg.cholesky,
    "matrix_exp": torch.linalg.matrix_exp,
}


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler names the guard otherwise there")
@pytest.mark.parametrize("name", GUARDED)
def test_functions_from_which_pytorch_keeps_tf32_are_not_rounded(matmul_tf32, name):
    """Check functions that PyTorch guards with `NoTF32Guard`, and their gradients."""
    x = random(4, 4).abs() + 4 * torch.eye(4)
    results = []
    for given in (x.clone().requires_grad_(), x.cuda().requires_grad_()):
        result = GUARDED[name](given)
        result.square().sum().backward()
        results.append((result.detach().cpu(), given.grad.cpu()))
    assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float16, torch.bfloat16])
def test_other_dtypes_are_not_rounded(matmul_tf32, dtype):
    a, b = (
        random(8, 8, seed=seed, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(
            dtype
        )
        for seed in (0, 1)
    )
    allowed = (a.cuda() @ b.cuda()).cpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.equal(allowed, (a.cuda() @ b.cuda()).cpu())


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bmm": lambda x, y: torch.bmm(x[0, :, :2], y[0, :, :2, :3]),
    "conv2d": lambda x, y: F.conv2d(x, y, x[0, 0, 0]),
    "baddbmm": lambda x, y: torch.baddbmm(x[0, :, :2, :2], x[0, :, :2], y[0, :, :, :2]),
}


@pytest.mark.parametrize("name", MIXED)
def test_operands_of_two_dtypes_get_the_same_error(machine, name):
    x, y = torch.zeros(3, 3, 3, 3, device="cuda"), torch.zeros(3, 3, 3, 3, device="cuda").half()
    messages = []
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        with pytest.raises(RuntimeError) as error:
            MIXED[name](x, y)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_product_in_half_precision_that_stays_float32_is_not_rounded_to_tf32(matmul_tf32):
    a, b = random(8, 8).bfloat16(), random(8, 8, seed=1).bfloat16()
    assert_close(torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32).cpu(), a.float() @ b.float())


def test_the_backward_pass_of_a_layer_rounds_too(matmul_tf32):
    x, weight, grad = operands()
    layer = nn.Linear(8, 8, bias=False, device="cuda")
    layer.weight.data.copy_(weight[0])
    given = x[0].cuda().requires_grad_()
    layer(given).backward(grad[0].cuda())
    assert_close(given.grad.cpu(), rounded(grad[0]) @ rounded(weight[0]))
    assert_close(layer.weight.grad.cpu(), rounded(grad[0]).mT @ rounded(x[0]))


def test_the_setting_counts_when_the_operator_runs(machine):
    a = random(8, 8)
    given = a.cuda().requires_grad_()
    result = given @ given
    torch.backends.cuda.matmul.allow_tf32 = True
    result.sum().backward()
    ones = torch.ones(8, 8)
    assert torch.equal(result.detach().cpu(), a @ a)
    assert_close(given.grad.cpu(), ones @ rounded(a).mT + rounded(a).mT @ ones)


def test_a_cuda_graph_keeps_the_setting_of_its_capture(matmul_tf32):
    a = random(8, 8)
    x = a.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x @ x
    torch.backends.cuda.matmul.allow_tf32 = False
    graph.replay()
    assert torch.equal(y.cpu(), rounded(a) @ rounded(a))
    del y
    graph.reset()


def test_a_product_without_values_rounds_nothing(machine, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = True
    monkeypatch.setattr(current_machine(), "values", False)
    # calling it would raise an error
    monkeypatch.setattr("virtualgpu.ops.tf32.round_to_tf32", None)
    x = torch.randn(64, 64, device="cuda")
    assert (x @ x).shape == (64, 64)


def test_the_time_of_a_product_follows_the_same_decision(machine):
    x = torch.zeros(2048, 2048, device="cuda")
    gpu = current_machine().gpus[0]

    def seconds(run: Callable[[], object]) -> float:
        run()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    plain, plain_vector = seconds(lambda: x @ x), seconds(lambda: x @ x[0])
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert gpu.multiplies_in_tf32("matmul")
    assert seconds(lambda: x @ x) < plain / 2
    assert seconds(lambda: x @ x[0]) == pytest.approx(plain_vector)


def test_errors_are_as_large_as_an_h100s(matmul_tf32):
    """Check products of 512 x 512 normal numbers, which were off by 0.0313 on an H100 with TF32."""
    a, b = random(512, 512).cuda(), random(512, 512, seed=1).cuda()
    exact = a.double() @ b.double()
    assert 0.02 < ((a @ b).double() - exact).abs().max().item() < 0.045
    torch.backends.cuda.matmul.allow_tf32 = False
    assert ((a @ b).double() - exact).abs().max().item() < 2e-4


# Convolutions


CONVOLUTIONS = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b), (2, 8, 9), (8, 8, 3)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 8, 6, 6), (8, 8, 3, 3)),
    "3d": (lambda x, w, b: F.conv3d(x, w, b), (1, 8, 4, 4, 4), (8, 8, 3, 3, 3)),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 8, 6, 6), (8, 4, 3, 3)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        (2, 8, 5, 5),
        (8, 8, 3, 3),
    ),
    "one image": (lambda x, w, b: F.conv2d(x, w, b), (8, 6, 6), (8, 8, 3, 3)),
}


def convolve(
    name: str, device: str, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> list[torch.Tensor]:
    """Return a convolution's output, all gradients, and the gradient of the output."""
    run, *shapes = CONVOLUTIONS[name]
    x, weight = (
        change(random(*shape, seed=seed)).to(device).requires_grad_()
        for seed, shape in enumerate(shapes)
    )
    bias = random(8, seed=2).to(device).requires_grad_()
    result = run(x, weight, bias)
    grad = random(*result.shape, seed=3)
    result.backward(change(grad).to(device))
    return [result.detach(), x.grad, weight.grad, bias.grad, grad]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_both_its_gradients_round(machine, name):
    given = [x.cpu() for x in convolve(name, "cuda")]
    plain, expected = convolve(name, "cpu"), convolve(name, "cpu", rounded)
    for index in range(3):
        assert_close(given[index], expected[index], rtol=1e-5, atol=1e-5)
        assert (given[index] - plain[index]).abs().max() > 1e-4
    assert_close(given[3], plain[3])  # the bias's gradient is a sum, whose terms are not rounded


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_without_tf32_agrees_with_the_cpu(machine, name):
    torch.backends.cudnn.allow_tf32 = False
    for given, expected in zip(convolve(name, "cuda"), convolve(name, "cpu"), strict=True):
        assert_close(given.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_convolution_without_cudnn_follows_cublas(machine, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    x, weight = random(2, 8, 6, 6), random(8, 8, 3, 3, seed=1)
    assert_close(F.conv2d(x.cuda(), weight.cuda()).cpu(), F.conv2d(x, weight))
    torch.backends.cuda.matmul.allow_tf32 = True
    assert_close(F.conv2d(x.cuda(), weight.cuda()).cpu(), F.conv2d(rounded(x), rounded(weight)))


def test_a_depthwise_convolution_is_not_rounded(machine):
    x, weight = random(2, 8, 6, 6), random(8, 1, 3, 3, seed=1)
    assert_close(F.conv2d(x.cuda(), weight.cuda(), groups=8).cpu(), F.conv2d(x, weight, groups=8))


def test_gradients_of_gradients_of_a_convolution_round(machine):
    def twice(device: str) -> torch.Tensor:
        x, weight = (
            random(*shape, seed=seed).to(device).requires_grad_()
            for seed, shape in enumerate([(1, 4, 5, 5), (4, 4, 3, 3)])
        )
        (grad,) = torch.autograd.grad(F.conv2d(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0].cpu()

    assert (
        1e-5 < ((twice("cuda") - twice("cpu")).abs().max() / twice("cpu").abs().max()).item() < 1e-2
    )


# Recurrent layers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_rounds_its_input_and_its_weights(machine, kind):
    torch.manual_seed(0)
    plain = kind(8, 8)
    moved = kind(8, 8)
    moved.load_state_dict(plain.state_dict())
    moved.cuda()
    x = random(5, 2, 8)
    result = moved(x.cuda())[0].detach().cpu()
    assert (result - plain(x)[0]).abs().max() > 1e-5
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert_close(moved(x.cuda())[0].detach().cpu(), plain(x)[0].detach())
    for weight in plain.parameters():
        if weight.dim() > 1:
            weight.data = rounded(weight.data)
    assert_close(result, plain(rounded(x))[0].detach())
