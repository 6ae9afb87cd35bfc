"""What an operator's schema says about its arguments and results."""

from typing import Any

import torch

from labkit.vgpu.tensor import tensors


def writes(func: Any) -> bool:
    """Does the operator write into an argument?"""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that the operator writes into."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            found += tensors(value)
    return found


def returns_views(func: Any) -> bool:
    """Are all its results views of its arguments?"""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
