"""What torch.distributed is given while virtual GPUs are in place: the virtual NCCL, and DDP's own reducer in C++, told where it is.

C++ believes the parameters to lie on the CPU: what it makes "on their device" is made on their GPU by `Selected.made_on`.
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


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
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
    if hasattr(distributed_c10d, "_create_nccl2_process_group"):  # what torch 2.15 makes for "nccl"
        made: Any = distributed_c10d
        yield distributed_c10d, {"_create_nccl2_process_group": made._create_nccl_process_group}
    yield (
        c10d,
        {
            "ProcessGroupNCCL": ProcessGroupNCCL,
            "_hash_tensors": lambda xs: hash(tuple(x.cpu().numpy().tobytes() for x in xs)),
        },
    )
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
            "_register_comm_hook": _for_each(dist._register_comm_hook),
            "_register_builtin_comm_hook": _for_each(dist._register_builtin_comm_hook),
        },
    )
    yield gc, {"collect": _collecting(machine, gc.collect)}
    yield (
        dist.ProcessGroup,
        _coalescing(dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing),
    )
    yield dist.ProcessGroup, {"shutdown": _shutting_down(dist.ProcessGroup.shutdown)}


def _collecting(machine: Machine, collect: Callable[..., int]) -> Callable[..., int]:
    def collect_garbage(generation: int = 2) -> int:
        let_watchdogs_look(machine.clock.host)
        return collect(generation)

    return collect_garbage


def _coalescing(start: Any, end: Any) -> dict[str, Any]:
    """C++ asks the backend, whose base cannot be told there that it does."""

    def start_coalescing(self: Any, device: torch.device) -> None:
        backend = self._get_backend(device)
        if isinstance(backend, ProcessGroupNCCL):
            backend.coalescing = []
        else:
            start(self, device)

    def finish_coalescing(self: Any, device: torch.device) -> Any:
        backend = self._get_backend(device)
        return (
            end_coalescing(backend) if isinstance(backend, ProcessGroupNCCL) else end(self, device)
        )

    return {"_start_coalescing": start_coalescing, "_end_coalescing": finish_coalescing}


def _shutting_down(shut_down: Callable[[Any], None]) -> Callable[[Any], None]:
    """What `destroy_process_group` calls, of which C++ does not tell the backend's class."""

    def shutdown(self: Any) -> None:
        for device in self._device_types:
            if isinstance(backend := self._get_backend(device), ProcessGroupNCCL):
                backend.abort()
        end_group(self.group_name)
        shut_down(self)

    return shutdown


def verify_parameters(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
    """As verify_params_across_processes (torch/csrc/distributed/c10d/reducer.cpp), which moves what it compares by `.to(device)`."""
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
                f"DDP expects same model across all ranks, but Rank {rank} has {len(parameters)} params, while rank {other} has "
                f"inconsistent {number.item()} params."
            )
    first = torch.tensor(
        [n for p in parameters for n in (*p.size(), *p.stride())], dtype=torch.int64
    ).to(device)
    group.broadcast([first]).wait()
    numbers = iter(first.tolist())
    for index, parameter in enumerate(parameters):
        for what, own in (("sizes", parameter.size()), ("strides", parameter.stride())):
            if [next(numbers) for _ in own] != list(own):
                raise RuntimeError(
                    f"[{rank}]: params[{index}] in this process with {what} {list(own)} appears not to match {what} of the same param in "
                    "process 0."
                )


def _by_device(tensors: list[torch.Tensor]) -> list[list[int]]:
    """The places in the list of the tensors of each device."""
    places: dict[torch.device, list[int]] = {}
    for place, x in enumerate(tensors):
        places.setdefault(x.device, []).append(place)
    return list(places.values())


def _device_by_device(broadcast: Callable[..., None]) -> Callable[..., None]:
    """C++ joins tensors into one message, of one dtype and device."""

    def broadcast_coalesced(
        group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        for places in _by_device(tensors):
            broadcast(group, [tensors[place] for place in places], *args, **kwargs)

    return broadcast_coalesced


def _buckets_by_device(assign: Callable[..., Any]) -> Callable[..., Any]:
    """A bucket is of one dtype and device, and buckets are in the order of their first tensors."""

    def compute_bucket_assignment_by_size(
        tensors: list[torch.Tensor],
        bucket_size: Any,
        expect_sparse_gradient: Any = (),
        *more: Any,
        **named: Any,
    ) -> Any:
        found = []
        for places in _by_device(tensors):
            sparse = [expect_sparse_gradient[place] for place in places if expect_sparse_gradient]
            buckets, sizes = assign(
                [tensors[place] for place in places], bucket_size, sparse, *more, **named
            )
            found += [
                ([places[index] for index in bucket], size)
                for bucket, size in zip(buckets, sizes, strict=True)
            ]
        found.sort(key=lambda each: min(each[0]))
        return [bucket for bucket, _ in found], [size for _, size in found]

    return compute_bucket_assignment_by_size


def _for_each(register: Callable[..., None]) -> Callable[..., None]:
    def register_hook(reducer: Any, *args: Any) -> None:
        for each in (reducer, *reducer.others):
            register(each, *args)

    return register_hook


class Reducer(c10d.Reducer):
    """PyTorch's own, in C++. Of a model on several GPUs it has the first one's parameters, and another reducer those of each other GPU: C++
    would rebuild buckets that lie on all. Buckets of one GPU go in order; those of several as their gradients come."""

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
        if (
            others and unused
        ):  # ranks that use other parameters would reduce the GPUs' buckets in other orders
            raise unsupported(
                "DistributedDataParallel(find_unused_parameters=True) of a model on several GPUs"
            )

        def part(places: list[int]) -> tuple[Any, ...]:
            number = {place: index for index, place in enumerate(places)}
            here = [
                (bucket, limit)
                for bucket, limit in zip(buckets, limits, strict=True)
                if bucket[0] in number
            ]
            return (
                [parameters[place] for place in places],
                [[number[place] for place in bucket] for bucket, _ in here],
                [limit for _, limit in here],
                group,
                [sparse[place] for place in places],
                cap,
                unused,
                view,
                {number[place]: name for place, name in names.items() if place in number},
                *rest,
            )

        self.others = [Reducer(*part(places)) for places in others]
        self._gpu = parameters[0]._gpu if type(parameters[0]) is VirtualTensor else None
        with self._on_its_gpu():
            super().__init__(*part(own))

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        future = super()._run_allreduce_hook(bucket)  # type: ignore[misc]
        return future if self._gpu is None else ordered(future)

    def _set_forward_pass_work_handle(self, work: Any, *args: Any, **kwargs: Any) -> None:
        if self.others:
            raise unsupported(
                "uneven inputs (`join`) with DistributedDataParallel of a model on several GPUs"
            )
        self._forward_work = (
            work  # C++ holds it by pointer only, and asks for its result after it has waited
        )
        super()._set_forward_pass_work_handle(work, *args, **kwargs)

    def _autograd_hook(self, index: int) -> None:
        if self.others:
            raise unsupported(
                "DistributedDataParallel(mixed_precision=…) of a model on several GPUs"
            )
        super()._autograd_hook(index)  # type: ignore[misc]

    def _on_its_gpu(self) -> Any:
        return nullcontext() if self._gpu is None else made_on(self._gpu)


def _on_each_gpu(name: str) -> Any:
    inherited = getattr(c10d.Reducer, name)

    def method(self: Reducer, *args: Any, **kwargs: Any) -> Any:
        with self._on_its_gpu():
            result = inherited(self, *args, **kwargs)
        for other in self.others:
            result = getattr(other, name)(*args, **kwargs) or result
        return result

    return method


_EACH = (
    *(
        "_rebuild_buckets",
        "_get_zeros_like_grad_buckets",
        "prepare_for_backward",
        "_push_all_rebuilt_params",
        "_set_static_graph",
    ),
    *(
        "prepare_for_forward",
        "_delay_all_reduce",
        "_set_optimizer_in_backward",
        "_remove_autograd_hooks",
        "_check_reducer_finalized",
    ),
    *("_reset_state", "_update_process_group", "_set_mixed_precision_param_dtype"),
)
for _name in _EACH:
    setattr(Reducer, _name, _on_each_gpu(_name))
