"""Which function runs an operator on a virtual GPU: chosen once, from its name or from its schema."""

from typing import Any

import torch
from torch.library import _impls  # what Python has registered: "namespace/name.overload/key"

from labkit.vgpu import copies, footprint, hardware, operators
from labkit.vgpu.schemas import returns_views, writes, written
from labkit.vgpu.tensor import VirtualTensor, mark_written, unsupported

# The first argument gives the shape (and the device, unless `device` says otherwise); nothing is read.
LIKE = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
# Operators that take CPU tensors beside CUDA ones: indices, and what CUDA's own kernels read on the host.
MIXED = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_pack_padded_sequence",
    "_cudnn_rnn",
    "_ctc_loss",
    "_ctc_loss_backward",
}
NAMED: dict[str, footprint.Handler] = {
    "copy_": copies.copy_into,
    "_to_copy": copies.to_copy,
    "_local_scalar_dense": operators.read_scalar,
    "item": operators.read_scalar,
    "equal": operators.compare,
    "set_": operators.set_storage,
    "resize_": operators.resize,
}


CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Operators of these namespaces have no kernels for CUDA.
ON_THE_CPU_ALONE = {"quantized", "_quantized", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked"}


def handler(func: Any) -> footprint.Handler:
    """The function that runs this operator. Raises NotImplementedError if a virtual GPU does not."""
    chosen = _chosen(func)
    if not writes(func) or chosen in (operators.set_storage, operators.resize, copies.copy_into):
        return chosen

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        result = chosen(func, args, kwargs)
        if hardware.watcher is not None:  # who has written it down
            return result
        for x in written(func, args, kwargs):
            if type(x) is VirtualTensor and x.layout is torch.strided:
                mark_written(x)
        return result

    return run


def _chosen(func: Any) -> footprint.Handler:
    if func.namespace == "c10d":
        raise unsupported("torch.distributed with CUDA tensors, and what stands on it (DistributedDataParallel, FSDP),")
    if func.namespace in ON_THE_CPU_ALONE:
        raise NotImplementedError(f"Could not run '{func._schema.name}' with arguments from the 'CUDA' backend.")
    if func.namespace != "aten" and _is_written_in_python(func):
        return in_python
    name = func._schema.name.removeprefix("aten::")
    if name in footprint.HANDLERS:
        return footprint.HANDLERS[name]
    if name in NAMED:
        return NAMED[name]
    if name in LIKE:
        return operators.like
    if name in operators.PRODUCTS:
        return operators.product
    arguments = {argument.name for argument in func._schema.arguments}
    if "generator" in arguments:
        return operators.draw
    if torch.Tag.nondeterministic_seeded in func.tags:
        return operators.draw_from_default
    if returns_views(func):
        return operators.view
    if torch.Tag.dynamic_output_shape in func.tags:
        return operators.shape_from_values
    if writes(func):
        return operators.into_given if name not in MIXED else operators.mixed
    return operators.mixed if name in MIXED else operators.compute


# Operators that a program or another library adds (torch.library)


def in_python(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run its function for CUDA, whose own operators come here one by one. PyTorch says so where it has none for CUDA."""
    return func.redispatch(CUDA, *args, **kwargs)


def _is_written_in_python(func: Any) -> bool:
    """Is what CUDA would run a Python function? Instead of a compiled kernel the CPU's is run; without one the operator is refused."""
    name = func.name()

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    def in_python(key: str) -> bool:
        return f"{name.replace('::', '/')}/{key}" in _impls

    runs = next((key for key in ("CUDA", "CompositeExplicitAutograd") if has(key)), "CPU")
    if runs == "CUDA" and not in_python("CUDA") and (in_python("CPU") or not has("CPU")):
        raise unsupported(f"{name}, a CUDA kernel of another library,")
    return in_python(runs)
