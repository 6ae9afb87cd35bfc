"""Embeddings and embedding bags, with dense and sparse gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture(autouse=True)
def used(machine):
    return machine


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_bag_without_its_padding(mode, sparse):
    found = []
    for device in ("cpu", "cuda"):
        rows = torch.arange(12.0).view(6, 2).to(device).requires_grad_()
        indices, starts = (
            torch.tensor([1, 2, 4, 5, 1, 1], device=device),
            torch.tensor([0, 3], device=device),
        )
        bags = F.embedding_bag(indices, rows, starts, mode=mode, sparse=sparse, padding_idx=1)
        bags.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
        found.append((bags.tolist(), rows.grad.cpu().to_dense().tolist()))
    assert found[0] == found[1]


def test_a_sparse_gradient_of_many_rows_is_computed():
    """Check a gradient of so many rows that PyTorch checks the sizes before the values."""
    bag = nn.EmbeddingBag(5000, 8, mode="sum", sparse=True, device="cuda")
    indices = torch.arange(2000, device="cuda")
    bag(indices, torch.zeros(1, dtype=torch.int64, device="cuda")).sum().backward()
    assert bag.weight.grad._values().sum().item() == 2000 * 8


def test_sparse_gradients_in_half_precision_add_up():
    embedding = nn.Embedding(10, 3, sparse=True, device="cuda", dtype=torch.float16)
    for _ in range(2):
        embedding(torch.tensor([7, 1], device="cuda")).sum().backward()
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0, 6, 0, 0, 0, 0, 0, 6, 0, 0]


def test_a_sparse_leaf_goes_through_a_backward_on_several_streams():
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.eye(3, device="cuda").to_sparse().requires_grad_()
        F.linear(torch.ones(2, 3, device="cuda"), weight).sum().backward()
    torch.cuda.synchronize()
    assert weight.grad.tolist() == [[2, 2, 2]] * 3
