"""Record or hold back the collectives that a rank starts while an answer runs."""

import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# DTensors use functional collectives. The last argument of such a collective is the name of its
# group. An operator of this namespace without that argument sends nothing.
FUNCTIONAL = "_c10d_functional"
# The tensors that these operators get are not values that this rank sends.
GIVE_NOTHING = ("c10d::barrier", "c10d::recv_", "c10d::recv_any_source_")


class _InAllThreads(TorchDispatchMode):
    """Mode that also sees the operators of the threads that start while it is active."""

    def __enter__(self) -> Any:
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with _PassedOn(self):
                run(thread)

        self._patch = mock.patch.object(threading.Thread, "run", watched)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()


class _PassedOn(TorchDispatchMode):
    """Mode of another thread that passes all operators on to the mode `to`."""

    def __init__(self, to: TorchDispatchMode) -> None:
        super().__init__()
        self._to = to

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._to.__torch_dispatch__(function, types, args, kwargs)


class SentBytes(_InAllThreads):
    """Mode that records (name, ranks of the group, bytes) of each collective.

    The bytes are those of all tensors that the rank passes in, without the outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], int]] = []

    @property
    def total(self) -> int:
        """The bytes passed to all collectives together."""
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


class MessageNames(_InAllThreads):
    """Mode that records the names of the collectives that carry the learner's values.

    Barriers do not count. The int32 messages with which DDP's ranks agree on buckets do not count
    either.
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


class _LateWork(dist.Work):
    """Work of a collective whose results reach the caller's tensors only when somebody waits."""

    def __init__(self, work: dist.Work, late: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._late = late  # pairs of a tensor of the caller and the copy that gloo works on

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        while self._late:
            tensor, copy = self._late.pop()
            tensor.copy_(copy)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed() and self.wait()

    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


class LateValues(TorchDispatchMode):
    """Mode in which the results of each collective arrive only when somebody waits for it.

    An answer that does not wait then always reads too early, also on a busy machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self._works: list[_LateWork] = []  # C++ does not keep the Python object of a work

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace != "c10d":
            return function(*args, **(kwargs or {}))
        late: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            late.append((tensor, tensor.clone()))
            return late[-1][1]

        copies, options = tree_map_only(torch.Tensor, copied, (args, kwargs or {}))
        result = function(*copies, **options)
        returns_tensors = isinstance(result, tuple)
        boxed = result
        if returns_tensors:
            boxed = result[-1]
        self._works.append(_LateWork(dist.Work.unbox(boxed), late))
        boxed = self._works[-1].boxed()
        if returns_tensors:
            return args[0], boxed
        return boxed


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _group(leaves: list[Any]) -> dist.ProcessGroup | None:
    """Return the first process group among the arguments of a collective, or None."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf)
            except RuntimeError:  # The object is something else, such as the kind of reduction.
                continue
    return None
