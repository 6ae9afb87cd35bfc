"""Answers and errors of torch.cuda and torch.accelerator on a virtual machine."""

import ctypes
import importlib
import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu import errors, hardware


@pytest.fixture
def used(machine):
    return machine


def fresh():
    """A machine that nothing has initialised."""
    return virtualgpu.use(gpus=2, like="H200")


@pytest.mark.parametrize(
    "touch",
    [
        lambda: torch.ones(1000, device="cuda"),
        lambda: torch.ones(1000).cuda(),
        lambda: torch.ones(1000).to("cuda"),
        lambda: torch.tensor([0.0] * 1000, device="cuda"),
        lambda: nn.Linear(1000, 1, bias=False).cuda(),
    ],
)
@pytest.mark.parametrize("time", ["first machine", "second machine"])
def test_what_touches_a_gpu_initialises_it(touch, time):
    with fresh():
        assert not torch.cuda.is_initialized()
        assert torch.cuda.memory_allocated() == 0
        kept = touch()
        assert torch.cuda.is_initialized() and torch.cuda.memory_allocated() == 4096
        del kept


def test_a_saved_file_opens_without_the_machine(tmp_path):
    with fresh():
        torch.save(nn.Linear(2, 2).cuda(1).state_dict(), tmp_path / "layer.pt")
    assert type(torch.load(tmp_path / "layer.pt", map_location="cpu")["weight"]) is torch.Tensor


def test_a_type_that_foreach_optimizers_learn_stays_when_the_machine_goes():
    optimizers, added = importlib.import_module("torch.optim.optimizer"), type("Added", (), {})
    with fresh():
        optimizers._foreach_supported_types.append(added)
    assert optimizers._foreach_supported_types.pop() is added


# Devices


def test_devices(used):
    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 4 and cuda.current_device() == 0
    assert [cuda.get_device_name(k) for k in (None, 0, "cuda:3", torch.device("cuda", 1))] == [
        "NVIDIA H200"
    ] * 4
    assert cuda.get_device_capability() == (9, 0)
    properties = cuda.get_device_properties("cuda:1")
    assert (
        properties.name,
        properties.major,
        properties.minor,
        properties.multi_processor_count,
    ) == ("NVIDIA H200", 9, 0, 132)
    assert properties.total_memory == cuda.mem_get_info(1)[1] == 150_109_880_320
    assert (
        isinstance(properties.uuid, uuid.UUID)
        and properties.uuid != cuda.get_device_properties(0).uuid
    )
    assert repr(properties).startswith(
        "_CudaDeviceProperties(name='NVIDIA H200', major=9, minor=0, total_memory=143155MB, "
    )
    assert cuda.is_bf16_supported() and cuda.can_device_access_peer(0, 1)
    assert (
        torch.version.cuda
        and torch.backends.cuda.is_built()
        and torch.backends.cudnn.is_available()
    )
    assert not cuda.is_current_stream_capturing()


def test_the_current_device_in_its_three_ways(used):
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
        with torch.cuda.device("cuda:1"), torch.cuda.device(-1), torch.cuda.device(None):
            assert torch.cuda.current_device() == 1
        with torch.cuda.device_of(torch.ones(1, device="cuda:3")):
            assert torch.cuda.current_device() == 3
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == 3
    torch.cuda.set_device(-1)
    assert torch.cuda.current_device() == 3


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            lambda: torch.cuda.set_device(9),
            errors.AcceleratorError,
            "CUDA error: invalid device ordinal",
        ),
        (lambda: torch.cuda.set_device("cpu"), ValueError, "Expected a cuda device, but got: cpu"),
        (
            lambda: torch.cuda.synchronize(9),
            errors.AcceleratorError,
            "CUDA error: invalid device ordinal",
        ),
        (
            lambda: torch.cuda.device(9).__enter__(),
            errors.AcceleratorError,
            "CUDA error: invalid device ordinal",
        ),
        (
            lambda: torch.cuda.mem_get_info(9),
            errors.AcceleratorError,
            "CUDA error: invalid device ordinal",
        ),
        (lambda: torch.cuda.get_device_properties(9), AssertionError, "Invalid device id"),
        (lambda: torch.cuda.can_device_access_peer(0, 9), AssertionError, "Invalid peer device id"),
        (
            lambda: torch.cuda.memory_allocated(9),
            RuntimeError,
            "Invalid device argument 9: did you call init?",
        ),
        (
            lambda: torch.cuda.memory_stats(9),
            RuntimeError,
            "Invalid device argument 9: did you call init?",
        ),
        (
            lambda: torch.cuda.reset_peak_memory_stats(9),
            RuntimeError,
            "Invalid device argument 9: did you call init?",
        ),
        (lambda: torch.cuda.current_stream(9), RuntimeError, "9"),
        (
            lambda: torch.cuda.set_per_process_memory_fraction(1.5),
            ValueError,
            "Invalid fraction value: 1.5. Allowed range: 0~1",
        ),
        (
            lambda: torch.cuda.memory_allocated("cpu"),
            ValueError,
            "Expected a cuda device, but got: cpu",
        ),
        (
            lambda: torch.cuda.MemPool(object()),
            NotImplementedError,
            "not supported by the virtual GPU",
        ),
    ],
)
def test_mistakes(used, mistake, error, text):
    with pytest.raises(error, match=text):
        mistake()


# Memory


def test_memory_figures(used):
    x = torch.ones(1000, device="cuda:1")
    assert (
        torch.cuda.memory_allocated(1),
        torch.cuda.memory_reserved(1),
        torch.cuda.memory_allocated(0),
    ) == (4096, 2 << 20, 0)
    y = x + 1
    del y
    assert (torch.cuda.memory_allocated("cuda:1"), torch.cuda.max_memory_allocated(1)) == (
        4096,
        8192,
    )
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 4096
    statistics = torch.cuda.memory_stats(1)
    assert (statistics["allocated_bytes.all.current"], statistics["num_ooms"]) == (4096, 0)
    assert "4096 B" in torch.cuda.memory_summary(1)
    free, total = torch.cuda.mem_get_info(1)
    assert torch.cuda.mem_get_info(0)[0] - free == 2 << 20 and free < total
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0 and torch.cuda.mem_get_info(1)[0] == free + (2 << 20)


def test_running_out_of_memory_names_the_figures_and_leaves_them(used):
    with pytest.raises(
        torch.OutOfMemoryError,
        match=(
            r"^CUDA out of memory. Tried to allocate 200.00 GiB. GPU 1 has a total capacity of "
            r"139.80 GiB"
        ),
    ):
        torch.empty(200 << 30, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.memory_stats(1)["num_ooms"] == 1
    torch.cuda.set_per_process_memory_fraction(0.001, 2)
    try:
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match="143.16 MiB allowed; Of the allocated memory"
        ):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda:2")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 2)


def test_the_allocators_settings_change_while_it_runs(used):
    settings = torch._C._accelerator_setAllocatorSettings
    settings("max_split_size_mb:32")
    large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del large
    # it may not be cut from the 64 MiB now
    kept = torch.empty(12 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 76 << 20
    settings("expandable_segments:True")
    # The setting does not mention segments, so they stay expandable.
    settings("max_split_size_mb:20")
    more = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_snapshot()[-1]["is_expandable"]
    with pytest.raises(RuntimeError, match="max_split_size_mb must be at least 20"):
        settings("max_split_size_mb:1")
    settings("expandable_segments:False")
    del kept, more


def test_threads_on_four_devices(used):
    def work(index: int) -> None:
        torch.cuda.set_device(index)
        for _ in range(60):
            x = torch.randn(40, device="cuda")
            y = (x * 2 + x.sum()).to(f"cuda:{(index + 1) % 4}")
            assert x.get_device() == index and torch.equal(y.cpu(), (x * 2 + x.sum()).cpu())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert torch.cuda.current_device() == 0


def test_the_accelerator_is_cuda(used):
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 4
    assert accelerator.current_accelerator() == torch.device("cuda")
    accelerator.set_device_index(2)
    assert accelerator.current_device_index() == torch.cuda.current_device() == 2
    torch.cuda._sleep(10_000_000)
    assert not accelerator.current_stream().query()
    accelerator.synchronize()
    assert accelerator.current_stream().query()


def test_the_accelerator_s_current_device_for_a_block(used):
    with torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_the_accelerator_s_memory(used):
    accelerator = torch.accelerator
    x = torch.ones(1000, device="cuda")
    assert accelerator.memory_allocated() == accelerator.max_memory_allocated() == 4096
    assert accelerator.memory_reserved() == 2 << 20
    del x
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


# Processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "touch",
    [
        lambda loss, seed: torch.ones(1, device="cuda"),
        lambda loss, seed: torch.ones(1).cuda(),
        lambda loss, seed: torch.cuda.set_device(1),
        lambda loss, seed: loss.sum().backward(),
        lambda loss, seed: loss.backward(seed),  # only views, so no kernel runs
        lambda loss, seed: torch.autograd.grad(loss, loss, seed),
    ],
)
def test_no_cuda_after_a_fork(used, touch):
    loss, seed = (
        torch.ones(2, 3, device="cuda", requires_grad=True).view(-1),
        torch.ones(6, device="cuda"),
    )
    said = said_by_a_forked_child(lambda: touch(loss, seed))
    assert said.startswith(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_backward_in_a_forked_child_after_one_in_its_parent(used):
    loss = torch.ones(3, requires_grad=True).sum()
    assert said_by_a_forked_child(lambda: loss.backward(retain_graph=True)) == "nothing was raised"
    loss.backward(retain_graph=True)
    said = said_by_a_forked_child(loss.backward)
    assert said.startswith(
        "Unable to handle autograd's threading in combination with fork-based multiprocessing"
    )


def said_by_a_forked_child(touch):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            touch()
            os.write(writing, b"nothing was raised")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_ranges_for_a_timeline(used):
    with torch.cuda.nvtx.range("step"):
        assert (torch.cuda.nvtx.range_push("forward"), torch.cuda.nvtx.range_pop()) == (1, 1)
    torch.cuda.nvtx.mark("done")
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("copy"))


def test_fake_cuda_tensors_are_refused(used):
    """Check this because autograd would end the process in a build without CUDA."""
    with torch._subclasses.FakeTensorMode() as fake:
        assert torch.ones(2).device.type == "cpu"
        with pytest.raises(
            NotImplementedError,
            match="a FakeTensor on a CUDA device.* is not supported by the virtual GPU",
        ):
            torch.ones(2, device="cuda")
    with pytest.raises(
        NotImplementedError,
        match="a FakeTensor on a CUDA device.* is not supported by the virtual GPU",
    ):
        fake.from_tensor(torch.ones(2, device="cuda"))


def test_the_runtime_makes_streams_and_locks_memory_of_the_host(used):
    runtime, handle, host = torch.cuda.cudart(), ctypes.c_ulonglong(0), torch.ones(20)
    with torch.cuda.device(1):
        assert runtime.cudaStreamCreate(ctypes.addressof(handle)) == 0
    stream = torch.cuda.ExternalStream(handle.value, device=torch.device("cuda:1"))
    assert (stream.cuda_stream, stream.device.index, stream.priority) == (handle.value, 1, 0)
    with torch.cuda.stream(stream):
        assert (
            torch.cuda.current_stream() == stream and torch.ones(2, device="cuda").sum().item() == 2
        )
    assert runtime.cudaStreamDestroy(handle.value) == 0 != runtime.cudaStreamDestroy(handle.value)
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        torch.cuda.ExternalStream(handle.value, device=1)
    assert (
        runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
        and host[5:].is_pinned()
        and not torch.ones(20).is_pinned()
    )
    assert runtime.cudaHostUnregister(host.data_ptr()) == 0 and not host.is_pinned()
    torch.cuda.check_error(0)
    with pytest.raises(torch.cuda.CudaError, match="out of memory"):
        torch.cuda.check_error(2)


def test_cuda_and_a_snapshot_know_a_stream_by_an_address_and_not_by_its_id(used):
    first, second, here = torch.cuda.Stream(0), torch.cuda.Stream(1), torch.cuda.current_stream()
    assert (here.stream_id, here.cuda_stream) == (0, 0)
    assert len({first.cuda_stream, second.cuda_stream, first.stream_id, 0}) == 4
    with torch.cuda.stream(first):
        held = torch.ones(2, device="cuda:0")
        assert torch._C._cuda_getCurrentRawStream(0) == first.cuda_stream
    segments = torch.cuda.memory_snapshot()
    found = [
        s["stream"]
        for s in segments
        for block in s["blocks"]
        if block["address"] == held.data_ptr()
    ]
    assert found == [first.cuda_stream]
    assert torch.cuda.ExternalStream(first.cuda_stream, device=0) == first


def test_who_observes_is_told_before_an_out_of_memory_error(used):
    told = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *about: told.append(about))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda:1", dtype=torch.int8)
    total = torch.cuda.get_device_properties(1).total_memory
    assert [(device, asked, whole) for device, asked, whole, _ in told] == [
        (1, 1 << 40, total)
    ] and 0 < told[0][3] < total
    hardware.machine().oom_observers.clear()


def test_workspaces_of_cublas_can_be_given_back(used, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
    assert torch.cuda.memory_allocated() - before > 1 << 20
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    assert importlib.import_module("torch._inductor.cudagraph_trees")


def test_the_history_takes_what_torch_2_14_passes_too(machine):
    torch._C._cuda_record_memory_history(
        "all", "all", "python", 9, True, False, False, [], False, True
    )
    torch._C._cuda_record_memory_history(None, "all", "python", 9)
    with pytest.raises(Exception, match="a history of pinned memory"):
        torch._C._cuda_record_memory_history(
            "all", "all", "python", 9, True, False, False, [], True, True
        )
