"""Run answers to the exercises of lesson 10 in ranks.

Ranks import no other file of the lesson.
"""

import contextlib
import operator
import os
import random
import sys
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.watched_collectives import LateValues, MessageNames
from labkit.checks.checking import Plain


def gradients_after(average_gradients: Any, gradients: Plain) -> Plain:
    """Let the answer average these gradients in a rank. Return the gradients and the parameters.

    A parameter of four numbers is a matrix. A frozen parameter is added at the end.
    """
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in gradients)
    for parameter, values in zip(model, gradients, strict=True):
        if values is not None:
            gradient = torch.tensor([float(value) for value in values])
            if len(values) == 4:
                gradient = gradient.view(2, 2)
            parameter.data = torch.ones_like(gradient)
            parameter.grad = gradient
    model.append(nn.Parameter(torch.ones(2), requires_grad=False))
    with LateValues():
        average_gradients(model)
    found = [
        None if parameter.grad is None else parameter.grad.flatten().tolist() for parameter in model
    ]
    return {"gradients": found, "parameters": [parameter.flatten().tolist() for parameter in model]}


def buffers_after(equal_buffers: Any, given: Plain) -> Plain:
    """Let the answer change the buffers of a BatchNorm layer in a rank.

    Return the running mean, the counter, and whether parameters and gradients are unchanged.
    """
    layer = nn.BatchNorm1d(len(given["mean"]))
    layer.running_mean = torch.tensor([float(value) for value in given["mean"]])
    layer.num_batches_tracked = torch.tensor(given["counter"])
    layer.weight.grad = torch.full_like(layer.weight, 1.0 + dist.get_rank())
    kept = [layer.weight.detach().clone() + dist.get_rank(), layer.weight.grad.clone()]
    layer.weight.data += dist.get_rank()
    with LateValues():
        equal_buffers(nn.Sequential(layer))
    now = [layer.weight.detach(), layer.weight.grad]
    return {
        "mean": layer.running_mean.tolist(),
        "counter": layer.num_batches_tracked.item(),
        "unchanged": all(map(torch.equal, now, kept)),
    }


def rows_of(my_rows: Any, case: Plain) -> Plain:
    """Return a rank's rows in each epoch, and what each global generator draws afterwards.

    `undisturbed` is what the generators draw if the answer does not run.
    """
    rank = dist.get_rank()
    drawn: list[list[float]] = []
    for epochs in ((), case["epochs"]):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(case["seeds"][rank])
        torch.rand(()), random.random(), numpy.random.rand()  # a state that is not that of any seed
        rows = [
            _row_numbers(my_rows(case["count"], rank, case["ranks"], epoch)) for epoch in epochs
        ]
        drawn.append([torch.rand(()).item(), random.random(), numpy.random.rand()])
    return {"rows": rows, "drawn": drawn[1], "undisturbed": drawn[0]}


def _row_numbers(answer: Any) -> Plain:
    try:
        return [operator.index(row) for row in answer]
    except TypeError:
        return type(answer).__name__


def accumulated(accumulate: Any, parts: Plain) -> Plain:
    """Let the answer accumulate gradients in a rank, with a layer under DDP.

    Return its gradient, its weights, the number of messages, the rows of each forward pass, and the
    most outputs of earlier forward passes that still existed when one began.
    """
    layer, rows, waiting = nn.Linear(2, 1, bias=False), [], 0
    # a graph keeps the output for the square's backward
    outputs: list[weakref.ref[torch.Tensor]] = []
    nn.init.constant_(layer.weight, 0.5)
    model = DistributedDataParallel(layer)

    def begin(layer: nn.Module, given: Any) -> None:
        nonlocal waiting
        rows.append(len(given[0]))
        waiting = max(waiting, sum(output() is not None for output in outputs))

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(lambda layer, given, output: outputs.append(weakref.ref(output)))
    with MessageNames() as messages:
        accumulate(model, [torch.tensor(part, dtype=torch.float32) for part in parts])
    gradient = None
    if layer.weight.grad is not None:
        gradient = layer.weight.grad[0].tolist()
    told = {
        "gradient": gradient,
        "messages": len(messages.names),
        "weight": layer.weight[0].tolist(),
    }
    return told | {"rows": rows, "waiting": waiting}


class DeathError(BaseException):
    """Error that ends a rank in the middle of a step, as if its process had been killed.

    It does not derive from Exception, so that `except Exception` does not catch it.
    """


def life(train: Any, inputs: Plain) -> Plain:
    """Train in a rank. Return the steps that began, and the weight and momentum at the end.

    Also return what the file held when each step began, and how often this rank wrote a file,
    replaced the checkpoint and removed the checkpoint.
    """
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    model, begun, files = nn.ParameterList([weight]), [], []
    done = _watched_files(inputs["path"])

    def work(step: int) -> None:
        begun.append(step)
        dist.barrier()  # as in training, where no rank is a step ahead of another
        checksum = None
        if os.path.exists(inputs["path"]):
            checksum = zlib.crc32(Path(inputs["path"]).read_bytes())
        files.append(checksum)
        dist.barrier()  # nobody writes while another looks
        if step == inputs["dies"]:
            raise DeathError
        optimizer.zero_grad()
        gradient = inputs["gradients"][step % inputs["steps"]]  # some answers do too many steps
        (weight * gradient).backward()
        optimizer.step()

    with contextlib.suppress(DeathError):
        train(model, optimizer, work, inputs["steps"], inputs["path"])
    momentum = optimizer.state[weight].get("momentum_buffer")
    told = {
        "begun": begun,
        "files": files,
        "weight": weight.item(),
        "momentum": None if momentum is None else momentum.item(),
    }
    return told | done


def _watched_files(path: str) -> dict[str, int]:
    """Count, in the block, how this process changes `path` and the files beside it.

    `placed` counts files of the same folder that replaced the checkpoint, and `moved` those of
    another folder. `overwritten` counts how often the checkpoint itself was opened for writing.
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
        elif event == "os.rename" and os.path.realpath(os.fsdecode(given[0])) == path:
            done["removed"] += 1  # under another name, it is not found
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
