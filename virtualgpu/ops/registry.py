"""The tables that the families of operators fill.

A module of this package fills three tables, keyed by an operator's name without its namespace ("sum", "native_dropout"):

TEMPORARIES: sizes in bytes of what CUDA's kernel allocates after its outputs and frees before it returns.
HANDLERS: operators that CUDA computes otherwise than the CPU does, in place of those of `virtualgpu.ops.operators`.
COMPOSITES: composite operators that choose by device what they are made of; they run above autograd.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

Temporaries = Callable[[Any, tuple, dict, Any], Iterable[int]]  # (func, args, kwargs, result) -> bytes of each
Handler = Callable[[Any, tuple, dict], Any]

TEMPORARIES: dict[str, Temporaries] = {}
HANDLERS: dict[str, Handler] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}


def temporaries(*names: str) -> Callable[[Temporaries], Temporaries]:
    """Say what these operators allocate beside their outputs."""

    def register(rule: Temporaries) -> Temporaries:
        TEMPORARIES.update(dict.fromkeys(names, rule))
        return rule

    return register


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Run these operators by a function of the family's own."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def composes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what these composite operators are made of on CUDA. The function gets the operator's arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSITES.update(dict.fromkeys(names, function))
        return function

    return register


def made_of(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A composite operator run as C++ makes it. `OpOverload.decompose` prefers Python's version, whose LSTM is wrong in torch 2.11."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
