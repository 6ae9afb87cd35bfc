"""How many of a model's graphs are alive, each from the output of a layer of it, wherever they lie."""

from typing import Any
from weakref import WeakSet

import torch
from torch import nn


class Token:
    """Lives as long as the graph that it was given to."""


class Graphs:
    """The graphs that begin at a layer's outputs. `alive` says how many there are."""

    def __init__(self) -> None:
        self._tokens: WeakSet[Token] = WeakSet()

    @property
    def alive(self) -> int:
        return len(self._tokens)

    def mark(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        """A forward hook."""
        if output.grad_fn is not None:
            metadata: Any = output.grad_fn.metadata  # a dict, whatever its annotation says
            metadata["token"] = token = Token()
            self._tokens.add(token)
