"""The tensor of a virtual GPU, and what one operator call does.

C++ sees a CPU tensor whose storage holds the values, so autograd, views, version counters and every CPU kernel work as they are.
Python sees a tensor on cuda:k. What makes it one is the `Memory` that hangs on its storage: all views share the storage, and so
the block of the allocator, which goes back when the storage dies.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.errors import refuse_legacy_conversion, unsupported
from virtualgpu.hardware import Gpu
from virtualgpu.memory import Memory, require_values, unwatched

_make_subclass = torch.Tensor._make_subclass
_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
_storage_of: Callable[[torch.Tensor], Any] = torch.Tensor.untyped_storage  # a VirtualStorage, where memory of a GPU hangs on it
_empty_strided = torch.empty_strided
plain_set: Any = torch.Tensor.set_  # without the check of `moves`
plain_type: Any = torch.Tensor.type  # of the tensor that C++ sees, and so with the next one
host_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
attributes_of: Any = torch.Tensor.__dict__["__dict__"]  # all attributes of a tensor, those of the kit too
_CPU, _STRIDED = torch.device("cpu"), torch.strided


class VirtualStorage(torch.UntypedStorage):
    """A storage on a virtual GPU: the class that a storage gets when memory of a GPU is hung on it."""

    memory: Memory
    _resized: int | None = None  # bytes, of a storage without values

    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # the stubs call it an attribute
        return self.memory.gpu.device

    def get_device(self) -> int:
        return self.memory.gpu.index

    def nbytes(self) -> int:
        return super().nbytes() if self._resized is None else self._resized

    size = __len__ = nbytes

    def data_ptr(self) -> int:
        return self.memory.address

    def is_shared(self) -> bool:
        return True  # as CUDA's storages answer

    def new(self) -> "VirtualStorage":
        return new_storage(VirtualStorage, 0, device=self.device)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):  # the same memory, which C++ does not make ours
            hang(self.memory, found)
        return found

    def clone(self) -> "VirtualStorage":
        gpu = self.memory.gpu
        if self.memory.kept is None:
            return _storage_of(empty_without_values(gpu, (self.nbytes(),), (1,), torch.uint8))
        return new_storage(VirtualStorage, self.nbytes(), device=gpu.device).copy_(self)

    def resize_(self, nbytes: int) -> "VirtualStorage":
        if nbytes:
            require_within_capacity(self, nbytes + self.nbytes())  # to shrink, C++ takes new memory too
        gpu, kept = self.memory.gpu, self.memory.kept is not None
        if kept:
            self.unshare()
            super().resize_(nbytes)
        elif nbytes <= super().nbytes():  # C++ would move it to the meta device, and so the views made of it later: it need not know
            self._resized = nbytes
        else:  # Python refuses that where there are no values
            with _DisableTorchDispatch():
                bare = torch.empty(0, dtype=torch.uint8, device=torch.UntypedStorage.device.__get__(self))
                torch.ops.inductor.resize_storage_bytes_(plain_set(bare, self), nbytes)
            self._resized = None
        self.memory = Memory(gpu, gpu.allocate(nbytes), nbytes if kept else None)
        return self

    def unshare(self) -> None:
        """Take bytes of its own, if it shares them with a snapshot until either is written to. PyTorch forgets that when it resizes."""
        if self.memory.kept is not None:
            super().data_ptr()

    def cpu(self) -> torch.UntypedStorage:
        if self.memory.kept is None and self.memory.gpu.machine.blanks_host:
            return torch.UntypedStorage(self.nbytes()).fill_(255)  # type: ignore[attr-defined]  # all bits set: NaN in float32, float16 and bfloat16
        require_values(self.memory)
        return torch.UntypedStorage(self.nbytes()).copy_(self)


def new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """`torch.UntypedStorage(…)`, on the device that is named."""
    make: Any = torch._C.StorageBase.__new__
    if device is None or torch.device(device).type != "cuda":
        return make(torch.UntypedStorage if cls is VirtualStorage else cls, *args, device=device, **kwargs)
    gpu = hardware.machine().gpu(device)
    assert gpu is not None
    if args[:1] and isinstance(args[0], int):
        return _storage_of(empty(gpu, (args[0],), (1,), torch.uint8))
    storage = make(torch.UntypedStorage, *args, **kwargs)
    send_to(gpu, storage)
    return storage


OWN_ATTRIBUTES = frozenset({"_gpu", "_is_param", "_stands_for"})


class TensorType(torch._C._TensorMeta):
    """The type of a virtual GPU's tensor is torch.Tensor to whoever asks whether another tensor is of it, too."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class VirtualTensor(torch.Tensor, metaclass=TensorType):
    """A tensor on a virtual GPU. `virtualgpu.ops.dispatch` gives the class its `__torch_dispatch__`."""

    _gpu: Gpu
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as the stubs have it, not a class method

    is_cuda, is_cpu = True, False

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """What its owner has set on it, to be read: PyTorch copies that to the host with the values (`async_save`)."""
        return MappingProxyType({name: value for name, value in attributes_of.__get__(self).items() if name not in OWN_ATTRIBUTES})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device

    if TYPE_CHECKING:

        def untyped_storage(self) -> VirtualStorage: ...

    def get_device(self) -> int:
        return self._gpu.index

    def data_ptr(self) -> int:
        """The address on the virtual GPU: the same in every run."""
        address = memory_of(self).address
        return address + int(self.storage_offset()) * self.itemsize if address else 0

    const_data_ptr = data_ptr

    def apply_(self, function: Any) -> Any:
        raise TypeError("apply_ is only implemented on CPU tensors")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As PyTorch prints a CUDA tensor; it would name the subclass, whose name is as long as "tensor"."""
        if tensor_contents is None and self.layout is torch.strided:
            if memory_of(self).kept is None:
                tensor_contents = f"<values not kept>, size={tuple(self.shape)}"
            elif not self._gpu.machine.values:  # of what printing computes on the way not all would be kept
                tensor_contents = torch._tensor_str._tensor_str(self.detach().cpu(), len("tensor("))
        text = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        if text.startswith("Parameter("):
            return "Parameter containing:\nt" + text.removeprefix("Parameter(T")[:-1]
        return "t" + text[1:]

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if self.dim() == 0 else object.__format__(self, specification)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """The legacy name, such as "torch.cuda.FloatTensor", or a copy of that type."""
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, torch.dtype):
            return self.to(dtype, non_blocking=non_blocking)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        example = torch.empty(0, device="cpu").type(name.replace("torch.cuda.", "torch."))
        return self.to(self.device if ".cuda." in name else "cpu", example.dtype, non_blocking=non_blocking)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        return self.to(other)

    def is_shared(self) -> bool:
        return True  # as CUDA tensors answer

    def share_memory_(self) -> "VirtualTensor":
        return self

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Any:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def new(self, *args: Any, device: Any = None) -> torch.Tensor:  # type: ignore[override]
        """The legacy constructor: of a size, of data, or empty."""
        device = self.device if device is None else device
        if self.layout is torch.sparse_coo and len(args) > 1:
            return torch.sparse_coo_tensor(*args, device=device, check_invariants=False)
        if len(args) == 1 and torch.is_storage(args[0]):
            return self.new_empty(0).set_(getattr(args[0], "_untyped_storage", args[0]))
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            if (args[0].dtype, args[0].device.type) != (self.dtype, "cuda"):
                refuse_legacy_conversion(self.dtype, self.device, args[0])
            return torch.ops.aten.alias.default(args[0])
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return self.new_tensor(args[0], device=device)
        return self.new_empty(args[0] if args and isinstance(args[0], torch.Size) else args or (0,), device=device)

    def record_stream(self, stream: Any) -> None:
        if (block := memory_of(self).block) is not None:
            self._gpu.allocator.record_stream(block, stream.stream_id)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """As PyTorch writes a CUDA tensor, so that the file opens on any machine."""
        hooks: dict = {}
        storage = torch.storage.TypedStorage(wrap_storage=_storage_of(self), dtype=self.dtype, _internal=True)
        whole = (storage, self.storage_offset(), tuple(self.size()), self.stride(), self.requires_grad, hooks)
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, hooks)
        return torch._utils._rebuild_tensor_v2, whole

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if getattr(self, "_is_param", False):  # as Parameter.__deepcopy__ does: neither gradient nor attributes
            memo[id(self)] = torch.nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  "
                "If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage, see "
                "https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            storage = _storage_of(self).__deepcopy__(memo)  # views of one storage stay views of one storage
            copy = self.new_empty([]).set_(storage, self.storage_offset(), self.size(), self.stride())
        attributes_of.__get__(copy).update(self.__dict__)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    @property
    def __cuda_array_interface__(self) -> Any:
        raise unsupported("__cuda_array_interface__ (another library cannot read a virtual GPU's memory)")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise unsupported("DLPack (another library cannot read a virtual GPU's memory)")


# What type() gives for CUDA tensors; torch.save writes a storage's name.
VirtualTensor.__module__, VirtualTensor.__name__, VirtualTensor.__qualname__ = "torch", "Tensor", "Tensor"
VirtualStorage.__module__, VirtualStorage.__name__, VirtualStorage.__qualname__ = "torch.storage", "UntypedStorage", "UntypedStorage"


def require_within_capacity(storage: VirtualStorage, nbytes: int) -> None:
    """Raises NotImplementedError if a storage would have to grow that was sent to another process: C++ ends the process there."""
    if storage.memory.export is not None and nbytes > storage.nbytes():
        raise unsupported("resizing a tensor that was sent to another process")


def memory_of(tensor: torch.Tensor) -> Memory:
    return _storage_of(tensor).memory


def mark_written(tensor: torch.Tensor) -> None:
    """The last piece of work on a stream whose work nobody looks at has written into the tensor."""
    memory = memory_of(tensor)
    memory.writer = unwatched(memory.gpu)
    memory.written = 0 if memory.writer is None else memory.writer.count


def allocate_on(gpu: Gpu, storage: torch.UntypedStorage, kept: bool = True, allocated: bool = True) -> Memory:
    """Hang a new block of the GPU's memory on a storage."""
    nbytes = storage.nbytes()
    memory = Memory(gpu, gpu.allocate(nbytes) if allocated else None, nbytes if kept else None)
    hang(memory, storage)
    return memory


def send_to(gpu: Gpu, storage: torch.UntypedStorage) -> None:
    """Give a storage of the host memory on the GPU. The host waits until its bytes are there."""
    allocate_on(gpu, storage)
    if storage.nbytes():
        gpu.send(storage.nbytes())


def hang(memory: Memory, storage: torch.UntypedStorage) -> None:
    """Make this the storage of such memory."""
    storage.__class__ = VirtualStorage
    storage.__dict__["memory"] = memory


def wrap(plain: torch.Tensor, gpu: Gpu) -> VirtualTensor:
    """The virtual tensor over a plain one: on the memory of its storage if it is a view, else on new memory of the GPU."""
    if plain.layout is _STRIDED:
        storage = _storage_of(plain)
        memory = storage.__dict__.get("memory")
        if memory is None:
            nbytes = storage.nbytes()
            hang(Memory(gpu, gpu.allocate(nbytes), nbytes), storage)
        else:
            gpu = memory.gpu
    tensor = _make_subclass(VirtualTensor, plain)
    tensor._gpu = gpu
    return tensor


def wrap_all(result: Any, gpu: Gpu) -> Any:
    """The same for whatever an operator returns."""
    kind = type(result)
    if kind is torch.Tensor:
        return wrap(result, gpu)
    if kind is tuple or kind is list:
        return kind(wrap_all(x, gpu) for x in result)
    return result


def tensors(*arguments: Any) -> Iterator[torch.Tensor]:
    """All tensors among an operator's arguments, those in lists too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors(*argument)
        elif isinstance(argument, dict):
            yield from tensors(*argument.values())


def span_bytes(size: Any, stride: Any, dtype: torch.dtype) -> int:
    """Bytes of the smallest storage that holds a tensor of this size and stride."""
    return (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0) * dtype.itemsize


def empty_without_values(gpu: Gpu, size: Any, stride: Any, dtype: torch.dtype, allocated: bool = True, storage: int = 0) -> VirtualTensor:
    """A tensor with a shape and memory, of so many bytes if it needs no more, but without values."""
    nbytes = max(storage, span_bytes(size, stride, dtype))
    memory = Memory(gpu, gpu.allocate(nbytes) if allocated else None, None)  # first, so that no half-made tensor outlives its failure
    tensor = _make_wrapper_subclass(
        VirtualTensor, size, strides=stride, dtype=dtype, layout=torch.strided, device=_CPU, storage_size=nbytes
    )
    hang(memory, _storage_of(tensor))
    tensor._gpu = gpu
    return tensor


def empty(gpu: Gpu, size: Any, stride: Any, dtype: torch.dtype) -> VirtualTensor:
    """Uninitialised memory on a GPU, as `torch.empty_strided`, with values while the host has room for them."""
    if not gpu.machine.may_keep(span_bytes(size, stride, dtype), dtype):
        made = empty_without_values(gpu, size, stride, dtype)
    else:
        with _DisableTorchDispatch():
            made = wrap(_empty_strided(size, stride, dtype=dtype, device="cpu"), gpu)
    memory_of(made).written = 0
    if gpu.machine.clock.captures and (capture := gpu.stream.capture) is not None:
        made = capture.made(made)
    return made
