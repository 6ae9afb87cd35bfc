"""A random generator for each virtual GPU. Drawing from it does not advance the CPU's generator."""

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
NUMBERS_AT_ONCE = 4  # numbers that Philox draws at a time in one thread
# All generators of GPUs by their address in C++, which can make new Python objects for them.
_virtual: WeakValueDictionary[int, "VirtualGenerator"] = WeakValueDictionary()


class GeneratorState:
    """A seed and an offset, which several generators can share.

    `graphs` are the CUDA graphs registered with the state. Only their captures may draw from it.
    With graphs, the GPU keeps the seed and the offset in `blocks` for their kernels.
    """

    def __init__(self, seed: int, offset: int) -> None:
        self.seed = seed
        self.offset = offset
        self.graphs: set[int] = set()
        self.blocks: list[Block | None] = []

    def register(self, gpu: hardware.Gpu, graph: int) -> None:
        """Register the CUDA graph with the number `graph`, whose capture may draw from this state.

        The first registration allocates memory on `gpu` for the seed and the offset.
        """
        if not self.graphs:
            self.blocks = [gpu.allocate(8), gpu.allocate(8)]
        self.graphs.add(graph)

    def unregister(self, gpu: hardware.Gpu, graph: int) -> None:
        """Remove the CUDA graph with the number `graph`. The last one frees the memory."""
        self.graphs.discard(graph)
        if not self.graphs:
            while self.blocks:
                block = self.blocks.pop()
                if block is not None:
                    gpu.allocator.free(block)


class VirtualGenerator(_Generator):
    """A random generator of a virtual GPU. As on CUDA, its whole state is a seed and an offset.

    Each operator advances the offset. The numbers come from the CPU's algorithm, which each
    operator starts again from the seed and the offset. They differ from CUDA's numbers.
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
        """The GPU of this generator, as a torch.device."""
        return self._gpu.device

    def manual_seed(self, seed: int) -> "VirtualGenerator":
        """Set the seed, and the offset to 0. Raises RuntimeError for a new seed in a capture."""
        super().manual_seed(seed)
        seed = super().initial_seed()
        if self._gpu.stream.capture is not None and seed != self.state.seed:
            raise RuntimeError(
                "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if "
                "new seed is the same as the original seed."
            )
        self.state.seed, self.state.offset = seed, 0
        return self

    def seed(self) -> int:
        """Set a random seed, and return it. Raises RuntimeError in a capture."""
        self._refuse_in_capture("seed")
        self.state.seed, self.state.offset = super().seed(), 0
        return self.state.seed

    def initial_seed(self) -> int:
        """Return the seed of this generator. Raises RuntimeError in a capture."""
        self._refuse_in_capture("current_seed")
        return self.state.seed

    def get_offset(self) -> int:
        """Return the offset of this generator. Raises RuntimeError in a capture."""
        self._refuse_in_capture("get_offset")
        return self.state.offset

    def set_offset(self, offset: int) -> "VirtualGenerator":
        """Set the offset. Raises RuntimeError in a capture, or unless it is a multiple of 4."""
        self._refuse_in_capture("set_offset")
        if offset % NUMBERS_AT_ONCE:
            raise RuntimeError(f"offset must be a multiple of {NUMBERS_AT_ONCE}")
        self.state.offset = offset
        return self

    def _refuse_in_capture(self, name: str) -> None:
        """Raise CUDA's RuntimeError if a graph is being captured. It names the method `name`."""
        if self._gpu.stream.capture is not None:
            raise RuntimeError(
                f"Cannot call CUDAGeneratorImpl::{name} during CUDA graph capture. If you need "
                "this call to be captured, please file an issue. Current cudaStreamCaptureStatus: "
                "cudaStreamCaptureStatusActive"
            )

    def get_state(self) -> torch.Tensor:
        """Return 16 bytes on the CPU: the seed and the offset. Raises RuntimeError in a capture."""
        self._refuse_in_capture("current_seed")
        packed = _STATE.pack(self.state.seed, self.state.offset)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> "VirtualGenerator":
        """Set the state that `get_state` returned. 8 bytes, a seed alone, mean offset 0.

        Raises TypeError or RuntimeError for anything else, as CUDA does.
        """
        if not isinstance(state, torch.Tensor):
            raise TypeError(f"expected a torch.ByteTensor, but got {type(state).__name__}")
        if (
            state.dtype is not torch.uint8
            or state.device.type != "cpu"
            or not state.is_contiguous()
        ):
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
        """Return a new generator of the same GPU with a copy of this generator's state."""
        return VirtualGenerator(self._gpu, GeneratorState(self.state.seed, self.state.offset))

    def graphsafe_get_state(self) -> "VirtualGenerator":
        """Return a new generator that shares the state of this one."""
        return VirtualGenerator(self._gpu, self.state)

    def graphsafe_set_state(self, state: torch.Generator) -> "VirtualGenerator":
        """Share the state of `state`, another generator of a GPU, and return this generator."""
        self.state = registered(state).state
        return self

    def next_draws(self, count: int) -> "VirtualGenerator":
        """Return this generator, ready for one operator that draws `count` numbers.

        The offset advances as `calc_execution_policy` says (PyTorch's
        native/cuda/DistributionTemplates.h): by four for each four numbers that a thread draws,
        with as many threads as the GPU runs at the same time.
        """
        state = self.state
        capture = self._gpu.stream.capture
        if capture is not None:
            capture.draw(self)
        seed = state.seed
        if state.offset:
            seed = zlib.crc32(_STATE.pack(state.seed, state.offset))
        super().manual_seed(seed)
        profile = self._gpu.profile
        at_once = NUMBERS_AT_ONCE * profile.multiprocessors * profile.max_threads_per_multiprocessor
        state.offset += NUMBERS_AT_ONCE * -(-count // at_once)
        return self

    @contextmanager
    def as_default(self, count: int) -> Iterator[None]:
        """Use this generator as the CPU's default generator in the block.

        This is for an operator that takes no generator and draws `count` numbers.
        """
        default = torch.default_generator
        before = default.get_state()
        default.set_state(_Generator.get_state(self.next_draws(count)))
        try:
            yield
        finally:
            default.set_state(before)


def chosen(given: torch.Generator | None, gpu: hardware.Gpu) -> VirtualGenerator:
    """Return the generator for an operator on this GPU: the given one, or the GPU's own.

    Raises RuntimeError for a CPU generator.
    """
    if given is None:
        return gpu.generator
    return registered(given)


def registered(generator: torch.Generator) -> VirtualGenerator:
    """Return a GPU's generator, given any Python object that C++ has made for it.

    Raises RuntimeError for a CPU generator.
    """
    if not is_virtual(generator):
        found = generator.device.type
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{found}'")
    return _virtual[_address(generator)]


def is_virtual(generator: torch.Generator) -> bool:
    """Return whether this is a GPU's generator, in any Python object that C++ has made for it."""
    return _address(generator) in _virtual


def _address(generator: Any) -> int:
    """Return the address of the C++ object behind a generator."""
    return generator._cdata


class _AnyGenerator(type):
    """Metaclass of `Generator`: all of PyTorch's generators count as its instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class Generator(metaclass=_AnyGenerator):
    """Replacement of `torch.Generator` that creates generators for both types of device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        # Another process can unpickle a CPU generator while no virtual GPU is in use.
        if torch.device(device).type == "cpu":
            return _Generator()
        gpu = hardware.machine().gpu(device)
        assert gpu is not None
        return VirtualGenerator(gpu)


Generator.__module__ = "torch"  # pickle finds it there, also on a computer with a real GPU


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give each GPU a generator with the CPU's seed, and yield the changes to PyTorch."""
    for gpu in machine.gpus:
        gpu.generator = VirtualGenerator(gpu)
        gpu.generator.manual_seed(torch.initial_seed() & (1 << 63) - 1)
    yield torch, {"Generator": Generator}
    yield torch.cuda, {"default_generators": tuple(gpu.generator for gpu in machine.gpus)}
