"""Machines for the tests of the virtual GPU, which each test must leave without memory in use."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

import virtualgpu
from virtualgpu import VirtualGPUs, hardware
from virtualgpu.allocator import Block

COUNT = 4


def put_in_place() -> VirtualGPUs:
    """Use four virtual H200s, and keep them if they are in use already."""
    used = virtualgpu.use(gpus=COUNT, like="H200")
    torch.cuda.init()
    return used


def left_over() -> list[int]:
    """Return the bytes that are still allocated on each GPU.

    The memory that CUDA's libraries keep does not count. If there are any, garbage is collected
    first.
    """

    def held(index: int) -> int:
        blocks = hardware.machine().gpus[index].libraries.values()
        return torch.cuda.memory_allocated(index) - sum(
            block.size for block in blocks if isinstance(block, Block)
        )

    found = [held(index) for index in range(COUNT)]
    if any(found):
        sys.last_exc = sys.last_value = sys.last_traceback = (
            None  # pytest keeps a failed test's frames here
        )
        gc.collect()
        found = [held(index) for index in range(COUNT)]
    return found


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[None]:
    """Use four virtual H200s for all tests of a file. Making them takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as environment:
        # cuBLAS keeps a workspace from the first matrix product on, but each test counts bytes from
        # 0
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        environment.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
        put_in_place()
        yield
        virtualgpu.use(None)


@pytest.fixture
def machine(shared_machine: None) -> Iterator[VirtualGPUs]:
    """Use four virtual H200s with empty memory, device 0 and default streams.

    A test that leaves tensors fails.
    """
    used = put_in_place()
    if any(left_over()):  # by a test that failed and reported it
        virtualgpu.use(None)
        used = put_in_place()
    torch.cuda.empty_cache()
    for index in range(COUNT):
        torch.cuda.set_stream(torch.cuda.default_stream(index))
        torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.set_device(0)
    yield used
    assert left_over() == [0] * COUNT


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn TF32 off, for tests that compare values with the CPU. It is on in cuDNN by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
