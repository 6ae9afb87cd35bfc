"""Private pools of memory without a graph."""

import gc
from contextlib import nullcontext

import pytest
import torch

pytestmark = pytest.mark.usefixtures("graphed")


def test_a_pool_takes_what_is_asked_for_in_the_block() -> None:
    pool = torch.cuda.MemPool()
    outside = torch.ones(3, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = torch.ones(3, device="cuda")
    assert pool.use_count() == 1
    (segment,) = pool.snapshot()
    assert (
        segment["segment_pool_id"] == pool.id
        and segment["address"] == inside.data_ptr() != outside.data_ptr()
    )
    assert [x["segment_pool_id"] for x in torch.cuda.memory_snapshot()] == [(0, 0), pool.id]


def test_its_memory_goes_back_when_it_is_gone() -> None:
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.ones(3, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + (2 << 20)  # the pool keeps it
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() == before


def test_what_it_cannot_do_it_refuses() -> None:
    with pytest.raises(NotImplementedError, match="MemPool with an allocator"):
        torch.cuda.MemPool(object())


def test_segments_of_a_pool_that_splits_nothing_are_blocks() -> None:
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.ones(3, device="cuda") for _ in range(2)]
    assert [len(segment["blocks"]) for segment in pool.snapshot()] == [1, 1] and len(tensors) == 2


@pytest.mark.parametrize("serves", [False, True])
def test_a_pool_may_serve_where_memory_runs_out(serves: bool) -> None:
    pool = torch.cuda.MemPool(use_on_oom=serves)
    with torch.cuda.use_mem_pool(pool):
        torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction((60 << 20) / torch.cuda.mem_get_info()[1])
    with nullcontext() if serves else pytest.raises(torch.OutOfMemoryError):
        kept = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        assert pool.snapshot()[0]["address"] == kept.data_ptr()
