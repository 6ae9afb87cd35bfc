"""Isolated runs on a real GPU: errors, memory afterwards, and this process's CUDA context."""

import pytest
import torch

import labkit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu():
    """A machine with a real GPU, on which each test's kind of work has already run once."""
    with labkit.use(1, virtual=False, quiet=True):
        work()
        yield


def work() -> float:
    return (torch.ones(1000, device="cuda") * 2).sum().item()


def used() -> int:
    """Return the bytes of the GPU that all processes use together."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(autouse=True)
def memory_back_and_context_unharmed(on_gpu, nothing_left):
    before = used()
    yield
    assert used() == before
    assert work() == 2000


def failure(function) -> labkit.IsolatedError:
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(function)
    return caught.value


def test_a_result():
    def train():
        model = torch.nn.Linear(1000, 1000, device="cuda")
        model(torch.ones(1000, 1000, device="cuda")).sum().backward()
        return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() > 0

    assert labkit.isolated(train).value == (torch.cuda.get_device_name(), True)


def test_out_of_memory():
    def fill():
        kept = []
        while True:
            kept.append(torch.ones(1 << 30, device="cuda"))

    error = failure(fill)
    assert str(error).startswith(
        "fill() raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."
    )
    assert "kept.append(torch.ones" in error.__notes__[0]


def test_a_device_side_assert_that_nothing_waited_for():
    def outside():
        return torch.arange(10, device="cuda")[torch.tensor([10], device="cuda")].shape

    error = failure(outside)
    assert "device-side assert triggered" in str(error) and "Assertion" in error.output


def test_illegal_access():
    def beyond():
        x = torch.kept = torch.ones(64 << 20, device="cuda")  # nobody frees it a second time
        torch.cuda.caching_allocator_delete(x.data_ptr())  # behind the tensor's back,
        torch.cuda.empty_cache()  # and the driver unmaps it
        return x.add_(1).sum().item()

    assert "an illegal memory access was encountered" in str(failure(beyond))


def test_an_endless_kernel_queue_is_stopped():
    def forever():
        x = torch.ones(4096, 4096, device="cuda")
        while True:
            x = x @ x

    with pytest.raises(
        labkit.IsolatedError, match=r"forever\(\) took longer than 10 s and was stopped."
    ):
        labkit.isolated(forever, timeout=10)


def test_a_tensor_of_a_gpu_is_copied():
    x = torch.ones(3, device="cuda")
    assert labkit.isolated(lambda: x + 1).value.tolist() == [2, 2, 2]
