"""Count the autograd graphs of a model that are still alive."""

from typing import Any
from weakref import WeakSet

import torch
from torch import nn


class Token:
    """Object that a graph holds, so it lives exactly as long as the graph."""


class Graphs:
    """Counts the graphs that start at the outputs of the layers with the hook `mark`."""

    def __init__(self) -> None:
        self._tokens: WeakSet[Token] = WeakSet()

    @property
    def alive(self) -> int:
        """Number of marked graphs that nobody has freed yet."""
        return len(self._tokens)

    def mark(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        """Mark the graph of this output. Register this method as a forward hook."""
        if output.grad_fn is not None:
            metadata: Any = output.grad_fn.metadata  # really a dict, unlike its annotation
            metadata["token"] = token = Token()
            self._tokens.add(token)
