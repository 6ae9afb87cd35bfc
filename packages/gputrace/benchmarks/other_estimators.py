"""Compare the peak memory that several estimators predict with what a real H200 measured.

usage: python other_estimators.py          all networks and estimators, each pair in a new process
       python other_estimators.py NETWORK OPTIMIZER BATCH LENGTH ESTIMATOR    one of them, in bytes

It needs torchvision and transformers, and torch-kitsune and FakeGPU in any folder of PYTHONPATH.
LENGTH is 0 for pictures.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

RECORDING = Path(__file__).parent / "timing" / "scripts_h200.json"
NETWORKS = {
    "efficientnet_b0 adamw": ("efficientnet_b0", "adamw", 8, 0),
    "densenet121 sgd, large": ("densenet121", "sgd", 64, 0),
    "swin_t sgd, large": ("swin_t", "sgd", 64, 0),
    "gpt2 adamw": ("gpt2", "adamw", 8, 256),
}
STEPS = 3


def network(name: str) -> torch.nn.Module:
    """Return a network with random weights."""
    _without_torchvision_operators()
    import transformers

    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config())
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def _without_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch that its C++ operators were not built for."""
    name = "torchvision._meta_registrations"
    sys.modules[name] = types.ModuleType(name)


def batch_of(size: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the target of a step."""
    if length:
        tokens = torch.randint(0, 1000, (size, length), device=device)
        return tokens, tokens
    pictures = torch.randn(size, 3, 224, 224, device=device)
    return pictures, torch.randint(0, 1000, (size,), device=device)


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for a model: `kind` is "sgd" or "adamw"."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 1e-4)


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], length: int) -> Any:
    """Return the loss of one batch. `length` is the tokens per row, or 0 for pictures."""
    inputs, target = data
    if length:
        return model(input_ids=inputs, labels=target).loss
    return F.cross_entropy(model(inputs), target)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any, length: int) -> None:
    """Take a training step. `length` is the tokens per row, or 0 for pictures."""
    optimizer.zero_grad()
    loss = loss_of(model, data, length)
    loss.backward()
    optimizer.step()


def by_virtual_gpu(name: str, kind: str, size: int, length: int) -> int:
    """Return the peak bytes of some training steps on a virtual H200 without values.

    Args:
        name: the network.
        kind: the optimizer.
        size: the number of rows of a batch.
        length: the tokens per row, or 0 for pictures.
    """
    import virtualgpu

    virtualgpu.use(1, like="H200", values=False)
    model = network(name).cuda().train()
    optimizer = optimizer_of(kind, model)
    data = batch_of(size, length, "cuda")
    for _ in range(STEPS):
        step(model, optimizer, data, length)
    return torch.cuda.max_memory_allocated()


def by_mem_tracker(name: str, kind: str, size: int, length: int) -> int:
    """Return the peak bytes that PyTorch's MemTracker finds with fake tensors.

    The fake tensors are those of a CPU, because a PyTorch without CUDA initializes no parameters on
    a fake GPU. The arguments are those of `by_virtual_gpu`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = network(name).train()
        optimizer = optimizer_of(kind, model)
        data = batch_of(size, length, "cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *data)
        with tracker:
            for _ in range(STEPS):
                step(model, optimizer, data, length)
                tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return max(each["Total"] for each in peak.values())


def by_kitsune(name: str, kind: str, size: int, length: int) -> int:
    """Return the peak bytes that torch-kitsune's `predict_memory` predicts.

    The arguments are those of `by_virtual_gpu`.
    """
    from kitsune.predict import predict_memory

    shape = (length,) if length else (3, 224, 224)
    found = predict_memory(network(name), shape, batch_size=size, optimizer=kind)
    return found.total_bytes


def by_fakegpu(name: str, kind: str, size: int, length: int) -> int:
    """Return the peak bytes that FakeGPU's static estimator predicts by tracing the network.

    The arguments are those of `by_virtual_gpu`.
    """
    from fakegpu import estimate_module_memory

    model = network(name).train()
    inputs, target = batch_of(size, length, "cpu")

    def loss(output: Any) -> torch.Tensor:
        if length:
            logits = output["logits"]
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return F.cross_entropy(output, target)

    optimizer = "sgd_momentum" if kind == "sgd" else "adamw"
    found = estimate_module_memory(
        model, (inputs,), loss_fn=loss, optimizer=optimizer, target_device="auto"
    )
    return found["estimated_peak_bytes"]


ESTIMATORS: dict[str, Callable[[str, str, int, int], int]] = {
    "labkit fit": by_virtual_gpu,
    "FakeTensorMode + MemTracker": by_mem_tracker,
    "FakeGPU, static": by_fakegpu,
    "torch-kitsune": by_kitsune,
}


def one(arguments: list[str]) -> None:
    """Print what one estimator predicts, in bytes."""
    name, kind, size, length, estimator = arguments
    torch.manual_seed(0)
    print("BYTES", ESTIMATORS[estimator](name, kind, int(size), int(length)))


def in_child(given: tuple[Any, ...], estimator: str) -> str | int:
    """Return the bytes that an estimator predicts, or why it predicts none."""
    command = [sys.executable, __file__, *map(str, given), estimator]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    for line in ended.stdout.splitlines():
        if line.startswith("BYTES "):
            return int(line.split()[1])
    return (ended.stderr.strip().splitlines() or ["no output"])[-1]


def main() -> None:
    """Print the table."""
    recorded = json.loads(RECORDING.read_text())["scripts"]
    packages = ("torchvision", "transformers", "torch-kitsune")
    versions = [f"{each} {importlib.metadata.version(each)}" for each in packages]
    print(f"{date.today()}, {platform.machine()}, torch {torch.__version__}, {', '.join(versions)}")
    print(f"{'MiB':28}{'H200':>10}", *(f"{name:>28}" for name in ESTIMATORS))
    notes = []
    for label, given in NETWORKS.items():
        real = recorded[label]["allocated"]
        cells = []
        for estimator in ESTIMATORS:
            found = in_child(given, estimator)
            cell = "none"
            if isinstance(found, int):
                cell = f"{found / 2**20:,.0f} ({found / real - 1:+.1%})"
            else:
                notes.append(f"{label}, {estimator}: {found}")
            cells.append(f"{cell:>28}")
        print(f"{label:28}{real / 2**20:>10,.0f}", *cells, flush=True)
    print(*notes, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(sys.argv[1:])
    else:
        main()
