"""Composed operators allocate the same memory whether autograd runs their parts or not."""

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def used(shared_machine):
    return shared_machine


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


WORK = {
    "to": lambda: ones(64, 32).to(torch.float64),
    "to without waiting": lambda: ones(64, 32).to("cpu", torch.float64, non_blocking=True),
    "reshape": lambda: ones(64, 32).t().reshape(-1),
    "chunk": lambda: ones(64, 32).chunk(4),
    "layer_norm": lambda: F.layer_norm(ones(64, 32), (32,)),
    "linear": lambda: F.linear(ones(64, 32), ones(8, 32), ones(8)),
    "cross_entropy": lambda: F.cross_entropy(
        ones(64, 32), torch.zeros(64, dtype=torch.long, device="cuda")
    ),
    "attention": lambda: F.scaled_dot_product_attention(*[ones(1, 2, 16, 8)] * 3, is_causal=True),
    "masked attention": lambda: F.scaled_dot_product_attention(
        *[ones(1, 2, 16, 8)] * 3, attn_mask=ones(16, 16) > 0
    ),
    "quantile": lambda: ones(64, 32).quantile(0.3, 1),
    "combinations": lambda: torch.combinations(ones(8)),
    "masked variance": lambda: torch.masked.var(ones(8, 8), 1, unbiased=True),
    "lstm": lambda: torch.nn.LSTM(4, 8, device="cuda")(ones(3, 2, 4))[0],
    "einsum": lambda: torch.einsum("ij,kj->ik", ones(64, 32), ones(16, 32)),
}


def memory(work) -> tuple[int, int]:
    """Call `work` and return (bytes that its results hold, peak bytes)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = work()
    held = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    del results
    torch.cuda.synchronize()  # asynchronous copies arrive
    return held


@pytest.mark.parametrize("name", WORK)
def test_inference_tensors_ask_for_the_memory_of_others(name):
    with torch.no_grad():
        memory(WORK[name])  # libraries allocate their workspaces
        expected = memory(WORK[name])
    with torch.inference_mode():
        got = memory(WORK[name])
    assert got == expected


def test_values_of_inference_tensors():
    x, target = torch.randn(6, 5), torch.randint(5, (6,))
    with torch.inference_mode():
        got = F.cross_entropy(F.layer_norm(x.cuda(), (5,)).reshape(6, 5), target.cuda())
        torch.testing.assert_close(got.cpu(), F.cross_entropy(F.layer_norm(x, (5,)), target))


def test_what_comes_without_waiting_arrives_after_inference_mode():
    with torch.inference_mode():
        there = ones(4).to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert there.tolist() == [1, 1, 1, 1]
