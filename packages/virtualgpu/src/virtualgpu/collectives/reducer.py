"""Replacements in torch.distributed: the virtual NCCL, and PyTorch's own reducer of DDP.

The reducer is in C++, which believes the parameters to be on the CPU. What it creates on their
device is created on their GPU instead (`Selected.made_on`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from virtualgpu.collectives.group import (
    Options,
    ProcessGroupNCCL,
    end_coalescing,
    let_watchdogs_look,
    ordered,
)
from virtualgpu.collectives.rendezvous import end_group, made_by_all
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine
from virtualgpu.ops.call import made_on
from virtualgpu.tensor import VirtualTensor

# Methods of the reducer that a model on several GPUs calls for each of its GPUs.
_ON_EACH_GPU = [
    "_check_reducer_finalized", "_delay_all_reduce", "_get_zeros_like_grad_buckets",
    "_push_all_rebuilt_params", "_rebuild_buckets", "_remove_autograd_hooks", "_reset_state",
    "_set_mixed_precision_param_dtype", "_set_optimizer_in_backward", "_set_static_graph",
    "_update_process_group", "prepare_for_backward", "prepare_for_forward",
]  # fmt: skip


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each changed object of PyTorch or `gc`, with its new attributes by name."""
    if not dist.is_available():
        return
    ProcessGroupNCCL.__module__ = distributed_c10d.__name__
    yield (
        distributed_c10d,
        {
            "_NCCL_AVAILABLE": True,
            "ProcessGroupNCCL": ProcessGroupNCCL,
            "default_pg_nccl_timeout": Options()._timeout,
            "_new_process_group_helper": made_by_all(distributed_c10d._new_process_group_helper),
        },
    )
    if hasattr(distributed_c10d, "_create_nccl2_process_group"):  # torch 2.15 calls it for "nccl"
        made: Any = distributed_c10d
        yield distributed_c10d, {"_create_nccl2_process_group": made._create_nccl_process_group}
    yield c10d, {"ProcessGroupNCCL": ProcessGroupNCCL, "_hash_tensors": _hash_tensors}
    yield dist, {"ProcessGroupNCCL": ProcessGroupNCCL}
    yield (
        dist,
        {
            "Reducer": Reducer,
            "_verify_params_across_processes": verify_parameters,
            "_broadcast_coalesced": _device_by_device(dist._broadcast_coalesced),
            "_compute_bucket_assignment_by_size": _buckets_by_device(
                dist._compute_bucket_assignment_by_size
            ),
            "_register_comm_hook": _for_each_reducer(dist._register_comm_hook),
            "_register_builtin_comm_hook": _for_each_reducer(dist._register_builtin_comm_hook),
        },
    )
    yield gc, {"collect": _with_watchdogs(machine, gc.collect)}
    yield (
        dist.ProcessGroup,
        _coalescing(dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing),
    )
    yield dist.ProcessGroup, {"shutdown": _shutting_down(dist.ProcessGroup.shutdown)}


def _hash_tensors(tensors: Any) -> int:
    """Return a hash of the tensors' values. It replaces C++'s function of the same name."""
    return hash(tuple(x.cpu().numpy().tobytes() for x in tensors))


def _with_watchdogs(machine: Machine, collect: Callable[..., int]) -> Callable[..., int]:
    """Return `gc.collect`, during which the watchdogs of NCCL look for finished work."""

    def collect_garbage(generation: int = 2) -> int:
        let_watchdogs_look(machine.clock.host)
        return collect(generation)

    return collect_garbage


def _coalescing(start: Any, end: Any) -> dict[str, Any]:
    """Return methods of ProcessGroup that begin and end a batch of collectives, by name.

    `start` and `end` are the original methods, which other backends still use. C++ would ask gloo,
    the base class of the virtual NCCL, which has no batches.
    """

    def start_coalescing(self: Any, device: torch.device) -> None:
        backend = self._get_backend(device)
        if isinstance(backend, ProcessGroupNCCL):
            backend.coalescing = []
        else:
            start(self, device)

    def finish_coalescing(self: Any, device: torch.device) -> Any:
        backend = self._get_backend(device)
        if isinstance(backend, ProcessGroupNCCL):
            return end_coalescing(backend)
        return end(self, device)

    return {"_start_coalescing": start_coalescing, "_end_coalescing": finish_coalescing}


def _shutting_down(shut_down: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a replacement of `ProcessGroup.shutdown` that also destroys virtual NCCL groups.

    `shut_down` is the original method, which would not tell the virtual NCCL.
    `destroy_process_group` calls it.
    """

    def shutdown(self: Any) -> None:
        for device in self._device_types:
            backend = self._get_backend(device)
            if isinstance(backend, ProcessGroupNCCL):
                backend.abort()
        end_group(self.group_name)
        shut_down(self)

    return shutdown


def verify_parameters(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
    """Raise RuntimeError unless all ranks have parameters of the same shapes and strides.

    PyTorch's own function (verify_params_across_processes in torch/csrc/distributed/c10d/
    reducer.cpp) would move the numbers to the CPU, where it believes the parameters to be.
    """
    if not parameters or type(parameters[0]) is not VirtualTensor:
        c10d._verify_params_across_processes(group, parameters, logger)
        return
    device, rank = parameters[0].device, group.rank()
    count = torch.tensor([len(parameters)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    group.allgather([counts], [count]).wait()
    for other, number in enumerate(counts):
        if number.item() != len(parameters):
            raise RuntimeError(
                f"DDP expects same model across all ranks, but Rank {rank} has {len(parameters)} "
                f"params, while rank {other} has inconsistent {number.item()} params."
            )
    own_numbers = [number for p in parameters for number in (*p.size(), *p.stride())]
    first = torch.tensor(own_numbers, dtype=torch.int64).to(device)
    group.broadcast([first]).wait()
    numbers = iter(first.tolist())
    for index, parameter in enumerate(parameters):
        for what, own in (("sizes", parameter.size()), ("strides", parameter.stride())):
            if [next(numbers) for _ in own] != list(own):
                raise RuntimeError(
                    f"[{rank}]: params[{index}] in this process with {what} {list(own)} appears "
                    f"not to match {what} of the same param in process 0."
                )


def _by_device(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors in the list, grouped by the tensors' devices."""
    positions: dict[torch.device, list[int]] = {}
    for position, x in enumerate(tensors):
        positions.setdefault(x.device, []).append(position)
    return list(positions.values())


def _device_by_device(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Return `broadcast`, changed so that it sends the tensors of each device separately.

    C++ puts tensors of one dtype and device into one message, and believes all to be on the CPU.
    """

    def broadcast_coalesced(
        group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        for positions in _by_device(tensors):
            broadcast(group, [tensors[position] for position in positions], *args, **kwargs)

    return broadcast_coalesced


def _buckets_by_device(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Return `assign`, changed so that a bucket has tensors of one device only.

    `assign` is DDP's function that divides tensors into buckets. The buckets are in the order of
    their first tensors.
    """

    def compute_bucket_assignment_by_size(
        tensors: list[torch.Tensor],
        bucket_size: Any,
        expect_sparse_gradient: Any = (),
        *more: Any,
        **named: Any,
    ) -> Any:
        found = []
        for positions in _by_device(tensors):
            part = [tensors[position] for position in positions]
            sparse = []
            if expect_sparse_gradient:
                sparse = [expect_sparse_gradient[position] for position in positions]
            buckets, limits = assign(part, bucket_size, sparse, *more, **named)
            for bucket, limit in zip(buckets, limits, strict=True):
                found.append(([positions[index] for index in bucket], limit))
        found.sort(key=lambda each: min(each[0]))
        return [bucket for bucket, _ in found], [limit for _, limit in found]

    return compute_bucket_assignment_by_size


def _for_each_reducer(register: Callable[..., None]) -> Callable[..., None]:
    """Return `register`, changed to register a communication hook with the reducers of all GPUs."""

    def register_hook(reducer: Any, *args: Any) -> None:
        for each in (reducer, *reducer.others):
            register(each, *args)

    return register_hook


class Reducer(c10d.Reducer):
    """DDP's reducer, which is PyTorch's own in C++.

    C++ cannot rebuild buckets of several GPUs. For a model on several GPUs, this reducer therefore
    has the parameters on the first GPU, and each of `others` has those on another GPU. The buckets
    of one GPU are reduced in order. Those of several GPUs are reduced as their gradients arrive.
    """

    def __init__(
        self,
        parameters: list[Any],
        buckets: Any,
        limits: Any,
        group: Any,
        sparse: Any,
        cap: int,
        unused: bool,
        *more: Any,
    ) -> None:
        view, names, *rest = more
        own, *others = _by_device(parameters)
        # Ranks that use different parameters would reduce the GPUs' buckets in different orders.
        if others and unused:
            raise unsupported(
                "DistributedDataParallel(find_unused_parameters=True) of a model on several GPUs"
            )

        def part(positions: list[int]) -> tuple[Any, ...]:
            """Return the arguments for the reducer of the parameters at these positions.

            Buckets, limits and names are renumbered for these parameters.
            """
            index_of = {position: index for index, position in enumerate(positions)}
            own_buckets, own_limits = [], []
            for bucket, limit in zip(buckets, limits, strict=True):
                if bucket[0] in index_of:
                    own_buckets.append([index_of[position] for position in bucket])
                    own_limits.append(limit)
            own_names = {}
            for position, name in names.items():
                if position in index_of:
                    own_names[index_of[position]] = name
            return (
                [parameters[position] for position in positions],
                own_buckets,
                own_limits,
                group,
                [sparse[position] for position in positions],
                cap,
                unused,
                view,
                own_names,
                *rest,
            )

        self.others = [Reducer(*part(positions)) for positions in others]
        self._gpu = parameters[0]._gpu if type(parameters[0]) is VirtualTensor else None
        with self._on_its_gpu():
            super().__init__(*part(own))

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Start the reduction of a bucket, and return a future that orders streams after it."""
        future = super()._run_allreduce_hook(bucket)  # type: ignore[misc]
        if self._gpu is None:
            return future
        return ordered(future)

    def _set_forward_pass_work_handle(self, work: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the work of a collective that the forward pass starts for uneven inputs (`join`).

        Raises NotImplementedError for a model on several GPUs.
        """
        if self.others:
            raise unsupported(
                "uneven inputs (`join`) with DistributedDataParallel of a model on several GPUs"
            )
        # C++ holds only a pointer to the work, and asks for its result after it has waited.
        self._forward_work = work
        super()._set_forward_pass_work_handle(work, *args, **kwargs)

    def _autograd_hook(self, index: int) -> None:
        """Note that the gradient of parameter number `index` has arrived.

        DDP calls this with mixed precision. Raises NotImplementedError for a model on several GPUs.
        """
        if self.others:
            raise unsupported(
                "DistributedDataParallel(mixed_precision=…) of a model on several GPUs"
            )
        super()._autograd_hook(index)  # type: ignore[misc]

    def _on_its_gpu(self) -> Any:
        """Return a context in which C++ creates its tensors on the GPU of the parameters."""
        if self._gpu is None:
            return nullcontext()
        return made_on(self._gpu)


def _on_each_gpu(name: str) -> Any:
    """Return a method of `Reducer` that calls the inherited method `name` for each GPU."""
    inherited = getattr(c10d.Reducer, name)

    def method(self: Reducer, *args: Any, **kwargs: Any) -> Any:
        with self._on_its_gpu():
            result = inherited(self, *args, **kwargs)
        for other in self.others:
            result = getattr(other, name)(*args, **kwargs) or result
        return result

    return method


for _name in _ON_EACH_GPU:
    setattr(Reducer, _name, _on_each_gpu(_name))
