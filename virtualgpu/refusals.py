"""What a virtual GPU cannot do: it raises NotImplementedError by name, at its first use."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.profiler

from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine

SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # PyTorch's own, by which programs do without its compiler


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch, {"compile": leave_as_it_is if any(os.environ.get(switch) == "1" for switch in SWITCHES) else refuse_to_compile}
    profile = torch.autograd.profiler.profile
    yield profile, {"__init__": profile_of_the_cpu(profile.__init__)}
    yield torch.autograd, {"_supported_activities": lambda: {torch.profiler.ProfilerActivity.CPU}}


def refuse(name: str, original: Any = None) -> Any:
    """A function that raises NotImplementedError, in place of a function, or of a class where `original` is one.

    A class may stand in annotations and `isinstance` without harm. torch's compiler unwraps decorated functions when it is imported.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise unsupported(name)

    if isinstance(original, type):
        return type(original.__name__, (), {"__new__": refused, "__module__": original.__module__})
    if wrapped := getattr(original, "__wrapped__", None):
        refused.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return refused


def refuse_to_compile(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"{unsupported('torch.compile')}. With {SWITCHES[0]}=1 in the environment, programs run without it")


def leave_as_it_is(model: Any = None, **options: Any) -> Any:
    """`torch.compile` where it is switched off; with options alone it is a decorator."""
    return leave_as_it_is if model is None else model


def profile_of_the_cpu(prepare: Callable[..., None]) -> Callable[..., None]:
    """`torch.profiler` asks the real driver what a GPU does: here it profiles the CPU only, with a warning."""

    def prepare_cpu(self: Any, *args: Any, use_cuda: bool = False, use_device: str | None = None, **options: Any) -> None:
        if use_cuda or use_device == "cuda":
            warnings.warn("torch.profiler sees the CPU's work alone: a virtual GPU's times are not in its tables", stacklevel=3)
            options["use_cpu"], use_device = True, None
        prepare(self, *args, use_device=use_device, **options)

    return prepare_cpu
