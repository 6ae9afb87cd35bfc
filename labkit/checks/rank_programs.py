"""What the checks of lesson 10 have each rank do with an answer. Ranks import this file and torch, and nothing else of the lessons."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.checks.checking import Plain, describe


def gradients_after(average_gradients: Any, gradients: Plain) -> Plain:
    """In a rank: a model with these gradients, and what they and the parameters are afterwards."""
    model = nn.ParameterList(nn.Parameter(torch.ones(len(values))) for values in gradients)
    model.append(nn.Parameter(torch.ones(2), requires_grad=False))
    for parameter, values in zip(model, gradients, strict=False):
        parameter.grad = torch.tensor([float(value) for value in values])
    average_gradients(model)
    return {
        "gradients": [None if parameter.grad is None else parameter.grad.tolist() for parameter in model],
        "parameters": [parameter.tolist() for parameter in model],
    }


def accumulated(accumulate: Any, parts: Plain) -> Plain:
    """In a rank: the gradient of a layer under DDP that the answer leaves, the weights, and how many messages were sent."""
    layer, messages = nn.Linear(2, 1, bias=False), 0
    nn.init.constant_(layer.weight, 0.5)
    model = DistributedDataParallel(layer)

    def counted(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal messages
        messages += 1
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, counted)
    accumulate(model, [torch.tensor(part, dtype=torch.float32) for part in parts])
    gradient = None if layer.weight.grad is None else layer.weight.grad[0].tolist()
    return {"gradient": gradient, "messages": messages, "weight": layer.weight[0].tolist()}


class DeathError(BaseException):
    """The end of a rank. No `except Exception` of the answer stops it."""


def life(train: Any, inputs: Plain) -> Plain:
    """In a rank: the steps that were begun, the weight and the momentum at the end, and how often this rank has saved a file."""
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    model, begun, saved, save = nn.ParameterList([weight]), [], 0, torch.save

    def work(step: int) -> None:
        begun.append(step)
        dist.barrier()  # as in training, where no rank is a step ahead of another
        if step == inputs["dies"]:
            raise DeathError
        optimizer.zero_grad()
        (weight * inputs["gradients"][step]).backward()
        optimizer.step()

    def counted(*arguments: Any, **keywords: Any) -> None:
        nonlocal saved
        saved += 1
        save(*arguments, **keywords)

    torch.save = counted
    try:
        train(model, optimizer, work, inputs["steps"], inputs["path"])
    except DeathError:
        pass
    finally:
        torch.save = save
    momentum = optimizer.state[weight].get("momentum_buffer")
    return {"begun": begun, "weight": weight.item(), "momentum": None if momentum is None else momentum.item(), "saved": saved}


def cut_layers(two_layers: Any, case: Plain) -> Plain:
    """In a rank: what the answer returns for this rank's rows of the first layer and columns of the second."""
    tensors = {name: torch.tensor(case[name], dtype=torch.float32) for name in ("x", "first", "first_bias", "second", "second_bias")}
    mine = slice(2 * case["rank"], 2 * case["rank"] + 2)
    with torch.no_grad():
        answer = two_layers(
            tensors["x"],
            tensors["first"][mine].clone(),
            tensors["first_bias"][mine].clone(),
            tensors["second"][:, mine].clone(),
            tensors["second_bias"],
        )
    return describe(answer)
