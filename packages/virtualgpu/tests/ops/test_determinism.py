"""`torch.use_deterministic_algorithms` refuses the same on a virtual GPU as on a real one."""

import pytest
import torch
import torch.nn.functional as F

OF_THE_KERNEL = (
    "{} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms"
)


@pytest.fixture(autouse=True)
def used(machine):
    yield machine
    torch.use_deterministic_algorithms(False)
    torch._C._cuda_clearCublasWorkspaces()


def backward(y: torch.Tensor) -> None:
    y.sum().backward()


def image() -> torch.Tensor:
    return torch.ones(1, 2, 4, 4, device="cuda", requires_grad=True)


INDEX = [0, 0]
REFUSED = {
    "adaptive_avg_pool2d_backward_cuda": lambda: backward(F.adaptive_avg_pool2d(image(), 2)),
    "reflection_pad2d_backward_cuda": lambda: backward(
        F.pad(image(), (1, 1, 1, 1), mode="reflect")
    ),
    "upsample_bicubic2d_backward_out_cuda": lambda: backward(
        torch._C._nn.upsample_bicubic2d(image(), (8, 8), False)
    ),
    "grid_sampler_2d_backward_cuda": lambda: backward(
        F.grid_sample(image(), torch.zeros(1, 2, 2, 2, device="cuda"), align_corners=False)
    ),
    "nll_loss2d_forward_out_cuda_template": lambda: F.nll_loss(
        image(), torch.zeros(1, 4, 4, dtype=torch.long, device="cuda")
    ),
    "cumsum_cuda_kernel": lambda: image().cumsum(0),
    "_histc_cuda": lambda: torch.histc(image().detach(), 4),
    "_bincount_cuda": lambda: torch.tensor(INDEX, device="cuda").bincount(
        torch.ones(2, device="cuda")
    ),
    "median CUDA with indices output": lambda: image().median(0),
    "put_": lambda: (
        image()
        .detach()
        .put_(torch.tensor(INDEX, device="cuda"), torch.ones(2, device="cuda"), accumulate=True)
    ),
    "scatter_reduce_cuda_prod_": lambda: torch.ones(2, device="cuda").scatter_reduce(
        0, torch.tensor(INDEX, device="cuda"), torch.ones(2, device="cuda"), "prod"
    ),
}


@pytest.mark.parametrize("kernel", REFUSED)
def test_what_has_no_fixed_order_is_refused_where_the_program_asks_for_one(kernel):
    REFUSED[kernel]()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match=OF_THE_KERNEL.format(kernel)):
        REFUSED[kernel]()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=OF_THE_KERNEL.format(kernel)):
        REFUSED[kernel]()


def test_other_calls_of_such_operators_go_on():
    torch.use_deterministic_algorithms(True)
    x, index = torch.arange(4, device="cuda"), torch.tensor(INDEX, device="cuda")
    assert x.cumsum(0).tolist() == [0, 1, 3, 6]
    assert x.median().item() == 1
    assert index.bincount().tolist() == [2]
    assert torch.ones(2, device="cuda").scatter_reduce(
        0, index, torch.ones(2, device="cuda"), "sum"
    ).tolist() == [3, 1]


def test_products_want_workspaces_of_a_fixed_size(monkeypatch):
    x = torch.ones(2, 2, device="cuda")
    torch.use_deterministic_algorithms(True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="not deterministic because it uses CuBLAS"):
        x @ x
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert (x @ x).tolist() == [[2, 2], [2, 2]]
