"""The tensor of a virtual GPU.

C++ sees a CPU tensor whose storage holds the values, so autograd, views, version counters and all
CPU kernels work unchanged. Python sees a tensor on cuda:k. The `Memory` that belongs to its storage
makes the difference. All views share the storage and therefore the allocator's block, which is
freed together with the storage.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.errors import refuse_legacy_conversion, unsupported
from virtualgpu.hardware import Gpu
from virtualgpu.memory import Memory, unwatched

_make_subclass = torch.Tensor._make_subclass
_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
_storage_of: Callable[[torch.Tensor], Any] = torch.Tensor.untyped_storage
_empty_strided = torch.empty_strided
plain_set: Any = torch.Tensor.set_  # without the check that `moves` adds
plain_type: Any = torch.Tensor.type  # of the tensor that C++ sees, and so with the next one
host_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
attributes_of: Any = torch.Tensor.__dict__["__dict__"]  # all attributes, also the kit's own
_CPU, _STRIDED = torch.device("cpu"), torch.strided


class VirtualStorage(torch.UntypedStorage):
    """A storage on a virtual GPU. A storage gets this class together with memory of the GPU."""

    memory: Memory
    _resized: int | None = None  # the size in bytes of a resized storage without values

    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # the stubs call it an attribute
        """The GPU of this storage, as a torch.device."""
        return self.memory.gpu.device

    def get_device(self) -> int:
        """Return the index of the GPU on which this storage is."""
        return self.memory.gpu.index

    def nbytes(self) -> int:
        """Return the size of this storage in bytes."""
        if self._resized is None:
            return super().nbytes()
        return self._resized

    size = __len__ = nbytes

    def data_ptr(self) -> int:
        """Return the address of this storage on the virtual GPU."""
        return self.memory.address

    def is_shared(self) -> bool:
        """Return True, as storages on CUDA do."""
        return True

    def new(self) -> "VirtualStorage":
        """Return an empty storage on the same GPU."""
        return new_storage(VirtualStorage, 0, device=self.device)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return bytes_in(self)[index].item()
        found = super().__getitem__(index)
        hang(self.memory, found)  # C++ returns a plain storage with the same memory
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        bytes_in(self)[index] = value

    def fill_(self, value: Any) -> "VirtualStorage":
        """Set all bytes of this storage to the number `value`, and return the storage."""
        bytes_in(self).fill_(value)
        return self

    def tolist(self) -> list[int]:
        """Return the bytes of this storage as a list. The host waits for them."""
        return bytes_in(self).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def _write_file(self, *args: Any) -> None:
        """Write the bytes of this storage to a file, as `torch.save` does in its old format."""
        self.cpu()._write_file(*args)

    def clone(self) -> "VirtualStorage":
        """Return a copy of this storage on the same GPU."""
        gpu = self.memory.gpu
        if self.memory.kept is None:
            return _storage_of(empty_without_values(gpu, (self.nbytes(),), (1,), torch.uint8))
        return new_storage(VirtualStorage, self.nbytes(), device=gpu.device).copy_(self)

    def resize_(self, nbytes: int) -> "VirtualStorage":
        """Change the size to `nbytes` bytes. The values that fit are kept.

        Raises NotImplementedError for memory that was sent to another process.
        """
        if nbytes:
            # C++ allocates new memory even to shrink a storage.
            require_within_capacity(self, nbytes + self.nbytes())
        gpu, kept = self.memory.gpu, self.memory.kept is not None
        if kept:
            self.unshare()
            super().resize_(nbytes)
        elif nbytes <= super().nbytes():
            # C++ would move the storage, and later views of it, to the meta device. Do not tell it.
            self._resized = nbytes
        else:  # Python's own resize_ refuses storages without values
            with _DisableTorchDispatch():
                host_device = torch.UntypedStorage.device.__get__(self)
                bare = torch.empty(0, dtype=torch.uint8, device=host_device)
                torch.ops.inductor.resize_storage_bytes_(plain_set(bare, self), nbytes)
            self._resized = None
        self.memory = Memory(gpu, gpu.allocate(nbytes), nbytes if kept else None)
        return self

    def unshare(self) -> None:
        """Copy the bytes that this storage shares with a snapshot.

        They are shared until one of the two is written to. PyTorch would forget this when it
        resizes a storage.
        """
        if self.memory.kept is not None:
            super().data_ptr()

    def cpu(self) -> torch.UntypedStorage:
        """Return a copy of this storage on the host. The host waits for it.

        Raises RuntimeError if the values were not kept.
        """
        copied: Any = torch.UntypedStorage(self.nbytes()).copy_(self)
        if self.memory.kept is None:
            # All bits set mean NaN in float32, float16 and bfloat16.
            copied.fill_(255)
        return copied


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of all bytes in a storage, which shares its memory.

    PyTorch, too, copies and reads storages through such tensors. So an operator on a virtual GPU is
    counted, takes its time, and is compared with other streams.
    """
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Create a storage on the given device. It replaces `torch.UntypedStorage.__new__`."""
    make: Any = torch._C.StorageBase.__new__
    if device is None or torch.device(device).type != "cuda":
        if cls is VirtualStorage:
            cls = torch.UntypedStorage
        return make(cls, *args, device=device, **kwargs)
    gpu = hardware.machine().gpu(device)
    assert gpu is not None
    if args[:1] and isinstance(args[0], int):
        return _storage_of(empty(gpu, (args[0],), (1,), torch.uint8))
    storage = make(torch.UntypedStorage, *args, **kwargs)
    send_to(gpu, storage)
    return storage


OWN_ATTRIBUTES = frozenset({"_gpu", "_is_param", "_stands_for"})


class TensorType(torch._C._TensorMeta):
    """Metaclass of VirtualTensor: every tensor counts as an instance, as of torch.Tensor."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class VirtualTensor(torch.Tensor, metaclass=TensorType):
    """A tensor on a virtual GPU. `virtualgpu.ops.dispatch` adds its `__torch_dispatch__`."""

    _gpu: Gpu
    # A class attribute, as in PyTorch's stubs, and not a class method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    is_cuda, is_cpu = True, False

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The user's attributes, read-only. `async_save` of PyTorch copies them to the host."""
        attributes = attributes_of.__get__(self)
        own = {name: value for name, value in attributes.items() if name not in OWN_ATTRIBUTES}
        return MappingProxyType(own)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU of this tensor, as a torch.device."""
        return self._gpu.device

    if TYPE_CHECKING:

        def untyped_storage(self) -> VirtualStorage: ...

    def get_device(self) -> int:
        """Return the index of the GPU on which this tensor is."""
        return self._gpu.index

    def data_ptr(self) -> int:
        """Return the address of this tensor on the virtual GPU, which is the same in every run."""
        address = memory_of(self).address
        if not address:
            return 0
        return address + int(self.storage_offset()) * self.itemsize

    const_data_ptr = data_ptr

    def apply_(self, function: Any) -> Any:
        """Raise TypeError, because only tensors on the CPU have this method, as on CUDA."""
        raise TypeError("apply_ is only implemented on CPU tensors")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text that PyTorch prints for a CUDA tensor.

        PyTorch would print the name of the subclass, which has the same length as "tensor".
        """
        if tensor_contents is None and self.layout is torch.strided:
            if memory_of(self).kept is None:
                tensor_contents = f"<values not kept>, size={tuple(self.shape)}"
            elif not self._gpu.machine.values:  # printing on the GPU would lose some values
                tensor_contents = torch._tensor_str._tensor_str(self.detach().cpu(), len("tensor("))
        text = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        if text.startswith("Parameter("):
            return "Parameter containing:\nt" + text.removeprefix("Parameter(T")[:-1]
        return "t" + text[1:]

    def __format__(self, specification: str) -> str:
        if self.dim() == 0:
            return format(self.item(), specification)
        return object.__format__(self, specification)

    def tolist(self) -> Any:
        """Return the values of this tensor as a number or as nested lists.

        The host waits for them.
        """
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError, as on CUDA. With `force`, return a NumPy array on the host."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """Return the legacy name, such as "torch.cuda.FloatTensor", or a copy of type `dtype`."""
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, torch.dtype):
            return self.to(dtype, non_blocking=non_blocking)
        name = dtype
        if not isinstance(dtype, str):
            name = f"{dtype.__module__}.{dtype.__name__}"
        device = self.device if ".cuda." in name else "cpu"
        example = torch.empty(0, device="cpu").type(name.replace("torch.cuda.", "torch."))
        return self.to(device, example.dtype, non_blocking=non_blocking)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the dtype and device of `other`."""
        return self.to(other)

    def is_shared(self) -> bool:
        """Return True, because a tensor on CUDA always counts as shared."""
        return True

    def share_memory_(self) -> "VirtualTensor":
        """Return this tensor unchanged, because a tensor on CUDA is always shared."""
        return self

    def is_pinned(self, device: Any = None) -> bool:
        """Return False, because only memory of the host can be page-locked."""
        return False

    def pin_memory(self, device: Any = None) -> Any:
        """Raise RuntimeError, as on CUDA, because only memory of the host can be page-locked."""
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def new(self, *args: Any, device: Any = None) -> torch.Tensor:  # type: ignore[override]
        """Create a tensor of the same type from a size, from data, or empty (legacy)."""
        if device is None:
            device = self.device
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
        size: Any = args or (0,)
        if args and isinstance(args[0], torch.Size):
            size = args[0]
        return self.new_empty(size, device=device)

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that `stream` uses the tensor, too."""
        block = memory_of(self).block
        if block is not None:
            self._gpu.allocator.record_stream(block, stream.stream_id)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Return what PyTorch pickles for a CUDA tensor, so that any machine can read the file."""
        hooks: dict = {}
        untyped = _storage_of(self)
        storage = torch.storage.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
        size, stride = tuple(self.size()), self.stride()
        whole = (storage, self.storage_offset(), size, stride, self.requires_grad, hooks)
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, hooks)
        return torch._utils._rebuild_tensor_v2, whole

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if getattr(self, "_is_param", False):
            # As in Parameter.__deepcopy__, neither the gradient nor attributes are copied.
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(data, self.requires_grad)
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
                "because of a torch.nn.utils.weight_norm usage, see "
                "https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            storage = _storage_of(self).__deepcopy__(memo)  # views of one storage stay such views
            copy = self.new_empty([]).set_(
                storage, self.storage_offset(), self.size(), self.stride()
            )
        attributes_of.__get__(copy).update(self.__dict__)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    @property
    def __cuda_array_interface__(self) -> Any:
        because = "another library cannot read a virtual GPU's memory"
        raise unsupported(f"__cuda_array_interface__ ({because})")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise unsupported("DLPack (another library cannot read a virtual GPU's memory)")


# type() shows these names for CUDA tensors, and torch.save writes a storage's name.
VirtualTensor.__module__ = "torch"
VirtualTensor.__name__ = VirtualTensor.__qualname__ = "Tensor"
VirtualStorage.__module__ = "torch.storage"
VirtualStorage.__name__ = VirtualStorage.__qualname__ = "UntypedStorage"


def require_within_capacity(storage: VirtualStorage, nbytes: int) -> None:
    """Raise NotImplementedError if a storage that was sent to another process would grow.

    C++ would abort the process instead.
    """
    if storage.memory.export is not None and nbytes > storage.nbytes():
        raise unsupported("resizing a tensor that was sent to another process")


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of a device tensor."""
    return _storage_of(tensor).memory


def mark_written(tensor: torch.Tensor) -> None:
    """Note that the last launch on the current stream has written to the tensor.

    This is for streams whose operators the race detector does not compare.
    """
    memory = memory_of(tensor)
    memory.writer = unwatched(memory.gpu)
    memory.written = 0 if memory.writer is None else memory.writer.count


def allocate_on(
    gpu: Gpu, storage: torch.UntypedStorage, kept: bool = True, allocated: bool = True
) -> Memory:
    """Turn a storage of the host into a storage on `gpu`, and return its memory.

    `kept` says whether the storage has values, and `allocated` whether it gets a memory block.
    """
    nbytes = storage.nbytes()
    block = gpu.allocate(nbytes) if allocated else None
    memory = Memory(gpu, block, nbytes if kept else None)
    hang(memory, storage)
    return memory


def send_to(gpu: Gpu, storage: torch.UntypedStorage) -> None:
    """Move a storage of the host to the GPU. The host waits until the bytes are copied."""
    allocate_on(gpu, storage)
    if storage.nbytes():
        gpu.send(storage.nbytes())


def hang(memory: Memory, storage: torch.UntypedStorage) -> None:
    """Attach `memory` to `storage`, which becomes a storage on the memory's GPU."""
    storage.__class__ = VirtualStorage
    storage.__dict__["memory"] = memory


def wrap(plain: torch.Tensor, gpu: Gpu) -> VirtualTensor:
    """Return a tensor on `gpu` that shares the values of a plain tensor.

    A view uses the memory of its storage. Otherwise new memory of the GPU is allocated.
    """
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
    """Return an operator's result with all its plain tensors wrapped as virtual ones."""
    kind = type(result)
    if kind is torch.Tensor:
        return wrap(result, gpu)
    if kind is tuple or kind is list:
        return kind(wrap_all(x, gpu) for x in result)
    return result


def tensors(*arguments: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors among an operator's arguments, also those in lists and dictionaries."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors(*argument)
        elif isinstance(argument, dict):
            yield from tensors(*argument.values())


def span_bytes(size: Any, stride: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the smallest storage for a tensor of this size, stride and dtype."""
    if not all(size):
        return 0
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return elements * dtype.itemsize


def empty_without_values(
    gpu: Gpu,
    size: Any,
    stride: Any,
    dtype: torch.dtype,
    allocated: bool = True,
    storage: int = 0,
) -> VirtualTensor:
    """Return a tensor with a shape and memory, but without values.

    Its storage has at least `storage` bytes. With `allocated=False` it gets no block.
    """
    nbytes = max(storage, span_bytes(size, stride, dtype))
    # Memory first. If the allocation fails, no incomplete tensor is left.
    memory = Memory(gpu, gpu.allocate(nbytes) if allocated else None, None)
    tensor = _make_wrapper_subclass(
        VirtualTensor,
        size,
        strides=stride,
        dtype=dtype,
        layout=torch.strided,
        device=_CPU,
        storage_size=nbytes,
    )
    hang(memory, _storage_of(tensor))
    tensor._gpu = gpu
    return tensor


def empty(gpu: Gpu, size: Any, stride: Any, dtype: torch.dtype) -> VirtualTensor:
    """Return uninitialised memory on a GPU, like `torch.empty_strided`.

    It has values as long as the host has memory for them.
    """
    if not gpu.machine.may_keep(span_bytes(size, stride, dtype), dtype):
        made = empty_without_values(gpu, size, stride, dtype)
    else:
        with _DisableTorchDispatch():
            made = wrap(_empty_strided(size, stride, dtype=dtype, device="cpu"), gpu)
    memory_of(made).written = 0
    if gpu.machine.clock.captures:
        capture = gpu.stream.capture
        if capture is not None:
            made = capture.made(made)
    return made
