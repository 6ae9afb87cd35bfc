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

from virtualgpu.collectives.group import Options, ProcessGroupNCCL, end_coalescing, let_watchdogs_look, made_on, ordered
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine
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
        },
    )
    yield c10d, {"ProcessGroupNCCL": ProcessGroupNCCL, "_hash_tensors": lambda xs: hash(tuple(x.cpu().numpy().tobytes() for x in xs))}
    yield dist, {"ProcessGroupNCCL": ProcessGroupNCCL}
    yield dist, {"Reducer": Reducer, "_verify_params_across_processes": verify_parameters}
    yield gc, {"collect": _collecting(machine, gc.collect)}
    yield dist.ProcessGroup, _coalescing(dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing)


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
        return end_coalescing(backend) if isinstance(backend, ProcessGroupNCCL) else end(self, device)

    return {"_start_coalescing": start_coalescing, "_end_coalescing": finish_coalescing}


def verify_parameters(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
    """As verify_params_across_processes (torch/csrc/distributed/c10d/reducer.cpp), which moves what it compares by `.to(device)`."""
    if not parameters or type(parameters[0]) is not VirtualTensor:
        c10d._verify_params_across_processes(group, parameters, logger)
        return
    device, rank = parameters[0].device, group.rank()
    if any(x.device != device for x in parameters):  # C++ would put gradients of all GPUs into one bucket
        raise unsupported("DistributedDataParallel of a model whose parameters lie on several GPUs")
    count = torch.tensor([len(parameters)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    group.allgather([counts], [count]).wait()
    for other, number in enumerate(counts):
        if number.item() != len(parameters):
            raise RuntimeError(
                f"DDP expects same model across all ranks, but Rank {rank} has {len(parameters)} params, while rank {other} has "
                f"inconsistent {number.item()} params."
            )
    first = torch.tensor([n for p in parameters for n in (*p.size(), *p.stride())], dtype=torch.int64).to(device)
    group.broadcast([first]).wait()
    numbers = iter(first.tolist())
    for index, parameter in enumerate(parameters):
        for what, own in (("sizes", parameter.size()), ("strides", parameter.stride())):
            if [next(numbers) for _ in own] != list(own):
                raise RuntimeError(
                    f"[{rank}]: params[{index}] in this process with {what} {list(own)} appears not to match {what} of the same param in "
                    "process 0."
                )


class Reducer(c10d.Reducer):
    """PyTorch's own, in C++."""

    def __init__(self, parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        self._gpu = parameters[0]._gpu if type(parameters[0]) is VirtualTensor else None
        with self._on_its_gpu():
            super().__init__(parameters, *args, **kwargs)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        future = super()._run_allreduce_hook(bucket)  # type: ignore[misc]
        return future if self._gpu is None else ordered(future)

    def _set_forward_pass_work_handle(self, work: Any, *args: Any, **kwargs: Any) -> None:
        self._forward_work = work  # C++ holds it by pointer only, and asks for its result after it has waited
        super()._set_forward_pass_work_handle(work, *args, **kwargs)

    def _on_its_gpu(self) -> Any:
        return nullcontext() if self._gpu is None else made_on(self._gpu)


def _on_its_gpu(name: str) -> Any:
    inherited = getattr(c10d.Reducer, name)

    def method(self: Reducer, *args: Any, **kwargs: Any) -> Any:
        with self._on_its_gpu():
            return inherited(self, *args, **kwargs)

    return method


for _name in ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "prepare_for_backward", "_push_all_rebuilt_params", "_set_static_graph"):
    setattr(Reducer, _name, _on_its_gpu(_name))
