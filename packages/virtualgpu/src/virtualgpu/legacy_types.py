"""`torch.FloatTensor` and the other legacy types of CPU tensors.

A tensor on a GPU is no instance of these types. PyTorch's C++ defines the types, and takes a tensor
on a virtual GPU for a CPU tensor. Python cannot change the types, so it replaces them.
"""

from collections.abc import Iterator
from typing import Any

import torch

from virtualgpu.errors import outermost, refuse_legacy_conversion
from virtualgpu.moves import gpu_of
from virtualgpu.tensor import VirtualTensor


class LegacyHostType(type):
    """Metaclass of the replacements for legacy tensor types.

    Each replacement is equal to the `original` type, which C++ defines.
    """

    original: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original) and gpu_of(instance) is None

    @outermost
    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and type(args[0]) is VirtualTensor and cls.layout is torch.strided:
            refuse_legacy_conversion(cls.original.dtype, "cpu", args[0])
        return cls.original(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)

    def __repr__(cls) -> str:
        return repr(cls.original)


def replacements(names: tuple[str, ...]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield torch and torch.sparse, each with replacements for its types of these names."""
    for owner in (torch, torch.sparse):
        originals = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        yield owner, {name: _standing_for(original) for name, original in originals.items()}


def _standing_for(original: Any) -> LegacyHostType:
    """Return a replacement of `original`, one of the legacy types that C++ defines."""
    attributes = {"original": original, "__module__": original.__module__}
    return LegacyHostType(original.__name__, (), attributes)


def made_in_cpp(kind: Any) -> Any:
    """Return the original C++ type if `kind` is a replacement of a legacy type, else `kind`."""
    if isinstance(kind, LegacyHostType):
        return kind.original
    return kind
