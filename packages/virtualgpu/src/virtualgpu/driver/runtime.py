"""`torch.cuda.cudart()`: the functions of the CUDA runtime that PyTorch binds for Python, and streams that are made with them."""

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import torch

from virtualgpu import errors, pinned
from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.stream_numbers import raw_stream
from virtualgpu.streams.cuda_streams import Stream

HANDLE = 0x5500_0000_0000  # the first of the streams that a program makes itself: even, as addresses are
_handles = itertools.count(HANDLE, 0x100)
# As cudaGetErrorString has them (CUDA Runtime API, "Data types used by CUDA Runtime").
_TEXTS = {
    0: "no error", 1: "invalid argument", 2: "out of memory", 3: "initialization error", 100: "no CUDA-capable device is detected",
    101: "invalid device ordinal", 400: "invalid resource handle", 600: "device not ready", 710: "device-side assert triggered",
}  # fmt: skip


class CudaError(int):
    """A number that a function of the runtime returns."""

    success: "CudaError"


CudaError.success = CudaError(0)


def free_and_total(gpu: Gpu) -> tuple[int, int]:
    """Bytes that no process holds on this GPU, and all of its bytes."""
    gpu.open_context()
    return gpu.allocator.free_bytes(), gpu.machine.total_memory


def runtime(machine: Machine) -> SimpleNamespace:
    """The functions, for `torch.cuda.cudart()`; each answers with an error's number, 0 for none."""

    def memory_info(device: Any) -> tuple[int, int]:
        gpu = machine.gpu(device)
        assert gpu is not None
        return free_and_total(gpu)

    def create(where: int) -> CudaError:
        handle, gpu = next(_handles), machine.current
        machine.several_streams = True
        gpu.streams[handle] = StreamTime(gpu.index, handle)
        ctypes.c_uint64.from_address(where).value = handle
        return CudaError.success

    def destroy(handle: int) -> CudaError:
        found = [gpu for gpu in machine.gpus if handle >= HANDLE and gpu.streams.pop(handle, None) is not None]
        return CudaError.success if found else CudaError(400)

    def register(address: int, nbytes: int, flags: int) -> CudaError:
        pinned.registered[address] = nbytes
        return CudaError.success

    def unregister(address: int) -> CudaError:
        return CudaError(1) if pinned.registered.pop(address, None) is None else CudaError.success

    return SimpleNamespace(
        cudaError=CudaError,
        cudaGetErrorString=lambda error: _TEXTS.get(error, "unrecognized error code"),
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=lambda: CudaError.success,
        cudaProfilerStop=lambda: CudaError.success,
        cudaStreamCreate=create,
        cudaStreamDestroy=destroy,
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
    )


def external_stream(machine: Machine) -> Any:
    """`torch.cuda.ExternalStream`, for the streams of this machine."""

    def make(stream_ptr: int, device: Any = None, **kwargs: Any) -> Stream:
        with torch.cuda.device(device):
            gpu = machine.current
            for stream_id in gpu.streams:
                if stream_ptr == raw_stream(gpu.index, stream_id):
                    return Stream(stream_id=stream_id, device_index=gpu.index)
            raise errors.invalid_resource_handle() if stream_ptr >= HANDLE else unsupported("a stream of another library's")

    return make
