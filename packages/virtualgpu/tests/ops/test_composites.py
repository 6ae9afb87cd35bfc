"""Composite operators create their tensors on the GPU, and agree with the CPU."""

import pytest
import torch

from .recorded import check

NAMES = (
    "bilinear2",
    "bilinear3",
    "quantile2",
    "quantile_many",
    "nanquant",
    "dist",
    "rpow",
    "complex_angle",
    "clamp_both",
    "eigvalsh_64",
    "eigvalsh64_200",
    "svdvals_33",
)


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(f"further/{name}")


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_a_bilinear_layer_agrees_with_the_cpu(machine, rows):
    plain, moved = torch.nn.Bilinear(4, 5, 6), torch.nn.Bilinear(4, 5, 6)
    moved.load_state_dict(plain.state_dict())
    moved.cuda()
    x, y = torch.randn(rows, 2, 4, requires_grad=True), torch.randn(rows, 2, 5, requires_grad=True)
    a, b = (v.detach().cuda().requires_grad_() for v in (x, y))
    expected, got = plain(x, y), moved(a, b)
    torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for mine, theirs in ((a, x), (b, y), (moved.weight, plain.weight), (moved.bias, plain.bias)):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.quantile(0.3, 1),
        lambda x: x.nanquantile(0.3),
        lambda x: x.quantile(
            torch.tensor([0.1, 0.5], device=x.device), -2, keepdim=True, interpolation="midpoint"
        ),
        lambda x: x.nanquantile(
            torch.tensor([0.1, 1.0], device=x.device), 0, interpolation="lower"
        ),
        torch.cov,
        lambda x: torch.cov(x, correction=0),
        torch.corrcoef,
        lambda x: torch.linalg.eigvalsh(x @ x.mT),
        torch.linalg.svdvals,
        lambda x: torch.dist(x, x * 2, 3),
        lambda x: 2**x,
        lambda x: torch.complex(x, -x).angle(),
    ],
)
def test_values_agree_with_the_cpu(work, machine):
    x = torch.randn(7, 9)
    torch.testing.assert_close(work(x.cuda()).cpu(), work(x))


@pytest.mark.parametrize("quantile", [torch.quantile, torch.nanquantile])
def test_a_quantile_does_not_wait_for_the_gpu_to_look_at_its_fractions(quantile, machine):
    x, fractions, slept = (
        torch.rand(2, 9, device="cuda"),
        torch.rand(3, device="cuda"),
        torch.cuda.Event(),
    )
    torch.cuda._sleep(100_000_000)
    slept.record()
    quantile(x, fractions)
    assert not slept.query()


GIVEN = {
    "msort": torch.msort,
    "log_sigmoid": torch._C._nn.log_sigmoid,
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "inverse": torch.inverse,
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "eigvalsh": torch.linalg.eigvalsh,
    "svdvals": torch.linalg.svdvals,
    "lu_factor": torch.linalg.lu_factor,
    "ldl_factor": torch.linalg.ldl_factor,
    "matrix_rank": torch.linalg.matrix_rank,
    "matrix_rank of a tolerance": lambda x, out=None: torch.linalg.matrix_rank(x, 1.5, out=out),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_output_gets_what_cpp_makes_with_room_of_its_own(name, machine):
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    x, function = x @ x.mT + torch.eye(5), GIVEN[name]
    expected = function(x)
    several = isinstance(expected, tuple)
    out = [
        torch.empty(0, dtype=y.dtype, device="cuda") for y in (expected if several else [expected])
    ]
    result = function(x.cuda(), out=tuple(out) if several else out[0])
    for y, given, wanted in zip(
        result if several else [result], out, expected if several else [expected], strict=True
    ):
        assert y is given
        torch.testing.assert_close(given.cpu(), wanted)


def test_a_given_output_on_the_cpu_is_refused_in_cudas_words(machine):
    with pytest.raises(RuntimeError, match="same device|Expected"):
        torch.linalg.inv(torch.eye(3, device="cuda"), out=torch.empty(3, 3))


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_coordinates_of_a_gradient_lie_where_its_values_do(device, machine):
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(
        RuntimeError,
        match=f"torch.gradient expected each tensor .* got devices cuda:0 and {device}!",
    ):
        torch.gradient(x, spacing=(torch.arange(4.0, device=device),), dim=1)
    torch.testing.assert_close(
        torch.gradient(x, spacing=(torch.arange(4.0, device="cuda"),), dim=1)[0].cpu(),
        torch.gradient(x.cpu(), dim=1)[0],
    )
