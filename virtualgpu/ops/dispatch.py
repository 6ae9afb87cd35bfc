"""Which function runs an operator on a virtual GPU: chosen once, from its name or from its schema."""

import pkgutil
from importlib import import_module
from typing import Any

import torch

from virtualgpu import hardware, ops
from virtualgpu.ops import composed, copies, operators, products, registry
from virtualgpu.ops.schemas import returns_views, writes, written
from virtualgpu.tensor import VirtualTensor, mark_written, unsupported

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
NAMED: dict[str, registry.Handler] = {
    "copy_": copies.copy_into,
    "_to_copy": copies.to_copy,
    "_local_scalar_dense": operators.read_scalar,
    "item": operators.read_scalar,
    "equal": operators.compare,
    "set_": operators.set_storage,
    "resize_": operators.resize,
}


# Operators of these namespaces have no kernels for CUDA.
ON_THE_CPU_ALONE = {"quantized", "_quantized", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked"}


def handler(func: Any) -> registry.Handler:
    """The function that runs this operator. Raises NotImplementedError if a virtual GPU does not."""
    chosen = _chosen(func)
    if not writes(func) or chosen in (operators.set_storage, operators.resize, composed.composite, composed.in_python, copies.copy_into):
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


def _chosen(func: Any) -> registry.Handler:
    if func.namespace == "c10d":
        raise unsupported("torch.distributed with CUDA tensors, and what stands on it (DistributedDataParallel, FSDP),")
    if func.namespace in ON_THE_CPU_ALONE:
        raise NotImplementedError(f"Could not run '{func._schema.name}' with arguments from the 'CUDA' backend.")
    name = func._schema.name.removeprefix("aten::")
    if name in registry.HANDLERS:
        return registry.HANDLERS[name]
    if name in NAMED:
        return NAMED[name]
    if name in LIKE:
        return operators.like
    if composed.is_made_of_others(func):
        return composed.composite
    if func.namespace != "aten" and composed.is_written_in_python(func):
        return composed.in_python
    if name in products.PRODUCTS:
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


for _module in pkgutil.iter_modules(ops.__path__):  # the families fill the registry
    import_module(f"{ops.__name__}.{_module.name}")
