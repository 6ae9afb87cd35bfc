"""The collectives that a rank begins while an answer runs: their names, and the bytes that the rank gives to them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# DTensors use functional collectives, whose last argument is the name of the group. An operator that has no such argument sends nothing.
FUNCTIONAL = "_c10d_functional"
GIVE_NOTHING = (
    "c10d::barrier",
    "c10d::recv_",
    "c10d::recv_any_source_",
)  # their tensors are not values of this rank


class SentBytes(TorchDispatchMode):
    """Record for each collective its name, the ranks of its group, and the bytes of all tensors that are not outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], int]] = []

    @property
    def total(self) -> int:
        """Bytes given to all collectives together."""
        return sum(nbytes for _, _, nbytes in self.calls)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d" and function._schema.name not in GIVE_NOTHING:
            named = dict(
                zip((argument.name for argument in function._schema.arguments), args, strict=False)
            ) | (kwargs or {})
            given = tree_leaves(
                [value for name, value in named.items() if not name.startswith("output")]
            )
            groups = [
                group
                for leaf in given
                if isinstance(leaf, torch.ScriptObject) and (group := _group(leaf)) is not None
            ]
            if groups:
                nbytes = sum(leaf.nbytes for leaf in given if isinstance(leaf, torch.Tensor))
                self.calls.append(
                    (function._schema.name, dist.get_process_group_ranks(groups[0]), nbytes)
                )
        if function.namespace == FUNCTIONAL and isinstance(args[-1], str):
            given = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            name: Any = args[-1]
            group = dist.distributed_c10d._resolve_process_group(name)
            nbytes = sum(tensor.nbytes for tensor in given)
            self.calls.append((function._schema.name, dist.get_process_group_ranks(group), nbytes))
        return function(*args, **(kwargs or {}))


class MessageNames(TorchDispatchMode):
    """The names of collectives but barriers and DDP's own, by which the ranks agree where gradients lie in buckets."""

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
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            if function != torch.ops.c10d.barrier.default and any(
                tensor.dtype != torch.int32 for tensor in tensors
            ):
                self.names.append(function._schema.name)
        return function(*args, **kwargs)


def _group(boxed: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(boxed)
    except RuntimeError:  # another object of torch's
        return None
