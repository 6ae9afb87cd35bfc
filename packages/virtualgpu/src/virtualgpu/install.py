"""Installation of a virtual machine in place of CUDA, and its complete removal."""

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
    warning_lines,
)  # fmt: skip
from virtualgpu.collectives import namespaces, profiled, reducer, wrappers
from virtualgpu.driver import cuda, nvml, profiler, running, smi
from virtualgpu.errors import DifferentDevicesError
from virtualgpu.graphs import cuda_graph, pools
from virtualgpu.hardware import Machine
from virtualgpu.host import benchmark, data_loading, python_costs, threading_module, time_module
from virtualgpu.host.cpu_operators import HostOperators
from virtualgpu.late_modules import LateModules
from virtualgpu.ops import call, dispatch, fft_plans, fourier
from virtualgpu.ops.nn import attention_backends, convolution, recurrent, synchronized_norm
from virtualgpu.processes import usage_table
from virtualgpu.streams import backward, cuda_streams
from virtualgpu.tensor import VirtualTensor, tensors

# Each module has `replacements(machine)`, which yields (owner, replaced names).
_PARTS = (
    reducer, wrappers, profiled,
    generators, nvml, cuda, cuda_streams, cuda_graph, pools, factories, moves, pinned, sharing,
    autocast, backward, gradient_devices, comm, torchscript, python_costs, time_module,
    data_loading, eager, profiler, attention_backends, convolution, synchronized_norm, fourier,
    fft_plans, warning_lines,
)  # fmt: skip
_ABSENT = object()

dispatch.RANKS.update(namespaces.FUNCTIONS)


class Installation:
    """All changes in the process while a machine is in use. `remove` undoes them in reverse order.

    `in_child` is unpickled in every process that multiprocessing spawns. A forked child has the
    machine already. A process that `joins` the machine of another process uses its nvidia-smi.
    """

    def __init__(self, machine: Machine, in_child: Any = None, joins: bool = False) -> None:
        self.machine = machine
        self._in_child, self._joins = in_child, joins
        self.real_gpus = 0
        if torch.cuda.is_available():
            self.real_gpus = torch.cuda.device_count()
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
            # Some of PyTorch's modules have asked `is_available()` during their import.
            machine.stop_driver()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the machine. Tensors that are still on its GPUs raise an error when used."""
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
            gc.collect()  # tensors in reference cycles are freed together with the machine

    def _replacements(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Yield (owner, new values by name) for everything that the installation replaces.

        An owner is an object with attributes, or a mapping with items.
        """
        if hasattr(socket, "AF_UNIX") and not (self._joins and smi.ADDRESS in os.environ):
            self._smi = smi.Server(lambda: running.report(self.machine))
            yield os.environ, self._smi.environment()
        yield os.environ, {usage_table.ADDRESS: self.machine.usage.address}
        for part in _PARTS:
            yield from part.replacements(self.machine)
        yield from threading_module.replacements(self.machine, self._mode)
        yield torch, {"_use_cudnn_rnn_flatten_weight": lambda: True}
        yield torch.backends.cudnn.rnn, {"get_cudnn_mode": recurrent.MODES.__getitem__}
        if self._in_child is not None:
            prepare = multiprocessing.spawn.get_preparation_data

            def prepare_with_machine(name: str) -> dict[str, Any]:
                return prepare(name) | {"virtualgpu": self._in_child}

            yield multiprocessing.spawn, {"get_preparation_data": prepare_with_machine}

    def _replace(self, owner: Any, names: dict[Any, Any]) -> None:
        """Replace attributes or items of `owner` by the values in `names`.

        The originals are remembered for `remove`.
        """
        is_mapping = isinstance(owner, MutableMapping)
        # vars, not getattr: an inherited attribute reappears when ours is deleted
        known = owner if is_mapping else vars(owner)
        for name, value in names.items():
            self._originals.append((owner, is_mapping, name, known.get(name, _ABSENT)))
            if is_mapping:
                owner[name] = value
            else:
                setattr(owner, name, value)

    def _register_kernels(self) -> None:
        """Register the kernels of virtual GPUs with PyTorch's dispatcher."""
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # A build with CUDA warns that these kernels override its own.
            warnings.simplefilter("ignore")
            self._library.impl("empty.memory_format", factories.cuda_empty, "CUDA")
            self._library.impl("empty_strided", factories.cuda_empty_strided, "CUDA")
            autocast.register(self._library)
            for name, kernel in _composites():
                for key in ("AutogradCPU", "CPU"):
                    self._library.impl(name, kernel, key)


def _put_back(owner: Any, is_mapping: bool, name: Any, original: Any) -> None:
    """Restore the attribute or item `name` of `owner` to its original value.

    It is deleted if it did not exist before.
    """
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
    """Return (name, kernel) of each composite operator that virtual GPUs replace."""
    names = sorted(call.CHECKS.keys() | call.COMPOSITES.keys())
    return [(name, _above_autograd(name, call.COMPOSITES.get(name))) for name in names]


def _above_autograd(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the kernel of the composite operator `name` for PyTorch's dispatcher.

    With a device tensor among the arguments, it calls `function`, which behaves as on CUDA.
    Otherwise it calls PyTorch's own kernel.
    """
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    check, of_dtensors = call.CHECKS.get(name), call.DTENSOR_COMPOSITES.get(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if of_dtensors is not None:
            for x in tensors(args):
                if hasattr(x, "_local_tensor") and x.device.type == "cuda":
                    return of_dtensors(*args, **kwargs)
        if any(type(x) is VirtualTensor for x in tensors(args, kwargs)):
            if check is not None:
                check(args, kwargs)
            if function is not None:
                return _composed(function, args, kwargs)
        return call.made_of(operator, *args, **kwargs)

    return kernel


def _composed(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call `function` with these arguments, and return its result.

    An error about arguments on several devices is raised as CUDA's RuntimeError.
    """
    try:
        return function(*args, **kwargs)
    except DifferentDevicesError as error:
        raise RuntimeError(str(error)) from None
