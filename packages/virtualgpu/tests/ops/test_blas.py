"""Workspaces of cuBLAS and cuBLASLt, which exist once per handle and stream, as on an H200."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import virtualgpu
from virtualgpu.ops.blas import copied_bytes, workspace_bytes, workspace_lt_bytes

from .asked import asked, recorded

CUBLAS, CUBLAS_LT = "+33554432", "+1048576"


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def test_a_product_asks_after_its_output_and_once():
    assert asked(lambda: matrix(512, 300) @ matrix(300, 200))[2:] == ["+409600", CUBLAS]
    with virtualgpu.use(gpus=1, like="H200"):
        x = matrix(8, 8)
        first, second = x @ x, recorded(lambda: x @ x)[1]
        assert second == ["+256"]
        del first


@pytest.mark.parametrize(
    ("out", "beta", "expected"),
    [
        (32, 1, ["+16384", CUBLAS, CUBLAS_LT]),
        (32, 0.5, ["+16384", CUBLAS]),
        (1, 1, ["+512", CUBLAS]),
    ],
)
def test_only_a_bias_of_one_dimension_goes_to_cublaslt(out, beta, expected):
    got = asked(
        lambda given: torch.addmm(*given, beta=beta),
        setup=lambda: (matrix(out), matrix(128, 64), matrix(64, out)),
    )
    assert got == expected


def test_backward_has_a_handle_of_its_own():
    assert asked(
        lambda x: x[0] @ x[1], setup=lambda: (matrix(4, 5), matrix(5, 6)), backward=True
    ) == ["+120", CUBLAS, "+80"]


def test_a_factor_with_gaps_is_copied():
    got = asked(lambda x: x[0][:, ::2] @ x[1], setup=lambda: (matrix(300, 400), matrix(200, 100)))
    assert got == ["+120000", "+240000", CUBLAS, "-240000"]


def test_threads_and_streams():
    """Check that each stream has a workspace, which stays with a returned handle."""
    with virtualgpu.use(gpus=1, like="H200"):
        x = torch.randn(4, 4, device="cuda")

        def product() -> list[str]:
            return recorded(lambda: x @ x)[1]

        assert CUBLAS in product()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert CUBLAS in product()
        found: list[list[str]] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(product()))
            thread.start()
            thread.join()
        assert [CUBLAS in sizes for sizes in found] == [True, False]


def test_other_architectures_and_settings():
    assert asked(lambda x: x @ x, setup=lambda: torch.ones(4, 4, device="cuda"), like="T4") == [
        "+64",
        "+8519680",
    ]
    assert workspace_bytes(9, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}) == 8519680
    assert workspace_bytes(9, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == 0
    assert workspace_lt_bytes({"CUBLASLT_WORKSPACE_SIZE": "512"}) == 524288
    with pytest.warns(UserWarning, match="Could not parse CUBLAS_WORKSPACE_CONFIG"):
        assert workspace_bytes(7, {"CUBLAS_WORKSPACE_CONFIG": "much"}) == 8519680


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_dense_matrix_and_its_transpose_are_not_copied(rows, columns):
    x = torch.empty(rows, columns)
    assert copied_bytes(x) == copied_bytes(x.t()) == 0


def test_the_bias_of_a_layer_whose_input_has_gaps_is_added_in_place():
    def setup() -> tuple:
        return torch.nn.Linear(6, 8).cuda(), torch.randn(4, 5, 6, device="cuda").transpose(0, 1)

    got = asked(lambda given: given[0](given[1]), setup=setup)
    assert got.count("+640") == 1  # the output has 5 x 4 x 8 float32 numbers
    x, layer = torch.randn(5, 4, 6).transpose(0, 1), torch.nn.Linear(6, 8)
    expected = layer(x).detach()
    with virtualgpu.use(gpus=1, like="H200"):
        layer = layer.cuda()
        y = layer(x.cuda())
        y.sum().backward()
        torch.testing.assert_close(y.detach().cpu(), expected)
        torch.testing.assert_close(layer.bias.grad.cpu(), torch.full((8,), 20.0))


# Products of 8-bit matrices


def bytes_(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int8, device="cuda")


def float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.ones(*shape, device="cuda").to(dtype)


def scaled(left: torch.Tensor, right: torch.Tensor, **options: object) -> torch.Tensor:
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(left, right, scale_a=one, scale_b=one, **options)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((16, 8), (8, 8), r"self.size\(0\) needs to be greater than 16, but got 16"),
        (
            (17, 12),
            (12, 8),
            r"self.size\(1\) needs to be greater than 0 and a multiple of 8, but got 12",
        ),
        (
            (17, 8),
            (8, 9),
            r"mat2.size\(1\) needs to be greater than 0 and a multiple of 8, but got 9",
        ),
    ],
)
def test_cublaslt_multiplies_no_small_or_odd_matrices_of_int8(left, right, message):
    with virtualgpu.use(gpus=1, like="T4"):
        with pytest.raises(RuntimeError, match=message):
            torch._int_mm(bytes_(*left), bytes_(*right))
        assert torch._int_mm(bytes_(17, 8), bytes_(8, 16)).eq(8).all()


def test_a_gpu_without_float8_multiplies_none():
    with (
        virtualgpu.use(gpus=1, like="A100"),
        pytest.raises(RuntimeError, match="compute capability >= 9.0 or 8.9"),
    ):
        scaled(float8(16, 16), float8(16, 16).t())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: scaled(float8(16, 8), float8(16, 8).t()),
            r"divisible by 16 but got mat1 shape: \(16x8\)",
        ),
        (
            lambda: scaled(float8(16, 16), float8(8, 16).t()),
            r"mat2 shape \(16x8\) must be divisible by 16",
        ),
        (
            lambda: scaled(float8(16, 16), float8(16, 16)),
            "Only multiplication of row-major and column-major",
        ),
        (
            lambda: scaled(*(float8(16, 16, dtype=torch.float8_e5m2).t() for _ in range(2))),
            "Multiplication of two Float8_e5m2 matrices is not supported",
        ),
        (
            lambda: scaled(
                float8(16, 16),
                float8(16, 16).t(),
                bias=torch.ones(16, device="cuda"),
                out_dtype=torch.half,
            ),
            "Bias must be BFloat16 or Half, but got Float",
        ),
    ],
)
def test_cublaslt_multiplies_float8_in_one_form(make, message):
    with virtualgpu.use(gpus=1, like="H200"):
        with pytest.raises(RuntimeError, match=message):
            make()
        assert scaled(float8(16, 32), float8(48, 32).t(), out_dtype=torch.bfloat16).eq(32).all()
