"""Functions of which a sentence holds, and functions of which it does not, to try experiments on.

An experiment that decides returns True for each of the first and False for each of the second.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.cuda import memory_stats  # a check puts something else in its place in torch.cuda

Function = Callable[..., Any]
KIB = 1024


@dataclass(frozen=True)
class StandIns:
    """Functions that an experiment on one sentence must tell apart.

    Attributes:
        holds: functions for which the sentence is true, by a text that says what they do.
        fails: functions for which the sentence is false, by a text that says what they do.
    """

    holds: dict[str, Function]
    fails: dict[str, Function]


# "Returns the current GPU memory usage by tensors in bytes for a given device"


def _index(device: Any) -> int:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.index is None:
        return torch.cuda.current_device()
    return device.index


def _statistic(name: str) -> Function:
    def ask(device: Any = None) -> int:
        return memory_stats(_index(device))[name]

    return ask


def _of_the_current_gpu(device: Any = None) -> int:
    return _statistic("allocated_bytes.all.current")()


def _of_the_next_gpu(device: Any = None) -> int:
    following = (_index(device) + 1) % torch.cuda.device_count()
    return _statistic("allocated_bytes.all.current")(following)


def _of_all_gpus(device: Any = None) -> int:
    ask = _statistic("allocated_bytes.all.current")
    return sum(ask(gpu) for gpu in range(torch.cuda.device_count()))


def _in_kibibytes(device: Any = None) -> int:
    return _statistic("allocated_bytes.all.current")(device) // KIB


def _used_on_the_device(device: Any = None) -> int:
    free, total = torch.cuda.mem_get_info(_index(device))
    return total - free


def _zero(device: Any = None) -> int:
    return 0


ALLOCATED = StandIns(
    holds={"returns the bytes of the tensors": _statistic("allocated_bytes.all.current")},
    fails={
        "returns the reserved bytes, with the cache": _statistic("reserved_bytes.all.current"),
        "returns the most bytes so far": _statistic("allocated_bytes.all.peak"),
        "returns all bytes that were ever allocated": _statistic("allocated_bytes.all.allocated"),
        "returns the number of blocks": _statistic("allocation.all.current"),
        "counts in KiB": _in_kibibytes,
        "ignores the device and asks the current GPU": _of_the_current_gpu,
        "answers for the next GPU": _of_the_next_gpu,
        "adds up all GPUs": _of_all_gpus,
        "returns what the driver calls used": _used_on_the_device,
        "always returns 0": _zero,
    },
)

# Sentences for the last exercise


def _move(module: nn.Module, device: Any) -> nn.Module:
    return module.to(device)


def _move_parameter_by_parameter(module: nn.Module, device: Any) -> nn.Module:
    return module._apply(lambda tensor: tensor.to(device))


def _move_first_parameter(module: nn.Module, device: Any) -> nn.Module:
    first = next(module.parameters())
    first.data = first.data.to(device)
    return module


def _move_parameters_only(module: nn.Module, device: Any) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
    return module


def _move_a_copy(module: nn.Module, device: Any) -> nn.Module:
    return copy.deepcopy(module).to(device)


def _move_to_gpu_0(module: nn.Module, device: Any) -> nn.Module:
    return module.to("cuda:0")


def _move_nothing(module: nn.Module, device: Any) -> nn.Module:
    return module


MOVE = (
    "Additionally, the torch.nn.Module class provides to and cuda methods that can move the entire "
    "neural network to a specific device."
)


def _gather(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return torch.cat([output.to(torch.device("cuda", _index(device))) for output in outputs])


def _gather_by_nn(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return nn.parallel.gather(outputs, _index(device))


def _gather_reversed(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return _gather(list(outputs)[::-1], device)


def _gather_columns(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return torch.cat(
        [output.to(torch.device("cuda", _index(device))) for output in outputs], dim=-1
    )


def _gather_mean(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return torch.stack(
        [output.to(torch.device("cuda", _index(device))) for output in outputs]
    ).mean(0)


def _gather_first(outputs: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return outputs[0].to(torch.device("cuda", _index(device)))


GATHER = "Gather: To gather and concatenate the input in first dimension from those devices."


def _replicate(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    return nn.parallel.replicate(module, [_index(device) for device in devices])


def _copy_to_each(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    return [copy.deepcopy(module).to(torch.device("cuda", _index(device))) for device in devices]


def _same_for_each(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    return [module for _ in devices]


def _copies_on_one_gpu(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    return [copy.deepcopy(module) for _ in devices]


def _replicate_one_only(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    return _copy_to_each(module, devices)[:1]


def _with_other_numbers(module: nn.Module, devices: Sequence[Any]) -> list[nn.Module]:
    replicas = _copy_to_each(module, devices)
    with torch.no_grad():
        for replica in replicas[1:]:
            for parameter in replica.parameters():
                parameter.add_(1)
    return replicas


REPLICATE = "Replicate: To replicate Module on multiple devices."

SENTENCES = {
    MOVE: StandIns(
        holds={
            "moves the network with `to`": _move,
            "moves each tensor of the network": _move_parameter_by_parameter,
        },
        fails={
            "moves only the first parameter": _move_first_parameter,
            "moves the parameters, but no buffers": _move_parameters_only,
            "moves a copy and leaves the network where it was": _move_a_copy,
            "moves every network to GPU 0": _move_to_gpu_0,
            "moves nothing": _move_nothing,
        },
    ),
    GATHER: StandIns(
        holds={"joins the rows on one GPU": _gather, "is `nn.parallel.gather`": _gather_by_nn},
        fails={
            "joins the rows in the opposite order": _gather_reversed,
            "joins the columns": _gather_columns,
            "returns the mean of the tensors": _gather_mean,
            "returns the first tensor only": _gather_first,
        },
    ),
    REPLICATE: StandIns(
        holds={
            "is `nn.parallel.replicate`": _replicate,
            "copies the module to each GPU": _copy_to_each,
        },
        fails={
            "returns the same module for each GPU": _same_for_each,
            "makes all copies on one GPU": _copies_on_one_gpu,
            "makes one copy only": _replicate_one_only,
            "gives the copies other numbers": _with_other_numbers,
        },
    ),
}
