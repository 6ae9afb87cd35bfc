"""Which tensors lie on which device: their bytes by kind and device, as a lesson on several GPUs wants to show them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from labkit import machine
from labkit.experiments.result import Result, badge

COLUMNS = {"kind": "", "device": "", "bytes": "bytes", "shape": ""}


def placement(**kinds: Any) -> Result:
    """Where tensors lie: one row for each kind and device, in the order given, and the devices of the machine in use as `devices`.

    `kinds` are named by what they hold, such as `parameters=replicas, inputs=batch`. A value is a tensor, a module (its parameters;
    a replica of DataParallel has some too), or any nesting of lists, tuples and dicts of these; None is skipped. A tensor that is
    given twice, or shares its memory with one given before, counts once. `shape` is that of a kind's tensor on a device if there is
    one only, else how many there are.

    Raises TypeError for other values, RuntimeError when no GPU is in use.
    """
    name = badge()
    rows = []
    for kind, value in kinds.items():
        by_device: dict[str, dict[int, torch.Tensor]] = {}
        for tensor in _tensors(kind, value):
            by_device.setdefault(str(tensor.device), {}).setdefault(tensor.data_ptr(), tensor)
        for device in sorted(by_device):
            found = list(by_device[device].values())
            shape = " × ".join(map(str, found[0].shape)) or "one number" if len(found) == 1 else f"{len(found)} tensors"
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
            rows.append({"kind": kind, "device": device, "bytes": nbytes, "shape": shape})
    devices = [f"cuda:{index}" for index in range(machine.in_use().count)]
    return Result("placement", {"kinds": list(kinds), "devices": devices}, COLUMNS, rows, name)


def _tensors(kind: str, value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        # A replica's parameters are results of a computation, the broadcast, so PyTorch does not list them as parameters.
        yield from value.parameters()
        for module in value.modules():
            yield from getattr(module, "_former_parameters", {}).values()
    elif isinstance(value, dict):
        for child in value.values():
            yield from _tensors(kind, child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors(kind, child)
    elif value is not None:
        raise TypeError(f"{kind}={value!r}: give tensors, modules, or lists, tuples and dicts of these")
