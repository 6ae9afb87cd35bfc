"""A random generator for each virtual GPU, so that drawing on one never advances the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from labkit.vgpu import hardware

_Generator = torch.Generator
_virtual: WeakValueDictionary[int, "VirtualGenerator"] = WeakValueDictionary()  # by C++'s address: it makes new objects for old ones


class VirtualGenerator(_Generator):
    """A generator of a virtual GPU. The draws are the CPU algorithm's, so they differ from CUDA's."""

    def __new__(cls, device: torch.device) -> "VirtualGenerator":
        self = super().__new__(cls)
        self._device = device
        _virtual[self._cdata] = self
        return self

    @property
    def device(self) -> torch.device:
        return self._device

    def clone_state(self) -> "VirtualGenerator":
        copy = VirtualGenerator(self._device)
        copy.set_state(self.get_state())
        return copy

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Let this generator stand in for the CPU's default one, for operators that take no generator."""
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self.get_state())
        try:
            yield
        finally:
            self.set_state(default.get_state())
            default.set_state(before)


def is_virtual(generator: torch.Generator) -> bool:
    """Is it a GPU's, though C++ may have put it into another object?"""
    return generator._cdata in _virtual


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class Generator(metaclass=_AnyGenerator):
    """What `torch.Generator` names while a virtual machine is in place: it makes generators for both kinds of device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        gpu = hardware.machine().gpu(device)
        return _Generator() if gpu is None else VirtualGenerator(gpu.device)
