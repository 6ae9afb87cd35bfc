"""Errors of operators have the words of an H100, although C++ would word them for the CPU."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.usefixtures("machine")


def words(function, kind=RuntimeError):
    with pytest.raises(kind) as refused:
        function()
    assert type(refused.value) is kind
    return str(refused.value)


SHOULD = (
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"
)
MKLDNN = " or input should be a MKLDNN tensor and weight is a dense tensor"


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
def test_a_batch_on_the_cpu_and_a_convolution_on_a_gpu(layer):
    x = torch.randn(16, 3, *[8] * (3 if layer is nn.Conv3d else 2))
    assert words(lambda: layer(3, 4, 3).cuda()(x)) == SHOULD + MKLDNN
    if layer is nn.Conv2d:  # the image is so small that the CPU does not use oneDNN
        assert "(when checking argument in method wrapper_CUDA___slow_conv2d_forward)" in words(
            lambda: layer(3, 4, 3).cuda()(x[:1])
        )


def test_targets_of_the_wrong_type():
    scores = torch.randn(2, 3, device="cuda")
    for dtype, name in ((torch.int32, "Int"), (torch.float32, "Float")):
        target = torch.ones(2, device="cuda", dtype=dtype)
        kernel = "nll_loss_forward_reduce_cuda_kernel_2d_index"
        assert (
            words(partial(F.cross_entropy, scores, target), NotImplementedError)
            == f"\"{kernel}\" not implemented for '{name}'"
        )
    assert F.cross_entropy(scores, torch.ones(2, device="cuda", dtype=torch.uint8)).isfinite()


def test_types_of_gpu_tensors():
    assert "but got torch.cuda.FloatTensor instead" in words(
        lambda: nn.Embedding(3, 4).cuda()(torch.ones(2, device="cuda"))
    )
    x = torch.ones(2, device="cuda", requires_grad=True)
    y = x.exp()
    y.add_(1)
    assert "inplace operation: [torch.cuda.FloatTensor [2]]" in words(lambda: y.sum().backward())
    z = torch.ones(2, requires_grad=True)
    y = z.exp()
    y.add_(1)
    assert "inplace operation: [torch.FloatTensor [2]]" in words(lambda: y.sum().backward())


def test_a_product_of_float8():
    x = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn)
    assert (
        words(lambda: x @ x, NotImplementedError)
        == "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'"
    )


def test_cosine_similarity_of_two_devices():
    x, y = torch.ones(2, 5, device="cuda"), torch.ones(2, 5)
    assert words(lambda: F.cosine_similarity(x, y)) == (
        "Expected all tensors to be on the same device, but got min is on cuda:0, different from "
        "other tensors on cpu "
        "(when checking argument in method wrapper_CUDA_clamp_min__Tensor)"
    )
    assert "got min is on cpu, different from other tensors on cuda:0" in words(
        lambda: F.cosine_similarity(y, x)
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_state_on_the_cpu(kind):
    state = torch.zeros(1, 1, 4)
    x = torch.randn(2, 1, 4, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2]))
    for inputs in (x, packed):
        said = words(
            partial(kind(4, 4).cuda(), inputs, (state, state) if kind is nn.LSTM else state)
        )
        assert (
            said
            == "Input and hidden tensors are not at the same device, found input tensor at cuda:0 "
            "and hidden tensor at cpu"
        )


def test_weights_of_a_recurrent_layer_that_are_scattered():
    x, layer = torch.randn(2, 1, 4, device="cuda"), nn.LSTM(4, 4, 2).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        # the layer notices the error when it collects its weights
        layer.weight_hh_l1 = nn.Parameter(layer.weight_hh_l1.detach().clone())
        layer(x)
    with pytest.warns(
        UserWarning, match="^RNN module weights are not part of single contiguous chunk of memory"
    ):
        copy.deepcopy(layer)(x)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]
)
def test_cuda_stores_formats_and_computes_with_few_of_them(dtype):
    """Check products that only the CPU can compute."""
    x, name = (
        torch.ones(2, device="cuda").to(dtype),
        str(dtype).removeprefix("torch.").replace("ui", "UI").replace("fl", "Fl"),
    )
    for kernel, work in {
        "mul_cuda": lambda: x * x,
        "ufunc_add_CUDA": lambda: x + x,
        "abs_cuda": x.abs,
    }.items():
        assert words(work, NotImplementedError) == f"\"{kernel}\" not implemented for '{name}'"
    assert (x == x).all() and x.float().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("kernel", "work"),
    [
        ("avg_pool2d_out_cuda_frame", lambda x: F.avg_pool2d(x, 2)),
        ("avg_pool2d_out_cuda_frame", lambda x: F.avg_pool1d(x[0], 2)),
        ("avg_pool3d_out_cuda", lambda x: F.avg_pool3d(x, 2)),
        ("max_pool2d_with_indices_out_cuda_frame", lambda x: F.max_pool2d(x, 2)),
        ("max_pool3d_with_indices_out_frame", lambda x: F.max_pool3d(x, 2)),
        ("GeluCUDAKernelImpl", F.gelu),
        ("addmm_cuda", lambda x: x[0, 0] @ x[0, 0]),
    ],
)
def test_cuda_has_no_kernel_of_integers(kernel, work):
    """Check pooling of integers, which only the CPU can compute."""
    x = torch.ones(1, 2, 4, 4, dtype=torch.int64, device="cuda")
    assert (
        words(partial(work, x), NotImplementedError) == f"\"{kernel}\" not implemented for 'Long'"
    )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_cuda_resamples_no_bytes(mode, antialias):
    x = torch.ones(1, 3, 4, 4, dtype=torch.uint8, device="cuda")
    said = words(
        lambda: F.interpolate(x, scale_factor=2, mode=mode, antialias=antialias),
        NotImplementedError,
    )
    assert said == f"\"upsample_{mode}2d_out_frame\" not implemented for 'Byte'"
    assert F.interpolate(x, scale_factor=2, mode="nearest").sum() == 192


@pytest.mark.parametrize(
    ("kernel", "dtype", "work"),
    [
        ("addmm_cuda", torch.complex32, lambda x: x @ x),
        ("baddbmm_cuda", torch.complex32, lambda x: torch.bmm(x[None], x[None])),
        ("max_all_cuda", torch.complex64, torch.max),
        ("cdist_cuda", torch.float16, lambda x: torch.cdist(x, x)),
        ("lu_factor_cusolver", torch.float16, torch.det),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_an_error_names_cudas_kernel(kernel, dtype, work):
    names = {torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat", torch.float16: "Half"}
    x = torch.ones(2, 2, dtype=dtype, device="cuda")
    assert (
        words(partial(work, x), NotImplementedError)
        == f"\"{kernel}\" not implemented for '{names[dtype]}'"
    )
