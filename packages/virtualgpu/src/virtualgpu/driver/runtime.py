"""The functions of the CUDA runtime that PyTorch binds for Python: `torch.cuda.cudart()`.

Streams that are made with them are torch.cuda.ExternalStream.
"""

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

# The first handle of the streams that a program makes itself: even, as addresses are.
HANDLE = 0x5500_0000_0000
_handles = itertools.count(HANDLE, 0x100)
# As cudaGetErrorString has them (CUDA Runtime API, "Data types used by CUDA Runtime").
_TEXTS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    400: "invalid resource handle",
    600: "device not ready",
    710: "device-side assert triggered",
}


class CudaError(int):
    """Error number that a function of the CUDA runtime returns. 0 means no error."""

    success: "CudaError"


CudaError.success = CudaError(0)


def free_and_total(gpu: Gpu) -> tuple[int, int]:
    """Return (free bytes, total bytes) of a GPU. Free bytes are those that no process holds."""
    gpu.open_context()
    return gpu.allocator.free_bytes(), gpu.machine.total_memory


def runtime(machine: Machine) -> SimpleNamespace:
    """Return the functions of `torch.cuda.cudart()`. Each returns the number of an error."""

    def memory_info(device: Any) -> tuple[int, int]:
        """Return (free bytes, total bytes) of the GPU that `device` names."""
        gpu = machine.gpu(device)
        assert gpu is not None
        return free_and_total(gpu)

    def create(where: int) -> CudaError:
        """Create a stream on the current GPU, and write its handle to the address `where`."""
        handle, gpu = next(_handles), machine.current
        machine.several_streams = True
        gpu.streams[handle] = StreamTime(gpu.index, handle)
        ctypes.c_uint64.from_address(where).value = handle
        return CudaError.success

    def destroy(handle: int) -> CudaError:
        """Destroy the stream with this handle, which `create` has made."""
        if handle >= HANDLE:
            for gpu in machine.gpus:
                if gpu.streams.pop(handle, None) is not None:
                    return CudaError.success
        return CudaError(400)

    def register(address: int, nbytes: int, flags: int) -> CudaError:
        """Treat `nbytes` bytes of host memory at this address as page-locked from now on."""
        pinned.registered[address] = nbytes
        return CudaError.success

    def unregister(address: int) -> CudaError:
        """Treat the host memory at this address as ordinary, not page-locked, memory again."""
        if pinned.registered.pop(address, None) is None:
            return CudaError(1)
        return CudaError.success

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
    """Return a replacement of `torch.cuda.ExternalStream` for streams of this machine."""

    def make(stream_ptr: int, device: Any = None, **kwargs: Any) -> Stream:
        """Return the stream with this handle. Raises an error if no stream of this GPU has it."""
        with torch.cuda.device(device):
            gpu = machine.current
            for stream_id in gpu.streams:
                if stream_ptr == raw_stream(gpu.index, stream_id):
                    return Stream(stream_id=stream_id, device_index=gpu.index)
            if stream_ptr >= HANDLE:
                raise errors.invalid_resource_handle()
            raise unsupported("a stream of another library's")

    return make
