"""What NCCL's process group accepts and refuses: 209 calls of collectives, by two ranks.

    torchrun --nproc-per-node 2 benchmarks/fidelity/rank_refusals.py [FILE]
    labkit torchrun --ranks 2 --like H100 benchmarks/fidelity/rank_refusals.py [FILE]

Rank 0 writes into FILE what each call answered: "accepted", or the type and the first line of its
error. `h100/rank_refusals.json` has the answers of two H100s. Calls that leave one real rank waiting
for the other are left out: lists of parts of several sizes, a list given to the wrong rank, a tensor
sent that is not dense.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float16", "bfloat16", "complex64", "bool"),
    *("int8", "int16", "int64", "uint8", "uint16", "uint32"),
)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")

Calls = dict[str, Callable[[], Any]]


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **options)


def strided() -> torch.Tensor:
    return ones(4, 8)[:, ::2]


def shapes_and_places(rank: int) -> Calls:
    """Return calls with tensors that are strided, on the CPU, or of another size or dtype than due."""

    def on_rank_0(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return tensors if rank == 0 else None

    double = {"dtype": torch.float64}
    square = [ones(4, 4), ones(4, 4)]
    on_cpu = [torch.ones(2), torch.ones(2)]
    return {
        "reduce_scatter_tensor, strided input": lambda: dist.reduce_scatter_tensor(ones(2, 4), strided()),
        "reduce_scatter_tensor, strided output": lambda: dist.reduce_scatter_tensor(ones(2, 8)[:, ::2], ones(4, 4)),
        "reduce_scatter_tensor, size": lambda: dist.reduce_scatter_tensor(ones(3), ones(4)),
        "reduce_scatter_tensor, dtype": lambda: dist.reduce_scatter_tensor(ones(2), ones(4, **double)),
        "reduce_scatter_tensor, on the CPU": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
        "reduce_scatter, strided inputs": lambda: dist.reduce_scatter(ones(4, 4), [strided(), strided()]),
        "reduce_scatter, strided output": lambda: dist.reduce_scatter(strided(), square),
        "all_gather, strided input": lambda: dist.all_gather(square, strided()),
        "all_gather, strided outputs": lambda: dist.all_gather([strided(), strided()], ones(4, 4)),
        "all_gather, on the CPU": lambda: dist.all_gather(on_cpu, torch.ones(2)),
        "all_gather_into_tensor, strided input": lambda: dist.all_gather_into_tensor(ones(8, 4), strided()),
        "all_gather_into_tensor, size": lambda: dist.all_gather_into_tensor(ones(7), ones(4)),
        "all_gather_into_tensor, dtype": lambda: dist.all_gather_into_tensor(ones(8), ones(4, **double)),
        "gather, strided input": lambda: dist.gather(strided(), on_rank_0(square), 0),
        "gather, strided outputs": lambda: dist.gather(ones(4, 4), on_rank_0([strided(), strided()]), 0),
        "gather, on the CPU": lambda: dist.gather(torch.ones(2), on_rank_0(on_cpu), 0),
        "scatter, strided output": lambda: dist.scatter(strided(), on_rank_0(square), 0),
        "scatter, strided inputs": lambda: dist.scatter(ones(4, 4), on_rank_0([strided(), strided()]), 0),
        "scatter, on the CPU": lambda: dist.scatter(torch.ones(2), on_rank_0(on_cpu), 0),
        "scatter, too few": lambda: dist.scatter(ones(2), [ones(2)], 0) if rank == 0 else None,
        "all_to_all_single, strided input": lambda: dist.all_to_all_single(ones(4, 4), strided()),
        "all_to_all, strided inputs": lambda: dist.all_to_all(square, [strided(), strided()]),
        "all_to_all_single, dtype": lambda: dist.all_to_all_single(ones(4), ones(4, **double)),
        "all_reduce, strided": lambda: dist.all_reduce(strided()),
        "all_reduce, transposed": lambda: dist.all_reduce(ones(4, 3).t()),
        "all_reduce, on the CPU": lambda: dist.all_reduce(torch.ones(2)),
        "broadcast, strided": lambda: dist.broadcast(strided(), 0),
    }


def dtypes(name: str) -> Calls:
    """Return calls with tensors of the dtype of this name."""
    dtype = getattr(torch, name)

    def zeros(count: int = 4) -> torch.Tensor:
        return torch.zeros(count, device="cuda").to(dtype)

    def all_reduce(op: Any) -> Callable[[], Any]:
        return lambda: dist.all_reduce(zeros(), op)

    calls = {f"all_reduce, {name}, {op}": all_reduce(getattr(dist.ReduceOp, op)) for op in REDUCTIONS}
    return calls | {
        f"all_reduce, {name}, PREMUL_SUM": all_reduce(dist._make_nccl_premul_sum(2.0)),
        f"reduce_scatter_tensor, {name}": lambda: dist.reduce_scatter_tensor(zeros(2), zeros()),
        f"reduce, {name}": lambda: dist.reduce(zeros(), 0),
        f"broadcast, {name}": lambda: dist.broadcast(zeros(), 0),
        f"all_gather_into_tensor, {name}": lambda: dist.all_gather_into_tensor(zeros(8), zeros()),
        f"all_to_all_single, {name}": lambda: dist.all_to_all_single(zeros(), zeros()),
    }


def answer(call: Callable[[], Any]) -> str:
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "accepted"


def main() -> dict[str, str]:
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    answers = {}
    for calls in (shapes_and_places(rank), *map(dtypes, DTYPES)):
        for name, call in calls.items():
            answers[name] = answer(call)
            dist.barrier()
    dist.destroy_process_group()
    return answers


if __name__ == "__main__":
    result = main()
    if sys.argv[1:] and os.environ["RANK"] == "0":
        with open(sys.argv[1], "w") as file:
            json.dump(result, file, indent=1)
