"""Grids: which combinations of arguments a function is called with."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

SEVERAL = (list, tuple, range, np.ndarray)
UNORDERED = (set, frozenset, dict, torch.Tensor, Iterator)


@dataclass(frozen=True)
class Grid:
    """The values of each argument of a measurement. The last argument varies fastest."""

    values: dict[str, list[Any]]

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.values.values())

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield a dictionary of arguments for each combination of the grid."""
        for chosen in itertools.product(*self.values.values()):
            yield dict(zip(self.values, chosen, strict=True))

    def labels(self) -> dict[str, list[Any]]:
        """Return the values of each argument as the table shows them."""
        return {name: [label(value) for value in values] for name, values in self.values.items()}


def checked_grid(function: Callable[..., Any], grid: Mapping[str, Any]) -> Grid:
    """Return the grid with a list for each argument.

    Raises TypeError or ValueError if the function cannot be called with these arguments, or if a
    list has no values or has a value twice.
    """
    if not callable(function):
        raise TypeError(
            "Give labkit a function to call, such as `labkit.measure(step_seconds, grid)`. "
            f"You gave {function!r}."
        )
    if not isinstance(grid, Mapping) or not all(isinstance(name, str) for name in grid):
        raise TypeError(
            "The grid is a dictionary from arguments to values, such as {'gpus': [1, 2, 4]}. "
            f"You gave {grid!r}."
        )
    checked = Grid({name: _listed(name, value) for name, value in grid.items()})
    _check_arguments(function, checked)
    return checked


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, UNORDERED):
        raise TypeError(
            f"grid[{name!r}] is a {type(value).__name__}. "
            "Give one value, or a list of values in the order you want."
        )
    if not isinstance(value, SEVERAL):
        return [value]
    values = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if not values:
        raise ValueError(f"grid[{name!r}] is empty. Give at least one value.")
    labels = [label(each) for each in values]
    for each in labels:
        if labels.count(each) > 1:
            raise ValueError(f"grid[{name!r}] has {each!r} more than once.")
    return values


def _check_arguments(function: Callable[..., Any], grid: Grid) -> None:
    """Raise TypeError if the function cannot be called with the grid's arguments by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not say
        return
    try:
        signature.bind(**dict.fromkeys(grid.values))
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        given = ", ".join(grid.values) or "none"
        raise TypeError(
            f"{name_of(function)} cannot be called with this grid: {error}. "
            f"Its arguments are {names}. The grid gives {given} by name."
        ) from None


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or "value" if it has none."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    if name.isidentifier():
        return name
    return "value"


def label(value: Any) -> Any:
    """Return a value as tables and JSON files show it, which is a number or a text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        return name
    return str(value)


def in_words(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of one call as text, such as "gpus 4, width 1024"."""
    return ", ".join(f"{name} {label(value)}" for name, value in arguments.items())
