"""What the checks of lessons 10 and 11 have each rank do with an answer. Of the lessons, ranks import this file alone."""

import contextlib
import operator
import os
import random
import sys
import time
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.checks.checking import Plain, describe
from labkit.checks.sent_bytes import SentBytes

LATE = 0.3  # seconds: long enough for another rank to read a gradient that it did not wait for


class _LateCollective(TorchDispatchMode):
    """Delay the first collective of this rank. A rank that does not wait for its own then reads it too early, every time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            time.sleep(self._seconds)
            self._seconds = 0.0
        return function(*args, **(kwargs or {}))


def gradients_after(average_gradients: Any, gradients: Plain) -> Plain:
    """In a rank: a model with these gradients, its last parameter frozen, and what its gradients and parameters are afterwards."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2 if values is None else len(values))) for values in gradients)
    for parameter, values in zip(model, gradients, strict=True):
        parameter.grad = None if values is None else torch.tensor([float(value) for value in values])
    model.append(nn.Parameter(torch.ones(2), requires_grad=False))
    with _LateCollective(LATE if dist.get_rank() else 0.0):
        average_gradients(model)
    found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in model]
    return {"gradients": found, "parameters": [parameter.tolist() for parameter in model]}


def rows_of(my_rows: Any, case: Plain) -> Plain:
    """In a rank: its rows in each epoch, what each global generator draws then, and what it draws where nothing is asked."""
    rank = dist.get_rank()
    drawn: list[list[float]] = []
    for epochs in ((), case["epochs"]):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(case["seeds"][rank])
        torch.rand(()), random.random(), numpy.random.rand()  # a state that is not that of any seed
        rows = [_row_numbers(my_rows(case["count"], rank, case["ranks"], epoch)) for epoch in epochs]
        drawn.append([torch.rand(()).item(), random.random(), numpy.random.rand()])
    return {"rows": rows, "drawn": drawn[1], "undisturbed": drawn[0]}


def _row_numbers(answer: Any) -> Plain:
    try:
        return [operator.index(row) for row in answer]
    except TypeError:
        return type(answer).__name__


class _Messages(TorchDispatchMode):
    """The names of collectives but barriers and DDP's own, by which the ranks agree where gradients lie in buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if function != torch.ops.c10d.barrier.default and any(tensor.dtype != torch.int32 for tensor in tensors):
                self.names.append(function._schema.name)
        return function(*args, **kwargs)


def accumulated(accumulate: Any, parts: Plain) -> Plain:
    """In a rank: what the answer does with a layer under DDP.

    The gradient that it leaves, the weights, how many messages were sent, the rows of each forward, and the most outputs of earlier ones
    that were there still when one began.
    """
    layer, rows, waiting = nn.Linear(2, 1, bias=False), [], 0
    outputs: list[weakref.ref[torch.Tensor]] = []  # a graph keeps the output for the square's backward
    nn.init.constant_(layer.weight, 0.5)
    model = DistributedDataParallel(layer)

    def begin(layer: nn.Module, given: Any) -> None:
        nonlocal waiting
        rows.append(len(given[0]))
        waiting = max(waiting, sum(output() is not None for output in outputs))

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(lambda layer, given, output: outputs.append(weakref.ref(output)))
    with _Messages() as messages:
        accumulate(model, [torch.tensor(part, dtype=torch.float32) for part in parts])
    gradient = None if layer.weight.grad is None else layer.weight.grad[0].tolist()
    told = {"gradient": gradient, "messages": len(messages.names), "weight": layer.weight[0].tolist()}
    return told | {"rows": rows, "waiting": waiting}


class DeathError(BaseException):
    """The end of a rank. No `except Exception` of the answer stops it."""


def life(train: Any, inputs: Plain) -> Plain:
    """In a rank: the steps that were begun, what the file held when each began, the weight and the momentum at the end.

    Also how often this rank wrote a file, put one in the checkpoint's place, and removed the checkpoint.
    """
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    model, begun, files = nn.ParameterList([weight]), [], []
    done = _watched_files(inputs["path"])

    def work(step: int) -> None:
        begun.append(step)
        dist.barrier()  # as in training, where no rank is a step ahead of another
        files.append(zlib.crc32(Path(inputs["path"]).read_bytes()) if os.path.exists(inputs["path"]) else None)
        dist.barrier()  # nobody writes while another looks
        if step == inputs["dies"]:
            raise DeathError
        optimizer.zero_grad()
        (weight * inputs["gradients"][step]).backward()
        optimizer.step()

    with contextlib.suppress(DeathError):
        train(model, optimizer, work, inputs["steps"], inputs["path"])
    momentum = optimizer.state[weight].get("momentum_buffer")
    told = {"begun": begun, "files": files, "weight": weight.item(), "momentum": None if momentum is None else momentum.item()}
    return told | done


def _watched_files(path: str) -> dict[str, int]:
    """Counts, for as long as this process lives, what it does to `path` and the files beside it.

    `placed` counts files of the same folder that took the checkpoint's place, `moved` those of another folder. `overwritten` counts how
    often the checkpoint itself was opened for writing.
    """
    done = dict.fromkeys(("saved", "placed", "moved", "overwritten", "removed"), 0)
    save, folder = torch.save, os.path.dirname(path)

    def wrote(file: str) -> None:
        place = os.path.realpath(file)
        done["saved"] += os.path.dirname(place) == folder
        done["overwritten"] += place == path

    def watch(event: str, given: tuple) -> None:
        if event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR):
            wrote(given[0])
        elif event == "os.remove":
            done["removed"] += os.path.realpath(os.fsdecode(given[0])) == path
        elif event == "os.rename" and os.path.realpath(os.fsdecode(given[1])) == path:
            source = os.path.realpath(os.fsdecode(given[0]))
            done["placed" if source.startswith(os.path.join(folder, "")) else "moved"] += 1

    def counted(*arguments: Any, **keywords: Any) -> None:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, str | os.PathLike):
                wrote(os.fspath(value))  # opened in C++, where no audit hook sees it
        save(*arguments, **keywords)

    sys.addaudithook(watch)
    torch.save = counted
    return done


def cut_layers(two_layers: Any, case: Plain) -> Plain:
    """Return what the answer gives for this rank's rows of the first layer and columns of the second, what it changed, and what it sent."""
    tensors = {name: torch.tensor(case[name], dtype=torch.float32) for name in ("x", "first", "first_bias", "second", "second_bias")}
    own = len(case["first"]) // case["ranks"]
    mine = slice(own * case["rank"], own * (case["rank"] + 1))
    tensors |= {"first": tensors["first"][mine], "first_bias": tensors["first_bias"][mine], "second": tensors["second"][:, mine]}
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad(), SentBytes() as sent:
        answer = two_layers(**given)
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, given[name])]
    return describe(answer) | {"changed": changed, "sent": sent.total}


RIGHT = "right"


def layer_backward(backward: Any, case: Plain) -> Plain:
    """In a rank with a GPU: what the answer makes of this rank's rows of a weight, and which known values its gradients are.

    `peak` is the memory on top of what was given at the worst moment, in whole weights.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(case["seed"])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float().cuda()

    weight = drawn(case["outputs"], case["inputs"])
    xs, upstreams = ([drawn(case["rows"], width) for _ in range(ranks)] for width in (case["inputs"], case["outputs"]))
    shard, x, upstream = weight.chunk(ranks)[rank].clone(), xs[rank], upstreams[rank]
    given = [tensor.clone() for tensor in (x, shard, upstream)]
    dist.all_reduce(upstream.T @ x)  # cuBLAS takes its workspace, and keeps it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    with torch.no_grad(), _Messages() as messages:
        answer = backward(x, shard, upstream)
        torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / weight.nbytes
    changed = [not torch.equal(now, before) for now, before in zip((x, shard, upstream), given, strict=True)]
    names = [name for name, other in zip(("x", "shard", "upstream"), changed, strict=True) if other]
    if not isinstance(answer, tuple | list) or [isinstance(part, torch.Tensor) for part in answer] != [True, True]:
        return {"returned": describe(answer)["type"]}
    xs[rank], _, upstreams[rank] = given
    all_x = torch.stack([upstream @ weight for upstream in upstreams])
    whole = torch.stack([upstream.T @ x for upstream, x in zip(upstreams, xs, strict=True)])
    mean = whole.mean(0)
    parts = {
        RIGHT: mean.chunk(ranks)[rank],
        "the sum over the ranks": whole.sum(0).chunk(ranks)[rank],
        "that of this rank's data alone": whole[rank].chunk(ranks)[rank],
        "the mean, divided once more": mean.chunk(ranks)[rank] / ranks,
        "that of the whole weight": mean,
    }
    for other in set(range(ranks)) - {rank}:
        parts[f"that of rank {other}'s rows of the weight"] = mean.chunk(ranks)[other]
    of_x = {RIGHT: all_x[rank], "the mean over the ranks": all_x.mean(0), "the sum over the ranks": all_x.sum(0)}
    found = {"x": _which(answer[0], of_x), "part": _which(answer[1], parts)}
    return found | {"peak": peak, "all_reduce": any("allreduce" in name for name in messages.names), "changed": names}


def _which(found: torch.Tensor, known: dict[str, torch.Tensor]) -> str:
    """The name of the known tensor that was found, or what else it is."""
    for name, values in known.items():
        if found.shape == values.shape and found.device == values.device and torch.allclose(found.float(), values, rtol=1e-4, atol=1e-3):
            return name
    right = known[RIGHT]
    return "other numbers" if found.shape == right.shape else f"a tensor of {list(found.shape)} where {list(right.shape)} was due"


def adam_steps(sharded_adam: Any, case: Plain) -> Plain:
    """In a rank with a GPU: how many parameters are not as after each step of Adam, how many have not moved, how many gradients are not
    what they were before the step, and the bytes that are kept.

    `whole` are the bytes of Adam's whole state. The parameter number `idle` has no gradient.
    """
    generator = torch.Generator().manual_seed(case["seed"])
    base = torch.cuda.memory_allocated()

    def drawn() -> list[torch.Tensor]:
        shapes = [(case["width"], case["width"])] * case["layers"] + [(case["width"],)]
        shapes.insert(case["idle"], (case["width"],))
        return [torch.randn(shape, generator=generator).cuda() for shape in shapes]

    model = nn.ParameterList(drawn())
    step = sharded_adam(model, case["lr"])
    if not callable(step):
        return {"returned": type(step).__name__}
    trained = [number for number in range(len(model)) if number != case["idle"]]
    start, after, altered = [p.detach().cpu() for p in model], [], []
    gradients: list[list[torch.Tensor]] = []
    for _ in range(case["steps"]):
        gradients.append([gradient.cpu() for gradient in drawn()])
        for number in trained:
            model[number].grad = gradients[-1][number].cuda()
        step()
        after.append([parameter.detach().cpu() for parameter in model])
        same = [p.grad is not None and torch.equal(p.grad.cpu(), given) for p, given in zip(model, gradients[-1], strict=True)]
        altered.append(sum(not same[number] for number in trained) + (model[case["idle"]].grad is not None))
    held = sum(tensor.nbytes for p in model for tensor in (p, p.grad) if tensor is not None)
    kept = torch.cuda.memory_allocated() - base - held
    due = nn.ParameterList(tensor.clone() for tensor in start)
    optimizer, wrong, still = torch.optim.Adam(due.parameters(), lr=case["lr"]), [], []
    for before, found, given in zip([start, *after], after, gradients, strict=False):
        for number in trained:
            due[number].grad = given[number]
        optimizer.step()
        far = [(one - other.detach()).abs().max().item() for one, other in zip(found, due, strict=True)]
        wrong.append(sum(not distance <= 0.05 * case["lr"] for distance in far))
        still.append(sum(torch.equal(before[number], found[number]) for number in trained))
    return {"wrong": wrong, "still": still, "altered": altered, "kept": kept, "whole": 2 * sum(model[number].nbytes for number in trained)}


def groups_of(my_groups: Any, meshes: Plain) -> Plain:
    """In a rank, for each mesh: the ranks in its groups, and whom an all_reduce in each reaches, if all have the groups that are due."""
    return [_groups_in(my_groups, rows, columns) for rows, columns in meshes]


def _groups_in(my_groups: Any, rows: int, columns: int) -> Plain:
    rank, answer = dist.get_rank(), my_groups(rows, columns)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        told: Plain = type(answer).__name__
    else:
        told = [
            sorted(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else _no_group(group) for group in answer
        ]
    everywhere: list[Plain] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, told)
    reached = []
    if all(told == due_groups(rank, rows, columns) for rank, told in enumerate(everywhere)):
        for group in answer:
            x = torch.tensor(1 << rank)
            dist.all_reduce(x, group=group)
            reached.append([other for other in range(len(everywhere)) if int(x) >> other & 1])
    return {"groups": told, "reached": reached}


def _no_group(group: Any) -> str:
    """What is not a group of this rank's: new_group gives a rank a mark, which is a number, for a group that it is not in."""
    return "a group of others" if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER else type(group).__name__


def due_groups(rank: int, rows: int, columns: int) -> list[list[int]]:
    """The ranks of this rank's row, and those of its column."""
    row, column = divmod(rank, columns)
    return [[row * columns + other for other in range(columns)], [other * columns + column for other in range(rows)]]
