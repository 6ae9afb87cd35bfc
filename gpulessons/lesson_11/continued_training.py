"""What the check of 11.7 has ranks do: save a checkpoint, continue with the learner's function, and compare."""

import itertools
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from labkit.checks.checking import Plain

RIGHT = "right"
UNCHANGED = "as before the training"
FIRST, ANSWER = "first", "answer"  # folders: the checkpoint that the answer gets, and its copy for the answer
BEFORE = 2  # steps that the first checkpoint has behind it


def network(case: Plain) -> nn.Sequential:
    """Return a network on the current device, in which some layers have no parameters."""
    width = case["width"]
    layers = [[nn.Linear(width, width), nn.Tanh()] for _ in range(case["layers"])]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def batches(case: Plain, rank: int, ranks: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of each batch that belong to a rank."""
    generator = torch.Generator().manual_seed(case["seed"])
    drawn = []
    for _ in range(case["steps"]):
        x = torch.randn(case["rows"], case["width"], generator=generator)
        y = 20 * torch.randn(case["rows"], case["width"], generator=generator)
        drawn.append((x.chunk(ranks)[rank].to(device), y.chunk(ranks)[rank].to(device)))
    return drawn


def save_first(_: Any, case: Plain) -> Plain:
    """In a rank: train some steps under FSDP and save the model and its optimizer."""
    _quiet()
    torch.manual_seed(case["seed"])
    with torch.device("cuda"):
        model = network(case)
    for part in (*model[::2], model):
        fully_shard(part)
    optimizer = torch.optim.Adam(model.parameters(), lr=case["lr"])
    for x, y in batches(case, dist.get_rank(), dist.get_world_size(), "cuda")[:BEFORE]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), -y).backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(case["folder"], FIRST))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(Path(case["folder"], FIRST), Path(case["folder"], ANSWER))
    return None


def go_on_in_rank(go_on: Any, case: Plain) -> Plain:
    """In a rank: let the answer continue. Report where it built the model, and how the model is divided."""
    _quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    built = []

    def build() -> nn.Sequential:
        model = network(case)
        built.append(str(next(model.parameters()).device.type))
        return model

    folder = str(Path(case["folder"], ANSWER))
    model = go_on(build, folder, batches(case, rank, ranks, "cuda"))
    dist.barrier()
    if not isinstance(model, nn.Module):
        return {"returned": type(model).__name__}
    parameters = list(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {
        "built": built,
        "whole": sum(not isinstance(p, DTensor) or p.placements != (Shard(0),) for p in parameters),
        "parameters": len(parameters),
        "apart": sum(isinstance(layer, FSDPModule) for layer in layers),
        "layers": len(layers),
    }


def compare(_: Any, case: Plain) -> Plain:
    """In a single rank, without FSDP: report to which training the weights and the averages of the answer belong."""
    _quiet()
    found, optimizer = _loaded(case, ANSWER)
    answer = _weights_and_averages(found, optimizer)
    trainings: dict[str, dict[str, Any]] = {
        RIGHT: {},
        "those of a training without clipping": {"limit": 1e9},
        "those of a training whose Adam starts anew": {"state": False},
        "those of a training whose Adam has another learning rate": {"lr": 1e-3},
        "those of a training whose gradients add up over the batches": {"clear": False},
        "those of a training on the rows of rank 0 alone": {"part": 0},
        UNCHANGED: {"steps": 0},
    }
    for name, options in trainings.items():
        if _near(answer, _trained(case, **options)):
            return name
    return "those of another training"


def _trained(
    case: Plain,
    limit: float = 1.0,
    state: bool = True,
    lr: float | None = None,
    clear: bool = True,
    part: int | None = None,
    steps: int | None = None,
) -> list[torch.Tensor]:
    model, optimizer = _loaded(case, FIRST)
    if not state:
        optimizer = torch.optim.Adam(model.parameters(), lr=case["lr"])
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    whole = batches(case, 0, 1, "cpu")
    if part is not None:
        whole = batches(case, part, case["ranks"], "cpu")
    for x, y in whole[:steps]:
        if clear:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return _weights_and_averages(model, optimizer)


def _loaded(case: Plain, name: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = network(case)
    optimizer = torch.optim.Adam(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=Path(case["folder"], name))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return model, optimizer


def _weights_and_averages(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    averages = [optimizer.state[parameter]["exp_avg"] for parameter in parameters if parameter in optimizer.state]
    return [tensor.detach() for tensor in (*parameters, *averages)]


def _near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    if len(found) != len(expected):
        return False
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True))


def _quiet() -> None:
    """Hide what PyTorch reports about a process that has one thread and saves over another checkpoint."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
