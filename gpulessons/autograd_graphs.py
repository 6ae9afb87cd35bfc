"""Count the autograd graphs of a model that are still alive."""

from typing import Any
from weakref import WeakSet

import torch
from torch import nn


class Token:
    """Object that only a graph refers to, so it lives exactly as long as the graph."""


class Graphs:
    """Counter of autograd graphs, for layers that have `mark` as a forward hook."""

    def __init__(self) -> None:
        self._tokens: WeakSet[Token] = WeakSet()

    @property
    def alive(self) -> int:
        """The number of marked graphs that still exist."""
        return len(self._tokens)

    def mark(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        """Count the graph of a layer's output as long as it lives. Register this as a forward hook.

        The arguments are those of a forward hook.
        """
        if output.grad_fn is not None:
            metadata: Any = output.grad_fn.metadata  # really a dict, unlike its annotation
            metadata["token"] = token = Token()
            self._tokens.add(token)
