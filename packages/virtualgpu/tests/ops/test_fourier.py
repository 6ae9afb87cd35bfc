"""Fourier transforms in half precision, which the CPU lacks: sizes, dtypes and memory of cuFFT."""

import gc
import re

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
NARROW = {torch.float32: torch.float16, torch.complex64: torch.complex32}

OF_REAL = {
    **{
        name: lambda x, name=name: getattr(torch.fft, name)(x)
        for name in ("fft", "ifft", "rfft", "ihfft", "fft2", "ifftn", "rfft2", "ihfftn")
    },
    "rfft, longer": lambda x: torch.fft.rfft(x, 16, 0, "ortho"),
    "fft, shorter": lambda x: torch.fft.fft(x, n=4, dim=0, norm="forward"),
    "rfftn, one dimension": lambda x: torch.fft.rfftn(x, s=(4,), dim=(0,)),
    "ihfft2, forward": lambda x: torch.fft.ihfft2(x, norm="forward"),
    "stft": lambda x: torch.stft(
        x,
        8,
        hop_length=4,
        return_complex=True,
        window=torch.ones(8, device=x.device, dtype=x.dtype),
        center=False,
    ),
}
OF_COMPLEX = {
    "fft": torch.fft.fft,
    "ifft2": torch.fft.ifft2,
    "irfft": lambda x: torch.fft.irfft(x, 8),
    "hfft": lambda x: torch.fft.hfft(x, 16),
    "irfftn": lambda x: torch.fft.irfftn(x, (4, 8)),
}


@pytest.fixture(autouse=True)
def used(shared_machine):
    return shared_machine


def real() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()


@pytest.mark.parametrize("name", OF_REAL)
def test_real_halves_become_complex_halves(name):
    x = real()
    expected = OF_REAL[name](x.float())
    found = OF_REAL[name](x.cuda())
    assert found.is_cuda and found.dtype is torch.complex32
    assert_close(found.cpu().to(expected.dtype), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", OF_COMPLEX)
def test_complex_halves_are_transformed(name):
    x = torch.complex(real().float(), real().float().T).to(torch.complex32)
    expected = OF_COMPLEX[name](x.to(torch.complex64))
    found = OF_COMPLEX[name](x.cuda())
    assert found.dtype is NARROW[expected.dtype]
    assert_close(found.cpu().to(expected.dtype), expected, rtol=4e-3, atol=1e-2)


def test_an_output_that_was_given():
    x = real().cuda()
    for function in (torch.fft.rfft, torch.fft.ihfft, torch.fft.ihfft2):
        out = torch.empty(0, dtype=torch.complex32, device="cuda")
        assert function(x, out=out) is out
        assert torch.equal(torch.view_as_real(out), torch.view_as_real(function(x).resolve_conj()))


def test_gradients_of_half_precision():
    x, wide = real().cuda().requires_grad_(), real().float().requires_grad_()
    for given in (x, wide):
        torch.view_as_real(torch.fft.rfft(given)).float().square().sum().backward()
    assert x.grad.dtype is torch.float16
    assert_close(x.grad.cpu().float(), wide.grad, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: torch.fft.rfft(x), "[7]"),
        (lambda x: torch.fft.fft2(x), "[4, 7]"),
        (lambda x: torch.fft.rfft2(x.T), "[7]"),
        (lambda x: torch.fft.irfft(x, 6), "[6]"),
    ],
)
def test_cufft_takes_powers_of_two_alone(function, sizes):
    x = torch.ones(4, 7, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError) as raised:
        function(x)
    assert str(raised.value) == (
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
        f"precision, but got a signal size of{sizes}"
    )


def test_neither_has_transforms_of_bfloat16():
    with pytest.raises(RuntimeError, match="^Unsupported dtype BFloat16$"):
        torch.fft.rfft(torch.ones(8, dtype=torch.bfloat16, device="cuda"))


def test_half_precision_on_the_cpu_is_refused_as_ever():
    with pytest.raises(RuntimeError, match="^Unsupported dtype Half$"):
        torch.fft.rfft(torch.ones(8, dtype=torch.float16))


def test_what_is_wrong_is_said_in_pytorchs_words():
    x = real().cuda()
    for wrong, message in (
        (lambda: torch.fft.rfft(x, norm="both"), 'Invalid normalization mode: "both"'),
        (lambda: torch.fft.rfft(x, 0), "Invalid number of data points (0) specified"),
        (lambda: torch.fft.rfftn(x, dim=(0, 0)), "FFT dims must be unique"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            wrong()


@pytest.mark.parametrize(
    ("function", "blocks"),
    [
        (lambda x: torch.fft.rfft(x), [513]),  # one block of the same number of complex numbers
        # half precision must be contiguous, so its parts are copied
        (
            lambda x: torch.fft.rfft(x, dim=0),
            [513, 512],
        ),
        (lambda x: torch.fft.fft2(x), [1024, 1024]),  # the input is made complex first
    ],
)
def test_memory_of_the_gpu_at_the_peak(function, blocks):
    gc.collect()  # memory that the errors of earlier tests hold
    x = torch.ones(1024, 1024, dtype=torch.float16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(x)
    expected = sum(-(-n * 4 * 1024 // 512) * 512 for n in blocks)
    assert torch.cuda.max_memory_allocated() - before == expected
