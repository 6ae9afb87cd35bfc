"""What collectives write if their tensors are not contiguous and NCCL's process group accepts them.

    torchrun --nproc-per-node 2 benchmarks/fidelity/rank_strides.py FILE
    labkit torchrun --ranks 2 --like H100 benchmarks/fidelity/rank_strides.py FILE

FILE gets, for each call and rank, the whole memory under the tensor that receives, or the error. The
memory under each tensor has 64 elements, so that no call reads or writes beyond it. Each rank also
appends its answers to FILE.RANK at once, so that a call that hangs loses only what follows it.
"""

import json
import sys
import warnings

import torch
import torch.distributed as dist

SIZE = 64


def memory(rank, first):
    """Return 64 elements that differ between ranks and positions."""
    return torch.arange(SIZE, device="cuda", dtype=torch.float32) + first + 1000 * rank


# Views of 8 elements, and of 16, of a memory of 64 elements.
SMALL = {
    "dense": lambda x: x[:8].view(2, 4),
    "transposed": lambda x: x[:8].view(4, 2).t(),
    "every second": lambda x: x[:16].view(2, 8)[:, ::2],
    "columns": lambda x: x[:16].view(4, 4)[:, :2].t(),
}
LARGE = {
    "dense": lambda x: x[:16].view(4, 4),
    "transposed": lambda x: x[:16].view(4, 4).t(),
    "every second": lambda x: x[:32].view(4, 8)[:, ::2],
    "expanded": lambda x: x[:4].expand(4, 4),
}


def calls(rank):
    """Return functions by name. Each returns the memory under the tensor that receives."""
    found = {}

    def add(name, function):
        found[name] = function

    for small, view in SMALL.items():
        for large, view_large in LARGE.items():
            if small == large == "dense":
                continue

            def reduce_scatter_tensor(view=view, view_large=view_large):
                into, source = memory(rank, -500), memory(rank, 0)
                dist.reduce_scatter_tensor(view(into), view_large(source))
                return into

            def all_gather_into_tensor(view=view, view_large=view_large):
                into, source = memory(rank, -500), memory(rank, 0)
                dist.all_gather_into_tensor(view_large(into), view(source))
                return into

            def all_to_all_single(view=view, view_large=view_large):
                into, source = memory(rank, -500), memory(rank, 0)
                dist.all_to_all_single(view_large(into), view_large(source))
                return into

            add(f"reduce_scatter_tensor, {small} output, {large} input", reduce_scatter_tensor)
            add(f"all_gather_into_tensor, {small} input, {large} output", all_gather_into_tensor)
            if small == "dense":
                add(f"all_to_all_single, {large}", all_to_all_single)
        for other, view_other in SMALL.items():
            if small == other == "dense":
                continue

            def scatter(view=view, view_other=view_other):
                into, first, second = memory(rank, -500), memory(rank, 0), memory(rank, 100)
                parts = [view_other(first), view_other(second)] if rank == 0 else None
                dist.scatter(view(into), parts, src=0)
                return into

            def gather(view=view, view_other=view_other):
                first, second, source = memory(rank, -500), memory(rank, -600), memory(rank, 0)
                parts = [view_other(first), view_other(second)] if rank == 0 else None
                dist.gather(view(source), parts, dst=0)
                return torch.cat([first, second])

            def reduce_scatter(view=view, view_other=view_other):
                into, first, second = memory(rank, -500), memory(rank, 0), memory(rank, 100)
                dist.reduce_scatter(view(into), [view_other(first), view_other(second)])
                return into

            def all_gather(view=view, view_other=view_other):
                first, second, source = memory(rank, -500), memory(rank, -600), memory(rank, 0)
                dist.all_gather([view_other(first), view_other(second)], view(source))
                return torch.cat([first, second])

            def all_to_all(view=view, view_other=view_other):
                first, second = memory(rank, -500), memory(rank, -600)
                sources = memory(rank, 0), memory(rank, 100)
                dist.all_to_all([view(first), view(second)], [view_other(x) for x in sources])
                return torch.cat([first, second])

            add(f"scatter, {small} output, {other} parts", scatter)
            add(f"gather, {small} input, {other} parts", gather)
            add(f"reduce_scatter, {small} output, {other} parts", reduce_scatter)
            add(f"all_gather, {small} input, {other} parts", all_gather)
            add(f"all_to_all, {small} outputs, {other} inputs", all_to_all)
        for name in ("all_reduce", "broadcast", "reduce"):

            def in_place(view=view, name=name):
                x = memory(rank, 0)
                arguments = () if name == "all_reduce" else (0,)
                getattr(dist, name)(view(x), *arguments)
                return x

            if small != "dense":
                add(f"{name}, {small}", in_place)
    return found


def answer(call):
    """Return the elements that a call returns, or its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call().tolist()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(1, device="cuda"))
    answers = {}
    only_root_has_parts = ("scatter", "gather")  # a refusal by the root alone leaves the other waiting
    ordered = sorted(calls(rank).items(), key=lambda item: item[0].startswith(only_root_has_parts))
    with open(f"{sys.argv[1]}.{rank}", "w") as progress:
        for name, call in ordered:
            answers[name] = answer(call)
            progress.write(json.dumps([name, answers[name]]) + "\n")
            progress.flush()
    torch.cuda.synchronize()
    both = [None, None]
    dist.all_gather_object(both, answers)
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "ranks": both}, file)
        print(len(answers), "calls,", sum(isinstance(answer, str) for answer in answers.values()), "refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
