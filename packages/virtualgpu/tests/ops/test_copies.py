"""Copies between host and GPU allocate the same temporaries as on CUDA, also if sparse."""

import pytest
import torch

from .recorded import check

NAMES = (
    "h2d",
    "h2d_half",
    "d2h_half",
    "h2d_t",
    "d2h_t",
    "d2h_slice",
    "copy_h2d_strided",
    "copy_",
    "copy_dtype",
    "tolist",
    "ctc",
)


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(f"more/{name}")


def test_values_survive_types_and_layouts(machine):
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(x.t().to("cuda", torch.float16).cpu(), x.t().half())
    assert torch.equal(x.cuda()[:, ::2].to("cpu", torch.int32), x[:, ::2].int())


def allocated() -> int:
    return torch.cuda.memory_allocated()


def test_a_copy_of_a_sparse_tensor_has_indices_and_values_of_its_own(machine):
    indices, values = torch.tensor([[0, 2]], device="cuda"), torch.ones(2, 3, device="cuda")
    whole = torch.sparse_coo_tensor(indices, values, (4, 3), check_invariants=False)
    before = allocated()
    copy = whole.clone()
    assert allocated() - before == 2 * 512
    del copy
    assert allocated() == before


def test_a_sparse_gradient_is_kept_as_it_is(machine):
    embedding = torch.nn.Embedding(1000, 64, sparse=True, device="cuda")
    rows = torch.arange(32, device="cuda")
    before = allocated()
    embedding(rows).mean().backward()
    # The values only, because the indices belong to the caller.
    assert allocated() - before == 32 * 64 * 4
    gradient = embedding.weight.grad
    assert gradient.is_sparse and gradient._values().shape == (32, 64)
    embedding(rows).mean().backward()
    torch.testing.assert_close(
        embedding.weight.grad.to_dense()[:32].cpu(), torch.full((32, 64), 2 / (32 * 64))
    )


@pytest.mark.parametrize(
    ("size", "strides"),
    [((1, 3), (7, 1)), ((2, 1, 3), (3, 9, 1)), ((3, 1), (1, 5)), ((2, 3), (1, 2))],
)
def test_a_dense_tensor_lies_on_the_gpu_as_on_the_host(size, strides, machine):
    x = torch.empty_strided(size, strides)
    assert x.cuda().stride() == x.cuda().cpu().stride() == x.clone().stride() == strides
