"""Private pools of memory without a graph."""

import gc

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
    assert segment["segment_pool_id"] == pool.id and segment["address"] == inside.data_ptr() != outside.data_ptr()
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
    with pytest.raises(NotImplementedError, match="MemPool with an allocator, use_on_oom or no_split"):
        torch.cuda.MemPool(use_on_oom=True)
