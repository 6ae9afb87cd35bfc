"""Puts a virtual machine in place of CUDA, and takes it away again without a trace."""

import gc
import multiprocessing.spawn
import os
import socket
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache, partial
from typing import Any

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nccl

from virtualgpu import (
    autocast,
    comm,
    cuda_sources,
    eager,
    factories,
    generators,
    gradient_devices,
    hardware,
    moves,
    pinned,
    sharing,
    torchscript,
)  # fmt: skip
from virtualgpu.collectives import namespaces, profiled, reducer, wrappers
from virtualgpu.driver import cuda, nvml, profiler, smi
from virtualgpu.errors import DifferentDevicesError
from virtualgpu.graphs import cuda_graph, pools
from virtualgpu.hardware import Machine
from virtualgpu.host import benchmark, data_loading, python_costs, threading_module, time_module
from virtualgpu.host.cpu_operators import HostOperators
from virtualgpu.late_modules import LateModules
from virtualgpu.ops import call, dispatch, fourier
from virtualgpu.ops.nn import attention_backends, convolution, recurrent, synchronized_norm
from virtualgpu.processes import usage_table
from virtualgpu.streams import backward, cuda_streams
from virtualgpu.tensor import VirtualTensor, tensors

# Each has `replacements(machine)`: by owner, the names that change.
_PARTS = (
    reducer, wrappers, profiled,
    generators, nvml, cuda, cuda_streams, cuda_graph, pools, factories, moves, pinned, sharing, autocast, backward,
    gradient_devices, comm, torchscript, python_costs, time_module, data_loading, eager, profiler,
    attention_backends, convolution, synchronized_norm, fourier,
)  # fmt: skip
_ABSENT = object()

dispatch.RANKS.update(namespaces.FUNCTIONS)


class Installation:
    """All that is changed in the process while a machine is in place. `remove` undoes it, in reverse order.

    `in_child` is unpickled in every process that multiprocessing starts afresh; a child that is forked has the machine already.
    A process that `joins` the machine of another one has that one's nvidia-smi.
    """

    def __init__(self, machine: Machine, in_child: Any = None, joins: bool = False) -> None:
        self.machine = machine
        self._in_child, self._joins = in_child, joins
        self.real_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._originals: list[tuple[Any, bool, Any, Any]] = []
        self._smi: smi.Server | None = None
        self._library: torch.library.Library | None = None
        self._late_modules = LateModules(
            {
                cuda_sources.MODULE: cuda_sources.refusals,
                attention_backends.CAUSAL_BIASES: attention_backends.causal_biases,
                benchmark.MODULE: partial(benchmark.replacements, machine),
            }
        )
        self._mode = machine.host_operators = HostOperators(machine)
        try:
            hardware.put_in_place(machine)
            machine.pending_frees.warn_at_exit()
            for owner, names in self._replacements():
                self._replace(owner, names)
            self._register_kernels()
            self._late_modules.begin()
            self._mode.__enter__()
            machine.stop_driver()  # some of PyTorch's modules ask `is_available()` at their import
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the machine away. What still lies on its GPUs raises an error when it is used."""
        self.machine.races.end()
        self.machine.alive = False
        self.machine.scheduler.close()
        autocast.remove()
        factories.remove()
        self._late_modules.end()
        if self._mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            self._mode.__exit__(None, None, None)
        if self._smi is not None:
            self._smi.close()
        if self._library is not None:
            self._library._destroy()
            self._library = None
        while self._originals:
            _put_back(*self._originals.pop())
        hardware.put_in_place(None)
        self.machine.pending_frees.close()
        self.machine.usage.close()
        if self.machine.kept_bytes or self.machine.valueless_storages:
            gc.collect()  # what only cycles hold is freed with its machine

    def _replacements(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """By owner, a mapping or an object, the items or attributes that change."""
        if hasattr(socket, "AF_UNIX") and not (self._joins and smi.ADDRESS in os.environ):
            self._smi = smi.Server(lambda: nvml.report(self.machine).plain())
            yield os.environ, self._smi.environment()
        yield os.environ, {usage_table.ADDRESS: self.machine.usage.address}
        for part in _PARTS:
            yield from part.replacements(self.machine)
        yield from threading_module.replacements(self.machine, self._mode)
        yield torch, {"_use_cudnn_rnn_flatten_weight": lambda: True}
        yield torch.backends.cudnn.rnn, {"get_cudnn_mode": recurrent.MODES.__getitem__}
        if self._in_child is not None:
            prepare = multiprocessing.spawn.get_preparation_data
            yield multiprocessing.spawn, {"get_preparation_data": lambda name: prepare(name) | {"virtualgpu": self._in_child}}

    def _replace(self, owner: Any, names: dict[Any, Any]) -> None:
        is_mapping = isinstance(owner, MutableMapping)
        # vars, not getattr: an inherited attribute is visible again once ours is deleted
        known = owner if is_mapping else vars(owner)
        for name, value in names.items():
            self._originals.append((owner, is_mapping, name, known.get(name, _ABSENT)))
            if is_mapping:
                owner[name] = value
            else:
                setattr(owner, name, value)

    def _register_kernels(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a build with CUDA: that these kernels override its own
            self._library.impl("empty.memory_format", factories.cuda_empty, "CUDA")
            self._library.impl("empty_strided", factories.cuda_empty_strided, "CUDA")
            autocast.register(self._library)
            for name, kernel in _composites():
                for key in ("AutogradCPU", "CPU"):
                    self._library.impl(name, kernel, key)


def _put_back(owner: Any, is_mapping: bool, name: Any, original: Any) -> None:
    """Give an item or an attribute the value that it had, or delete it if it had none."""
    if is_mapping and original is _ABSENT:
        del owner[name]
    elif is_mapping:
        owner[name] = original
    elif original is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


@cache
def _composites() -> list[tuple[str, Callable[..., Any]]]:
    """Return names and kernels of the composite operators that virtual GPUs change."""
    names = sorted(call.CHECKS.keys() | call.COMPOSITES.keys())
    return [(name, _above_autograd(name, call.COMPOSITES.get(name))) for name in names]


def _above_autograd(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """The kernel of a composite operator: as on CUDA if a device tensor is among the arguments, PyTorch's own otherwise."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    check, of_dtensors = call.CHECKS.get(name), call.DTENSOR_COMPOSITES.get(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if of_dtensors is not None and any(hasattr(x, "_local_tensor") and x.device.type == "cuda" for x in tensors(args)):
            return of_dtensors(*args, **kwargs)
        if any(type(x) is VirtualTensor for x in tensors(args, kwargs)):
            if check is not None:
                check(args, kwargs)
            if function is not None:
                return _composed(function, args, kwargs)
        return call.made_of(operator, *args, **kwargs)

    return kernel


def _composed(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The function's result. An error of several devices has the class that it has on CUDA."""
    try:
        return function(*args, **kwargs)
    except DifferentDevicesError as error:
        raise RuntimeError(str(error)) from None
