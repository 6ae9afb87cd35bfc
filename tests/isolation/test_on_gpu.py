"""Isolated runs on a real GPU: what goes wrong there, memory back where it was, and the CUDA context of this process unharmed."""

import pytest
import torch

import labkit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu():
    """A machine with a CUDA context, that has done what the tests do here."""
    with labkit.use(1, virtual=False, quiet=True):
        work()
        yield


def work() -> float:
    return (torch.ones(1000, device="cuda") * 2).sum().item()


def used() -> int:
    """Bytes of the GPU that all processes use."""
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
        return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()

    came = labkit.isolated(train)
    assert came.value == (torch.cuda.get_device_name(), came.trace.peak)
    assert came.trace.badge == labkit.current().badge


def test_out_of_memory():
    def fill():
        kept = []
        while True:
            kept.append(torch.ones(1 << 30, device="cuda"))

    error = failure(fill)
    assert error.kind == "out of memory" and "fill() ran out of memory: it asked for 4.00 GiB, and GPU 0 has" in str(error)
    assert "kept.append(torch.ones" in error.original.traceback
    assert error.trace.error == error.original.text


def test_a_device_side_assert_that_nothing_waited_for():
    def outside():
        return torch.arange(10, device="cuda")[torch.tensor([10], device="cuda")].shape

    error = failure(outside)
    assert error.kind == "device-side assert" and "index out of bounds" in str(error)
    assert "Assertion" in error.output
    assert error.trace is not None or error.why_no_trace


def test_illegal_access():
    def beyond():
        x = torch.ones(64 << 20, device="cuda")
        torch.cuda.caching_allocator_delete(x.data_ptr())  # behind the tensor's back,
        torch.cuda.empty_cache()  # and the driver unmaps it
        return x.add_(1).sum().item()

    error = failure(beyond)
    assert error.kind == "illegal access" and str(error).startswith("beyond() made an illegal access")


def test_an_endless_kernel_queue_is_stopped():
    def forever():
        x = torch.ones(4096, 4096, device="cuda")
        while True:
            x = x @ x

    with pytest.raises(labkit.IsolatedError, match=r"forever\(\) took longer than 0.5 s and was stopped."):
        labkit.isolated(forever, timeout=0.5)


def test_a_tensor_of_a_gpu_is_refused():
    x = torch.ones(3, device="cuda")
    with pytest.raises(labkit.IsolatedError, match="the variable x, which <lambda>.. uses, holds a tensor on cuda:0"):
        labkit.isolated(lambda: x + 1)
