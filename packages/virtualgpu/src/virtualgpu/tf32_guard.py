"""The guard with which PyTorch's C++ switches TF32 off, for example in the gradient of an SVD.

The guard is `NoTF32Guard` of ATen/Context.h. Python has no name for it, so this module looks it up
in PyTorch's libraries.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A PyDLL holds Python's lock during a call, so no other thread runs in the meantime.
_library = ctypes.PyDLL(torch._C.__file__)


def _function(name: str, answer: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a C++ function of the TF32 guard, found by its compiled name in PyTorch's libraries.

    `answer` is the type of its result, and `arguments` are those of its arguments. If the compiler
    gave it another name, return a function that does nothing.
    """
    try:
        function = getattr(_library, f"_ZN2at11NoTF32Guard{name}")
    except AttributeError:
        return lambda *given: False
    function.restype, function.argtypes = answer, arguments
    return function


is_guarded = _function("19should_disable_tf32Ev", ctypes.c_bool)  # on the calling thread
_construct = _function("C1Ev", None, ctypes.c_void_p)
_destroy = _function("D1Ev", None, ctypes.c_void_p)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Switch TF32 off in the block for matrix products of the calling thread."""
    guard = ctypes.create_string_buffer(16)  # large enough: the object has one byte
    _construct(guard)
    try:
        yield
    finally:
        _destroy(guard)
