"""Workspaces of cuBLAS and cuBLASLt: by handle and stream, never by size. Sizes in bytes; sequences recorded on an H200."""

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
    [(32, 1, ["+16384", CUBLAS, CUBLAS_LT]), (32, 0.5, ["+16384", CUBLAS]), (1, 1, ["+512", CUBLAS])],
)
def test_only_a_bias_of_one_dimension_goes_to_cublaslt(out, beta, expected):
    got = asked(lambda given: torch.addmm(*given, beta=beta), setup=lambda: (matrix(out), matrix(128, 64), matrix(64, out)))
    assert got == expected


def test_backward_has_a_handle_of_its_own():
    assert asked(lambda x: x[0] @ x[1], setup=lambda: (matrix(4, 5), matrix(5, 6)), backward=True) == ["+120", CUBLAS, "+80"]


def test_a_factor_with_gaps_is_copied():
    got = asked(lambda x: x[0][:, ::2] @ x[1], setup=lambda: (matrix(300, 400), matrix(200, 100)))
    assert got == ["+120000", "+240000", CUBLAS, "-240000"]


def test_threads_and_streams():
    """Another stream: another workspace. A thread takes the handle that the last one gave back, with its workspaces."""
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
    assert asked(lambda x: x @ x, setup=lambda: torch.ones(4, 4, device="cuda"), like="T4") == ["+64", "+8519680"]
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
    assert got.count("+640") == 1  # the output, of 5 x 4 x 8 float32
    x, layer = torch.randn(5, 4, 6).transpose(0, 1), torch.nn.Linear(6, 8)
    expected = layer(x).detach()
    with virtualgpu.use(gpus=1, like="H200"):
        layer = layer.cuda()
        y = layer(x.cuda())
        y.sum().backward()
        torch.testing.assert_close(y.detach().cpu(), expected)
        torch.testing.assert_close(layer.bias.grad.cpu(), torch.full((8,), 20.0))
