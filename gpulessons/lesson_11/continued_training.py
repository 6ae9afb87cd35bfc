"""Save a checkpoint in each rank, continue with the learner's function, and compare."""

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from labkit.checks.checking import Plain

RIGHT = "right"
UNCHANGED = "as before the training"
UNREADABLE = "no checkpoint of a model and an optimizer"
FIRST, ANSWER = "first", "answer"  # folders with the same checkpoint, of which the answer gets one


class Layer(nn.Linear):
    """Linear layer that notes on which device it got memory for parameters that are not sharded."""

    def __init__(self, width: int, undivided: list[str]) -> None:
        super().__init__(width, width)
        self.undivided = undivided

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Convert the parameters, as `to_empty` and `to` do, and note the unsharded ones.

        The arguments are those of `nn.Module._apply`.
        """
        applied = super()._apply(fn, recurse)
        for parameter in self.parameters():
            if not isinstance(parameter, DTensor) and parameter.device.type != "meta":
                self.undivided.append(parameter.device.type)
        return applied


def network(case: Plain, undivided: list[str] | None = None) -> nn.Sequential:
    """Return the case's network on the current device, in which some layers have no parameters.

    `undivided` gets the devices on which unsharded parameters got memory.
    """
    noted = [] if undivided is None else undivided
    layers = [[Layer(case["width"], noted), nn.Tanh()] for _ in range(case["layers"])]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def batches(
    case: Plain, rank: int, ranks: int, device: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of each batch that belong to a rank."""
    generator = torch.Generator().manual_seed(case["seed"])
    drawn = []
    for scale in case["scales"]:
        x = torch.randn(case["rows"], case["width"], generator=generator)
        y = scale * torch.randn(case["rows"], case["width"], generator=generator)
        drawn.append((x.chunk(ranks)[rank].to(device), y.chunk(ranks)[rank].to(device)))
    return drawn


def go_on_in_rank(go_on: Any, case: Plain) -> Plain:
    """Let the answer continue from a checkpoint in a rank.

    Return the device on which it built the model, how it sharded the model, and the training that
    its checkpoint belongs to.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of a checkpoint that replaces another
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        _save_first(case)
    dist.barrier()
    built: list[str] = []
    undivided: list[str] = []

    def build() -> nn.Sequential:
        model = network(case, undivided)
        built.append(str(next(model.parameters()).device.type))
        return model

    try:
        model = go_on(build, str(Path(case["folder"], ANSWER)), batches(case, rank, ranks, "cuda"))
    except CheckpointException as error:  # it is no Exception, so no check would report it
        raise RuntimeError(str(next(iter(error.failures.values()))[0])) from None
    dist.barrier()
    if not isinstance(model, nn.Module):
        return {"returned": type(model).__name__}
    parameters = list(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {
        "built": built,
        "undivided": undivided,
        "whole": sum(not isinstance(p, DTensor) or p.placements != (Shard(0),) for p in parameters),
        "parameters": len(parameters),
        "apart": sum(isinstance(layer, FSDPModule) for layer in layers),
        "layers": len(layers),
        "saved": _training_of(case) if rank == 0 else "",
    }


def _save_first(case: Plain) -> None:
    """Train for two steps on this rank alone, and save the model and its optimizer.

    The checkpoint is saved twice, under the names FIRST and ANSWER.
    """
    torch.manual_seed(case["seed"])
    model = network(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=case["lr"])
    for x, y in batches(case, 0, 1, "cpu")[:2]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), -y).backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    for name in (FIRST, ANSWER):
        folder = Path(case["folder"], name)
        checkpoint.save(
            {"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True
        )


def _training_of(case: Plain) -> str:
    """Return the training to which the weights and averages in the answer's folder belong."""
    try:
        answer = _weights_and_averages(*_loaded(case, ANSWER))
    except (CheckpointException, RuntimeError):
        return UNREADABLE
    trainings: dict[str, dict[str, Any]] = {
        RIGHT: {},
        UNCHANGED: {"steps": 0},
        "those of a training without clipping": {"limit": 1e9},
        "those of a training whose Adam starts anew": {"state": False},
        "those of a training whose Adam has another learning rate": {"lr": 1e-3},
        "those of a training whose gradients add up over the batches": {"clear": False},
        "those of a training on the rows of rank 0 alone": {"part": 0},
        "those of a training that clips each parameter by itself": {"clip": clip_one_by_one},
        "those of a training that scales gradients below the limit, too": {"clip": scale_always},
        "those of a training whose loss is a sum": {"reduction": "sum"},
        "those of a training whose Adam starts anew, with its own learning rate": {
            "state": False,
            "lr": 1e-3,
        },
        "those of a training whose norm is that of each rank's own rows": {
            "clip": functools.partial(clip_by_own_rows, case["ranks"])
        },
        "those of a training that clips each value by itself": {"clip": nn.utils.clip_grad_value_},
        "those of a training whose loss is divided by the number of ranks": {
            "factor": 1 / case["ranks"]
        },
        "those of a training on each batch twice": {"times": 2},
    }
    for steps in range(1, len(case["scales"])):
        whole = f"those of a training on {steps} of {len(case['scales'])} batches"
        trainings[whole] = {"steps": steps}
    for limit in OTHER_LIMITS:
        trainings[f"those of a training that clips to {limit:g}"] = {"limit": limit}
    for name, options in trainings.items():
        if _near(answer, _trained(case, **options)):
            return name
    return "those of another training"


OTHER_LIMITS = (0.1, 0.5, 2.0, 5.0, 10.0)  # of the norm. The exercise asks for 1.
Clipping = Callable[[Iterable[nn.Parameter], float], Any]


def clip_one_by_one(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clip the gradient of each parameter by its own norm. This is one of the known mistakes."""
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, limit)


def clip_by_own_rows(ranks: int, parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clip each rank's rows of the gradients by their own norm. This is a known mistake."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for rows in zip(*(gradient.chunk(ranks) for gradient in gradients), strict=True):
        norm = nn.utils.get_total_norm(rows)
        torch._foreach_mul_(list(rows), (limit / (norm + 1e-6)).clamp(max=1.0))


def scale_always(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale the gradients to the limit even if their norm is below it. This is a known mistake."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factor = limit / nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, factor)


def _trained(
    case: Plain,
    limit: float = 1.0,
    state: bool = True,
    lr: float | None = None,
    clear: bool = True,
    part: int | None = None,
    steps: int | None = None,
    clip: Clipping = nn.utils.clip_grad_norm_,
    reduction: str = "mean",
    factor: float = 1.0,
    times: int = 1,
) -> list[torch.Tensor]:
    model, optimizer = _loaded(case, FIRST)
    if not state:
        optimizer = torch.optim.Adam(model.parameters(), lr=case["lr"])
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    whole = batches(case, 0, 1, "cpu")
    if part is not None:
        whole = batches(case, part, case["ranks"], "cpu")
    for x, y in whole[:steps] * times:
        if clear:
            optimizer.zero_grad()
        (factor * nn.functional.mse_loss(model(x), y, reduction=reduction)).backward()
        clip(model.parameters(), limit)
        optimizer.step()
    return _weights_and_averages(model, optimizer)


def _loaded(case: Plain, name: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = network(case)
    optimizer = torch.optim.Adam(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    folder = Path(case["folder"], name)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return model, optimizer


def _weights_and_averages(
    model: nn.Sequential, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    averages = [
        optimizer.state[parameter]["exp_avg"]
        for parameter in parameters
        if parameter in optimizer.state
    ]
    return [tensor.detach() for tensor in (*parameters, *averages)]


def _near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    if len(found) != len(expected):
        return False
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True)
    )
