"""Record the collectives that a rank starts while an answer runs, and the bytes that it sends."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# DTensors use functional collectives. The last argument of such a collective is the name of its
# group. An operator of this namespace without that argument sends nothing.
FUNCTIONAL = "_c10d_functional"
# The tensors that these operators get are not values that this rank sends.
GIVE_NOTHING = ("c10d::barrier", "c10d::recv_", "c10d::recv_any_source_")


class SentBytes(TorchDispatchMode):
    """Record (name, ranks of the group, bytes) of each collective.

    The bytes are those of all tensors that the rank passes in, without the outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], int]] = []

    @property
    def total(self) -> int:
        """Bytes passed to all collectives together."""
        return sum(nbytes for _, _, nbytes in self.calls)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d" and function._schema.name not in GIVE_NOTHING:
            names = [argument.name for argument in function._schema.arguments]
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            inputs = [value for name, value in named.items() if not name.startswith("output")]
            self._add(function, _group(tree_leaves(inputs)), inputs)
        if function.namespace == FUNCTIONAL and isinstance(args[-1], str):
            name: Any = args[-1]
            self._add(function, dist.distributed_c10d._resolve_process_group(name), args[0])
        return function(*args, **(kwargs or {}))

    def _add(self, function: Any, group: dist.ProcessGroup | None, inputs: Any) -> None:
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            nbytes = sum(tensor.nbytes for tensor in _tensors(inputs))
            self.calls.append((function._schema.name, ranks, nbytes))


class MessageNames(TorchDispatchMode):
    """Record the names of the collectives that carry values of the learner's program.

    Barriers do not count. Neither do the int32 messages with which DDP's ranks agree on buckets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace == FUNCTIONAL and isinstance(args[-1], str):
            self.names.append(function._schema.name)
        if function.namespace == "c10d":
            carries_values = any(tensor.dtype != torch.int32 for tensor in _tensors((args, kwargs)))
            if carries_values and function != torch.ops.c10d.barrier.default:
                self.names.append(function._schema.name)
        return function(*args, **kwargs)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _group(leaves: list[Any]) -> dist.ProcessGroup | None:
    """Return the first process group among the arguments of an operator, or None."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf)
            except RuntimeError:  # The object is something else, such as the kind of reduction.
                continue
    return None
