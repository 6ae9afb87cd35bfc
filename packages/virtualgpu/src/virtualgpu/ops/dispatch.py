"""The choice of the function that runs an operator, and the entry point of every call.

The function is chosen once per operator, by the operator's name or schema.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.autograd.graph import increment_version

from virtualgpu import ops
from virtualgpu.ops import composites, determinism, faults, operators
from virtualgpu.ops.call import HANDLERS, Call, Handler, Operator, operator
from virtualgpu.tensor import VirtualTensor, mark_written

# The first argument gives the shape, and the device unless there is a `device`. Nothing is read.
LIKE = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
NAMED: dict[str, Handler] = {
    "_local_scalar_dense": operators.read_scalar,
    "item": operators.read_scalar,
    "set_": operators.set_storage,
    "resize_": operators.resize,
    "resize_as_": operators.resize_as,
}
# Operators of these namespaces have no kernels for CUDA.
ON_THE_CPU_ALONE = {"quantized", "_quantized", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked"}
# By namespace, functions that import and return the handler. `install` adds them.
RANKS: dict[str, Callable[[], Handler]] = {}
# Handlers that do not touch values themselves.
TOUCHES_NO_VALUES = (
    operators.view,
    operators.set_storage,
    operators.resize,
    composites.composite,
    composites.in_python,
)


def dispatch(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Run an operator whose arguments include device tensors.

    This is `VirtualTensor.__torch_dispatch__`. `func` is the OpOverload.
    """
    if len(types) > 1:
        return NotImplemented  # another subclass, such as DTensor, handles the call first
    op = operator(func)
    handler = op.handler or _prepare(op)
    call = Call(op, args, kwargs or {})
    try:
        if op.by_argument:
            call.require_one_device()
        if call.gpu is not None:
            machine = call.gpu.machine
            if machine.several_streams:
                return machine.races.run(call)
            if machine.races.collectives.flights:
                machine.races.collectives.check(call)
        result = handler(call)
        if op.marks_written:
            for x in call.written():
                if type(x) is VirtualTensor and x.layout is torch.strided:
                    mark_written(x)
        return result
    except (IndexError, RuntimeError) as error:
        return faults.survive(call, error)


VirtualTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]


def _prepare(op: Operator) -> Handler:
    """Choose and return the function that runs an operator, and store the operator's properties.

    Raises NotImplementedError if a virtual GPU cannot run it.
    """
    handler = choose(op)
    op.by_argument, op.iterates, op.outputs_anywhere = faults.device_rules(op.func)
    op.model_only = handler is operators.like
    op.touches_values = handler not in TOUCHES_NO_VALUES and op.func.namespace not in RANKS
    op.marks_written = bool(op.written) and op.touches_values and op.name != "copy_"
    if faults.copies_to_outputs(op.func):
        handler = faults.checks_outputs(handler)
    handler = determinism.watched(op.name, handler)
    if op.written and op.name.startswith("_foreach_"):
        handler = _counting(handler)
    op.handler = handler
    return handler


def _counting(handler: Handler) -> Handler:
    """Return `handler`, which runs an operator on lists, changed to count in-place writes.

    Autograd increments a tensor's version counter at each in-place write, but not for operators on
    lists. There CUDA's own kernels do this.
    """

    def count(call: Call) -> Any:
        result = handler(call)
        increment_version(call.written())
        return result

    return count


def choose(op: Operator) -> Handler:
    """Return the handler registered for the operator, or else the handler for its kind."""
    func, name = op.func, op.name
    if func.namespace in RANKS:
        return RANKS[func.namespace]()
    cpu_only = func.namespace in ON_THE_CPU_ALONE
    if cpu_only or (name not in HANDLERS and faults.has_cpu_kernel_alone(func)):
        operator_name = func._schema.name
        raise NotImplementedError(
            f"Could not run '{operator_name}' with arguments from the 'CUDA' backend."
        )
    if name in HANDLERS:
        return HANDLERS[name]
    if name in NAMED:
        return NAMED[name]
    if name in LIKE:
        return operators.like
    if composites.is_made_of_others(func):
        return composites.composite
    if func.namespace != "aten" and composites.is_written_in_python(func):
        return composites.in_python
    if "generator" in op.arguments:
        return operators.draw
    if torch.Tag.nondeterministic_seeded in func.tags:
        return operators.draw_from_default
    if op.returns_views or torch.Tag.inplace_view in func.tags:
        return operators.view
    if torch.Tag.dynamic_output_shape in func.tags:
        return operators.shape_from_values
    if op.written:
        return operators.into_given
    return operators.compute


# The import of each family registers its operators.
for _module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
    import_module(_module.name)
