"""A random generator for each virtual GPU, so that drawing on one never advances the CPU's."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from virtualgpu import hardware
from virtualgpu.allocator import Block

_Generator = torch.Generator
_STATE = struct.Struct("<Qq")  # seed and offset, as CUDAGeneratorImpl.cpp writes them
NUMBERS_AT_ONCE = 4  # that a thread draws: Philox makes four
_virtual: WeakValueDictionary[int, "VirtualGenerator"] = WeakValueDictionary()  # by address in C++, which makes new Python objects


class GeneratorState:
    """A seed and an offset, which several generators may share. `graphs` are registered with it: only their captures may draw.

    Where there are any, the GPU holds the two for their kernels, in `blocks`.
    """

    def __init__(self, seed: int, offset: int) -> None:
        self.seed = seed
        self.offset = offset
        self.graphs: set[int] = set()
        self.blocks: list[Block | None] = []

    def register(self, gpu: hardware.Gpu, graph: int) -> None:
        if not self.graphs:
            self.blocks = [gpu.allocate(8), gpu.allocate(8)]
        self.graphs.add(graph)

    def unregister(self, gpu: hardware.Gpu, graph: int) -> None:
        self.graphs.discard(graph)
        if not self.graphs:
            while self.blocks:
                if (block := self.blocks.pop()) is not None:
                    gpu.allocator.free(block)


class VirtualGenerator(_Generator):
    """A generator of a virtual GPU. As on CUDA, a seed and an offset are all of its state, and each operator moves the offset on.

    The draws are those of the CPU's algorithm, started afresh from the two for each operator; so they differ from CUDA's.
    """

    _gpu: hardware.Gpu
    _cdata: int
    state: GeneratorState

    def __new__(cls, gpu: hardware.Gpu, state: GeneratorState | None = None) -> "VirtualGenerator":
        self = super().__new__(cls)
        self._gpu = gpu
        self.state = state or GeneratorState(super().seed(self), 0)
        _virtual[self._cdata] = self
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device

    def manual_seed(self, seed: int) -> "VirtualGenerator":
        super().manual_seed(seed)
        seed = super().initial_seed()
        if self._gpu.stream.capture is not None and seed != self.state.seed:
            raise RuntimeError(
                "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the original seed."
            )
        self.state.seed, self.state.offset = seed, 0
        return self

    def seed(self) -> int:
        self._refuse_in_capture("seed")
        self.state.seed, self.state.offset = super().seed(), 0
        return self.state.seed

    def initial_seed(self) -> int:
        self._refuse_in_capture("current_seed")
        return self.state.seed

    def get_offset(self) -> int:
        self._refuse_in_capture("get_offset")
        return self.state.offset

    def set_offset(self, offset: int) -> "VirtualGenerator":
        self._refuse_in_capture("set_offset")
        if offset % NUMBERS_AT_ONCE:
            raise RuntimeError(f"offset must be a multiple of {NUMBERS_AT_ONCE}")
        self.state.offset = offset
        return self

    def _refuse_in_capture(self, name: str) -> None:
        if self._gpu.stream.capture is not None:
            raise RuntimeError(
                f"Cannot call CUDAGeneratorImpl::{name} during CUDA graph capture. If you need this call to be captured, please file an "
                "issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
            )

    def get_state(self) -> torch.Tensor:
        """16 bytes on the CPU: the seed and the offset."""
        self._refuse_in_capture("current_seed")
        return torch.frombuffer(bytearray(_STATE.pack(self.state.seed, self.state.offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> "VirtualGenerator":
        """Take the state that `get_state` gave. The seed's 8 bytes without an offset mean offset 0."""
        if not isinstance(state, torch.Tensor):
            raise TypeError(f"expected a torch.ByteTensor, but got {type(state).__name__}")
        if state.dtype is not torch.uint8 or state.device.type != "cpu" or not state.is_contiguous():
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() not in (8, _STATE.size):
            raise RuntimeError("RNG state is wrong size")
        seed, offset = _STATE.unpack(bytes(state.tolist()).ljust(_STATE.size, b"\0"))
        self.set_offset(offset)
        self.state.seed = seed
        return self

    def __reduce__(self) -> Any:
        return Generator, (self.device,), (self.initial_seed(), self.get_offset(), self.get_state())

    def __setstate__(self, state: tuple[int, int | None, torch.Tensor]) -> None:
        self.set_state(state[-1])

    def clone_state(self) -> "VirtualGenerator":
        return VirtualGenerator(self._gpu, GeneratorState(self.state.seed, self.state.offset))

    def graphsafe_get_state(self) -> "VirtualGenerator":
        """Another generator that shares this one's state."""
        return VirtualGenerator(self._gpu, self.state)

    def graphsafe_set_state(self, state: torch.Generator) -> "VirtualGenerator":
        self.state = registered(state).state
        return self

    def next_draws(self, count: int) -> "VirtualGenerator":
        """This generator, ready for one operator that draws `count` numbers.

        The offset moves as `calc_execution_policy` says (PyTorch's native/cuda/DistributionTemplates.h): by four for each number of
        four that a thread draws, with as many threads as the GPU holds at once.
        """
        state = self.state
        if (capture := self._gpu.stream.capture) is not None:
            capture.draw(self)
        super().manual_seed(zlib.crc32(_STATE.pack(state.seed, state.offset)) if state.offset else state.seed)
        profile = self._gpu.profile
        at_once = NUMBERS_AT_ONCE * profile.multiprocessors * profile.max_threads_per_multiprocessor
        state.offset += NUMBERS_AT_ONCE * -(-count // at_once)
        return self

    @contextmanager
    def as_default(self, count: int) -> Iterator[None]:
        """Use this generator as the CPU's default one, for an operator that takes no generator and draws `count` numbers."""
        default = torch.default_generator
        before = default.get_state()
        default.set_state(_Generator.get_state(self.next_draws(count)))
        try:
            yield
        finally:
            default.set_state(before)


def chosen(given: torch.Generator | None, gpu: hardware.Gpu) -> VirtualGenerator:
    """The generator that an operator on this GPU draws from: the given one or the GPU's. Raises RuntimeError for a CPU generator."""
    return gpu.generator if given is None else registered(given)


def registered(generator: torch.Generator) -> VirtualGenerator:
    """The generator of a GPU that C++ may have put into another object. Raises RuntimeError for one of the CPU."""
    if not is_virtual(generator):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    return _virtual[_address(generator)]


def is_virtual(generator: torch.Generator) -> bool:
    """Whether it is a GPU's, though C++ may have put it into another object."""
    return _address(generator) in _virtual


def _address(generator: Any) -> int:
    return generator._cdata


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class Generator(metaclass=_AnyGenerator):
    """Replaces `torch.Generator`: it makes generators for both kinds of device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        # One of the CPU is made where no virtual GPU is in use, too: in another process, which takes a pickled one.
        gpu = None if torch.device(device).type == "cpu" else hardware.machine().gpu(device)
        return _Generator() if gpu is None else VirtualGenerator(gpu)


Generator.__module__ = "torch"  # where pickle finds it, on a real GPU too


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give each GPU its generator, with the seed of the CPU's. By owner, the names that change."""
    for gpu in machine.gpus:
        gpu.generator = VirtualGenerator(gpu)
        gpu.generator.manual_seed(torch.initial_seed() & (1 << 63) - 1)
    yield torch, {"Generator": Generator}
    yield torch.cuda, {"default_generators": tuple(gpu.generator for gpu in machine.gpus)}
