"""Puts a virtual machine in place of CUDA, and takes it away again without a trace."""

import gc
import importlib
import multiprocessing.spawn
import os
import queue
import socket
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.distributed
import torch.nn.parallel
import torch.serialization
import torch.utils._device
import torch.utils.data
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing import reductions

from virtualgpu import autocast, comm, errors, factories, generators, hardware, moves, torchscript
from virtualgpu.driver import driver, nvml, smi
from virtualgpu.hardware import Machine
from virtualgpu.host import python_costs
from virtualgpu.host.cpu_operators import HostOperators
from virtualgpu.ops import call, recurrent
from virtualgpu.processes import inheritance, ledger, sharing
from virtualgpu.streams import backward, streams
from virtualgpu.tensor import VirtualStorage, VirtualTensor, allocate_on, tensors, unsupported

_ABSENT = object()


class Installation:
    """All that is changed in the process while a machine is in place. `remove` undoes it, in reverse order.

    `in_child` is a function of a module, and its argument: called with that and the variables of the environment by which the machine is
    found, in every process that multiprocessing starts afresh. A child that is forked has the machine already. A process that `joins` the
    machine of another has that one's nvidia-smi.
    """

    def __init__(self, machine: Machine, in_child: tuple[Callable[[Any, dict], None], Any] | None = None, joins: bool = False) -> None:
        self.machine = machine
        self._in_child, self._joins = in_child, joins
        self.real_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._originals: list[tuple[Any, str, Any]] = []
        self._environment: dict[str, str | None] = {}
        self._office: smi.Office | None = None
        self._scripted: list[Any] = []
        self._library: torch.library.Library | None = None
        self._mode = machine.host_operators = HostOperators(machine)
        for gpu in machine.gpus:
            gpu.generator = generators.VirtualGenerator(gpu)
            gpu.generator.manual_seed(torch.initial_seed() & (1 << 63) - 1)
        try:
            hardware.put_in_place(machine)
            machine.limbo.watch_the_end()
            self._serve_tools()
            self._replace_names()
            self._register_kernels()
            self._mode.__enter__()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the machine away. What still lies on its GPUs raises an error when it is used."""
        self.machine.races.end()
        self.machine.alive = False
        self.machine.turns.close()
        autocast.remove()
        if self._mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            self._mode.__exit__(None, None, None)
        if self._office is not None:
            self._office.close()
        for name, value in self._environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self._environment.clear()
        if self._library is not None:
            self._library._destroy()
            self._library = None
        while self._scripted:
            del self._builtins[id(self._scripted.pop())]
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        torch.cuda.device_count.cache_clear() if hasattr(torch.cuda.device_count, "cache_clear") else None
        hardware.put_in_place(None)
        self.machine.limbo.close()
        self.machine.ledger.close()
        if self.machine.kept_bytes or self.machine.without_values:
            gc.collect()  # what only cycles hold is freed with its machine

    def _serve_tools(self) -> None:
        """NVML's module and the program nvidia-smi, for this process and its children."""
        pynvml = nvml.module()
        if pynvml is not None:
            self._replace(pynvml, **nvml.replacements(pynvml, self.machine))
        if hasattr(socket, "AF_UNIX") and not (self._joins and smi.ADDRESS in os.environ):
            self._office = smi.Office(lambda: nvml.report(self.machine).plain())
            self._set_environment(self._office.environment())
        self._set_environment({ledger.ADDRESS: self.machine.ledger.address})

    def _inherited_environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in (ledger.ADDRESS, smi.ADDRESS, "PATH") if name in os.environ}

    def _set_environment(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._environment[name] = os.environ.get(name)
            os.environ[name] = value

    def _replace(self, owner: Any, **names: Any) -> None:
        for name, value in names.items():
            # vars, not getattr: an inherited attribute is uncovered again by deleting ours
            self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def _replace_names(self) -> None:
        self._replace_driver()
        self._replace_tensor_methods()
        self._replace_makers()
        self._replace_in_autograd()
        self._replace_in_libraries()
        self._take_pythons_time()
        self._refuse_by_name()
        self._replace_in_threads()
        if self._in_child is not None:
            prepare = multiprocessing.spawn.get_preparation_data
            prepare_child = inheritance.with_call(prepare, *self._in_child, self._inherited_environment)
            self._replace(multiprocessing.spawn, get_preparation_data=prepare_child)

    def _take_pythons_time(self) -> None:
        replicate = torch.nn.Module._replicate_for_data_parallel
        self._replace(torch._C, **python_costs.asking_for_a_trace(self.machine))
        self._replace(torch.nn.Module, _replicate_for_data_parallel=python_costs.replicating(self.machine, replicate))

    def _replace_in_threads(self) -> None:
        """Threads see the machine too, for modes belong to one thread, and take turns."""
        turns, thread = self.machine.turns, threading.Thread
        started = _start_beside(self.machine, thread.start, turns.starting(thread.start, self._mode))
        self._replace(thread, start=started, join=turns.joining(thread.join))
        self._replace(threading, Lock=turns.lock_class())
        self._replace(queue, SimpleQueue=turns.queue_class())
        if hasattr(threading, "_allocate_lock"):  # a private name: without it, who waits is found out a little later
            self._replace(threading, _allocate_lock=turns.waiting_lock)

    def _replace_driver(self) -> None:
        """What torch.cuda asks of C++, and what it remembers of the answers."""
        machine = self.machine
        answers = driver.answers(machine)
        self._replace(torch._C, **answers, _has_cuda=True)
        self._replace(
            torch.cuda,
            _initialized=False,
            _queued_calls=list(torch.cuda._queued_calls),
            _cached_device_count=None,
            _device_count_nvml=lambda: -1,
            _cudart=driver.runtime(machine),
            _exchange_device=answers["_cuda_exchangeDevice"],
            _maybe_exchange_device=answers["_cuda_maybeExchangeDevice"],
            _is_in_bad_fork=answers["_cuda_isInBadFork"],
            _get_nvml_device_index=machine.nvml_index,
            _get_device_properties=lambda index: driver.properties(machine.profile, machine.total_memory, index),
            default_generators=tuple(gpu.generator for gpu in machine.gpus),
            Stream=streams.Stream,
            Event=streams.Event,
            **factories.legacy_types(),
        )
        self._replace(torch.cuda.memory, _get_nvml_device_index=machine.nvml_index)
        self._replace(torch.cuda.streams, Stream=streams.Stream, Event=streams.Event)
        self._replace(torch.cuda.nvtx, _nvtx=driver.nvtx())
        self._replace(torch.version, cuda=driver.CUDA_VERSION)

    def _replace_tensor_methods(self) -> None:
        self._replace(
            torch.Tensor,
            to=moves.to,
            cuda=moves.cuda,
            cpu=moves.cpu,
            data=moves.Attribute("data", moves.get_data, moves.set_data),
            pin_memory=moves.pin_memory,
            is_pinned=moves.answer_is_pinned,
            new_tensor=factories.new_tensor,
            numpy=moves.read_on_host(torch.Tensor.numpy),
            tolist=moves.read_on_host(torch.Tensor.tolist),
            grad=moves.Attribute(
                "grad", torch.Tensor.grad.__get__, errors.assign_gradient(torch.Tensor.grad.__set__), torch.Tensor.grad.__delete__
            ),
            type=moves.type_,
            type_as=moves.type_as,
            **{name: factories.with_any_device(getattr(torch.Tensor, name)) for name in factories.METHODS},
        )
        self._replace(torch._C._nn, _parse_to=moves.parse_to)
        self._replace(torch.nn.parameter.UninitializedTensorMixin, materialize=moves.materialize)
        self._replace(
            torch.UntypedStorage,
            to=moves.storage_to,
            cuda=moves.storage_cuda,
            _new_shared=sharing.new_shared(torch.UntypedStorage._new_shared),
            _share_cuda_=sharing.share_cuda,
            _new_shared_cuda=staticmethod(sharing.new_shared_cuda),
            _release_ipc_counter_cuda=staticmethod(sharing.release_ipc_counter),
        )

    def _replace_makers(self) -> None:
        """Functions that make tensors, and the classes that name devices, streams and generators."""
        torch.utils._device._device_constructors()  # it remembers torch's own functions at its first call: not ours
        makers = {name: factories.with_any_device(getattr(torch, name)) for name in factories.FACTORIES if hasattr(torch, name)}
        makers |= {name: factories.made_on_host(getattr(torch, name)) for name in factories.MOVED}
        makers |= {"tensor": factories.tensor, "as_tensor": factories.as_tensor, "device": factories.Device}
        self._script_as_builtins(makers)
        self._replace(torch, **makers)
        self._replace(torch.fft, **{name: factories.with_any_device(getattr(torch.fft, name)) for name in ("fftfreq", "rfftfreq")})
        self._replace(torch._C, _set_default_tensor_type=factories.set_default_tensor_type)
        names = ("nested_tensor", "as_nested_tensor")
        refused = {name: factories.on_the_cpu_alone(f"torch.nested.{name}", getattr(torch.nested, name)) for name in names}
        self._replace(torch.nested, **refused)
        self._replace(torch, Stream=streams.GenericStream, Event=streams.GenericEvent)
        self._replace(torch, Generator=generators.Generator, get_device=moves.get_device)

    def _replace_in_autograd(self) -> None:
        self._replace(torch, **autocast.replacements())
        self._replace(
            torch.autograd,
            _make_grads=errors.make_gradients(torch.autograd._make_grads),
            _engine_run_backward=_backward_from(self.machine, torch.autograd._engine_run_backward),
        )

    def _replace_in_libraries(self) -> None:
        """What torch's own Python beside torch.cuda keeps or asks about CUDA."""
        self._replace(
            reductions,
            StorageWeakRef=sharing.WeakReference,
            storage_from_cache=sharing.storage_from_cache(reductions.storage_from_cache),
        )
        self._replace(torch.nn.parallel._functions, _streams=None)  # DataParallel remembers a stream of each GPU
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # each has a list of its own
            module = importlib.import_module(name)  # torch.optim hides its submodule
            if types := getattr(module, "_foreach_supported_types", None):
                self._replace(module, _foreach_supported_types=[*types, VirtualTensor])
        restorers = torch.serialization._package_registry
        self._replace(torch.serialization, _package_registry=[(0, lambda storage: None, restore), *restorers])
        self._replace(torch, is_storage=partial(_is_storage, torch.is_storage))
        self._replace(
            torch.backends.cudnn,
            is_available=lambda: True,
            version=lambda: driver.CUDNN_VERSION,
            is_acceptable=lambda tensor: tensor.is_cuda and tensor.dtype.is_floating_point,
        )
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            self._replace(kind, __call__=torchscript.refusing(kind.__call__))
        self._replace(torch.jit.RecursiveScriptModule, _apply=torchscript.apply)
        tracers = {name: torchscript.tracing(getattr(torch.jit, name)) for name in ("trace", "trace_module")}
        self._replace(torch.jit, load=torchscript.loading(torch.jit.load), **tracers)
        profile = torch.autograd.profiler.profile
        self._replace(profile, __init__=_profile_of_the_cpu(profile.__init__))
        self._replace(torch.autograd, _supported_activities=lambda: {torch.profiler.ProfilerActivity.CPU})
        self._replace(torch, _use_cudnn_rnn_flatten_weight=lambda: True)
        self._replace(torch.backends.cudnn.rnn, get_cudnn_mode=recurrent.MODES.__getitem__)

    def _script_as_builtins(self, makers: dict[str, Any]) -> None:
        """In a script, and PyTorch scripts some functions of its own for forward derivatives, these must still name its operators."""
        self._builtins = torch.jit._builtins._get_builtin_table()
        for name, made in makers.items():
            if (operator := self._builtins.get(id(getattr(torch, name)))) is not None:
                self._builtins[id(made)] = operator
                self._scripted.append(made)  # held, so that no other object gets this id

    def _refuse_by_name(self) -> None:
        """What a virtual GPU cannot do says so, at its first use."""
        for name in ("graph", "make_graphed_callables", "use_mem_pool", "CUDAGraph", "ExternalStream", "MemPool"):
            if original := getattr(torch.cuda, name, None):
                self._replace(torch.cuda, **{name: driver.refuse(f"torch.cuda.{name}", original)})
        self._replace(torch, compile=driver.refuse("torch.compile"))
        if torch.distributed.is_available():
            groups = torch.distributed.distributed_c10d
            self._replace(groups, _new_process_group_helper=comm.without_nccl(groups._new_process_group_helper))
        self._replace(FakeTensor, __new__=_fake_on_the_cpu_alone(FakeTensor.__new__))
        self._replace(torch.cuda, is_current_stream_capturing=lambda: False)
        self._replace(torch.cuda.graphs, is_current_stream_capturing=lambda: False)

    def _register_kernels(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a build with CUDA: that these kernels stand in for its own
            self._library.impl("empty.memory_format", factories.cuda_empty, "CUDA")
            self._library.impl("empty_strided", factories.cuda_empty_strided, "CUDA")
            autocast.register(self._library)
            for name in call.CHECKS.keys() | call.COMPOSITES.keys():
                kernel = _above_autograd(name, call.COMPOSITES.get(name))
                for key in ("AutogradCPU", "CPU"):
                    self._library.impl(name, kernel, key)


def _above_autograd(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """The kernel of a composite operator: as on CUDA if a device tensor is among the arguments, as it was otherwise."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    check = call.CHECKS.get(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(type(x) is VirtualTensor for x in tensors(args)):
            if check is not None:
                check(args, kwargs)
            if function is not None:
                return function(*args, **kwargs)
        return call.made_of(operator, *args, **kwargs)

    return kernel


def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """`torch.load`: what was saved on a GPU goes to the virtual one of that number. None for another place."""
    if not location.startswith("cuda"):
        return None
    torch.serialization._validate_device(location, "cuda")
    allocate_on(hardware.machine().gpu(location), storage)
    return storage


def _fake_on_the_cpu_alone(make: Callable[..., Any]) -> Callable[..., Any]:
    """Fake tensors, which torch.export and its like put in place of real ones: with CUDA's, autograd ends a process without CUDA."""

    def make_one(*args: Any, **kwargs: Any) -> Any:
        fake = make(*args, **kwargs)
        if fake.fake_device.type == "cuda":
            raise unsupported("a FakeTensor on a CUDA device, as torch.export, torch.onnx.export and DTensors (fully_shard) make them,")
        return fake

    return make_one


def _profile_of_the_cpu(prepare: Callable[..., None]) -> Callable[..., None]:
    """`torch.profiler` asks the real driver what a GPU does: it is told of the CPU alone, with a warning."""

    def prepare_cpu(self: Any, *args: Any, use_cuda: bool = False, use_device: str | None = None, **options: Any) -> None:
        if use_cuda or use_device == "cuda":
            warnings.warn("torch.profiler sees the CPU's work alone: a virtual GPU's times are not in its tables", stacklevel=3)
            options["use_cpu"], use_device = True, None
        prepare(self, *args, use_device=use_device, **options)

    return prepare_cpu


def _is_storage(known: Callable[[Any], bool], value: Any) -> bool:
    """`torch.is_storage`, which looks classes up by identity."""
    return type(value) is VirtualStorage or known(value)


def _backward_from(machine: Machine, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that knows on which GPU it starts: its first node may make a number there before it looks at any tensor."""

    def run_from(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        roots = {x._gpu if type(x) is VirtualTensor else None for x in tensors(outputs)}
        before, machine.selected.root = machine.selected.root, roots.pop() if len(roots) == 1 else None
        try:
            return backward.run_on_streams(machine, run, outputs, *args, **kwargs)
        finally:
            machine.selected.root = before

    return run_from


def _start_beside(machine: Machine, start: Callable[..., None], in_turns: Callable[..., None]) -> Callable[[threading.Thread], None]:
    """`Thread.start` for DataLoader's thread that pins: how far ahead of the program it gets hangs on other processes' real speed.

    It has a processor of its own on the computers that it is meant for, so it takes none of the host's time and no turns.
    """

    def run_beside(run: Callable[[], None]) -> None:
        machine.selected.beside = True
        run()

    def start_beside(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is torch.utils.data._utils.pin_memory._pin_memory_loop:
            thread.run = partial(run_beside, thread.run)  # type: ignore[method-assign]
            return start(thread)
        machine.clock.advance_host(machine.profile.thread_seconds)
        in_turns(thread)

    return start_beside
