"""What the tests of the virtual GPU share: machines that one test leaves to the next without a byte on them."""

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
    """Four virtual H200s; the same again where they are in use."""
    used = virtualgpu.use(gpus=COUNT, like="H200")
    torch.cuda.init()
    return used


def left_over() -> list[int]:
    """Bytes allocated on each GPU beside what CUDA's libraries keep for good, after a collection if there are any."""

    def held(index: int) -> int:
        blocks = hardware.machine().gpus[index].libraries.values()
        return torch.cuda.memory_allocated(index) - sum(
            block.size for block in blocks if isinstance(block, Block)
        )

    found = [held(index) for index in range(COUNT)]
    if any(found):
        sys.last_exc = sys.last_value = sys.last_traceback = (
            None  # pytest keeps the frames of a failed test here
        )
        gc.collect()
        found = [held(index) for index in range(COUNT)]
    return found


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[None]:
    """Four virtual H200s for all tests of a file: putting them in place takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as environment:
        # cuBLAS would keep a workspace from the first matrix product on, and each test counts bytes from 0
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        environment.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
        put_in_place()
        yield
        virtualgpu.use(None)


@pytest.fixture
def machine(shared_machine: None) -> Iterator[VirtualGPUs]:
    """Four virtual H200s with empty memory, device 0 current, the default streams. A test that leaves tensors fails."""
    used = put_in_place()
    if any(left_over()):  # by a test that failed and said so
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
