"""Sparse tensors hold memory through their indices and values."""

import torch


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
    assert allocated() - before == 32 * 64 * 4  # its values; the indices are those of the call
    gradient = embedding.weight.grad
    assert gradient.is_sparse and gradient._values().shape == (32, 64)
    embedding(rows).mean().backward()
    torch.testing.assert_close(embedding.weight.grad.to_dense()[:32].cpu(), torch.full((32, 64), 2 / (32 * 64)))
