"""What an operator's schema says about its arguments and results."""

from functools import cache
from typing import Any

import torch

from virtualgpu.tensor import tensors


@cache
def writes(func: Any) -> bool:
    """Does the operator write into an argument?"""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that the operator writes into."""
    found = []
    for position, name, by_name in _targets(func):
        value = kwargs.get(name) if by_name or position >= len(args) else args[position]
        found += tensors(value)
    return found


@cache
def _targets(func: Any) -> list[tuple[int, str, bool]]:
    """The arguments that are written into: their place, their name, and whether they are given by name alone."""
    arguments = enumerate(func._schema.arguments)
    return [(at, a.name, a.kwarg_only) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write]


UNSAID = {"aten::_unsafe_view"}  # views that autograd is not to know of, so their schema says nothing


@cache
def returns_views(func: Any) -> bool:
    """Are all its results views of its arguments?"""
    if func._schema.name in UNSAID:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
