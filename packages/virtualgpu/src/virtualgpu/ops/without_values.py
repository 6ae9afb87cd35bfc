"""Operators on tensors without values. PyTorch's meta kernels give the outputs' shapes."""

from collections.abc import Callable
from math import isinf
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.errors import NOT_KEPT, unsupported
from virtualgpu.ops.call import SHAPES, Call, bytes_of
from virtualgpu.tensor import VirtualTensor, empty_without_values, memory_of, tensors, wrap

# Calls whose shapes are remembered. PyTorch needs a millisecond for those of a ReLU's gradient.
REMEMBERED = 4096
# With `values=False` this operator finds no infinity. Otherwise GradScaler would skip every step.
FINITE = "_amp_foreach_non_finite_check_and_unscale_"
INFER_FROM = 1 << 26  # product of input sizes from which on an output's size is inferred first

# Operators on sparse tensors that need no values.
PARTS_OF_SPARSE = {"is_coalesced", "_nnz", "_indices", "_values", "indices", "values"}
PARTS_OF_SPARSE |= {"sparse_dim", "dense_dim"}
# With a sparse and a dense argument, these operators return what two dense ones would return.
DENSE_WITH_SPARSE = {"mm", "addmm", "_sparse_addmm", "mv", "bmm", "add", "sub"}

LARGEST_WRITTEN = 1 << 26  # elements for which the host has memory


def loses_values(call: Call) -> bool:
    """Return whether the results of this call will have no values.

    The check is fast if no tensor is large and all have values.
    """
    machine = call.gpu.machine
    if machine.valueless_storages or not machine.values or call.most >= INFER_FROM:
        return not _keeps_values(call)
    return False


def _lacks_values(x: VirtualTensor) -> bool:
    """Return whether the values of `x` were not kept.

    For a sparse tensor, this is about its part `values`.
    """
    if x.layout is torch.strided:
        return memory_of(x).kept is None
    with _DisableTorchDispatch():
        values = x._values() if x.layout is torch.sparse_coo else x.values()
        memory = values.untyped_storage().__dict__.get("memory")
    return memory is not None and memory.kept is None


def _keeps_values(call: Call) -> bool:
    """Return whether all inputs of a call have values and the host has memory for the outputs."""
    machine = call.gpu.machine
    for x in call.tensors():
        if type(x) is VirtualTensor and _lacks_values(x) and call.op.name not in PARTS_OF_SPARSE:
            return False
    if machine.values and call.most < INFER_FROM:
        return True
    shapes = on_meta(call)
    if shapes is None:  # the shapes depend on values that are known
        return True
    fresh = []
    for x in tensors(shapes):
        if x.device.type == "meta" and x.layout is torch.strided:
            fresh.append((x.untyped_storage().nbytes(), x.dtype))
    if machine.values:
        return machine.may_keep(sum(nbytes for nbytes, _ in fresh), torch.float32)
    drawn = torch.Tag.nondeterministic_seeded in call.func.tags
    if drawn:
        fresh += [(bytes_of(x), x.dtype) for x in call.written()]
    return all(machine.may_keep(nbytes, dtype, drawn) for nbytes, dtype in fresh)


_shapes: dict[tuple, Any] = {}  # the results of on_meta


def on_meta(call: Call) -> Any:
    """Return the operator's results on the meta device, which must not be changed.

    Returns None if PyTorch cannot compute their shapes without the values.
    """
    key = call.func, torch.get_default_dtype(), _shape_key(call.args), _shape_key(call.kwargs)
    try:
        if key not in _shapes:
            if len(_shapes) >= REMEMBERED:
                _shapes.clear()
            _shapes[key] = _on_meta(call)
    except TypeError:  # an argument cannot be hashed
        return _on_meta(call)
    return _shapes[key]


def _largest_nonzero(call: Call) -> torch.Tensor:
    """Return the meta result of `nonzero` for a tensor in which no element is zero."""
    x = call.args[0]
    return torch.empty((x.numel(), x.dim()), dtype=torch.int64, device="meta")


def _largest_selection(call: Call) -> torch.Tensor:
    """Return the meta result of `masked_select` for a mask that is true everywhere."""
    x, mask = call.args[:2]
    count = torch.broadcast_shapes(x.shape, mask.shape).numel()
    return torch.empty(count, dtype=x.dtype, device="meta")


def _largest_unique(call: Call) -> tuple[torch.Tensor, ...]:
    """Return the meta results of `unique` for a tensor whose elements all differ."""
    x = call.args[0]
    inverse, counts = call.argument("return_inverse"), call.argument("return_counts")
    dim = call.argument("dim") if "dim" in call.op.arguments else None
    if dim is None:
        count, shape, places = x.numel(), (x.numel(),), x.shape
    else:
        count, shape, places = x.shape[dim], x.shape, (x.shape[dim],)

    def whole_numbers(size: Any) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device="meta")

    return (
        torch.empty(shape, dtype=x.dtype, device="meta"),
        whole_numbers(places if inverse else 0),
        whole_numbers(count if counts else 0),
    )


LARGEST: dict[str, Callable[[Call], Any]] = {
    "nonzero": _largest_nonzero,
    "masked_select": _largest_selection,
    "_unique2": _largest_unique,
    "unique_dim": _largest_unique,
    "unique_consecutive": _largest_unique,
}


def _shape_key(x: Any) -> Any:
    """Return a cache key for an operator's argument `x`.

    Arguments with equal keys give results of the same shapes. The key includes the type of numbers,
    because 1, 1.0 and True are equal but give other dtypes.
    """
    if isinstance(x, torch.Tensor):
        if _has_strides(x):
            return x.size(), x.stride(), x.dtype
        if x.is_nested:
            return torch.Tensor
        return x.size(), x.layout, x.dtype
    if isinstance(x, (list, tuple)):
        return tuple(map(_shape_key, x))
    if isinstance(x, dict):
        return tuple((name, _shape_key(value)) for name, value in x.items() if name != "generator")
    return type(x), x


def _has_strides(x: torch.Tensor) -> bool:
    """Return whether the tensor has strides. Sparse and nested tensors do not."""
    return x.layout is torch.strided and not x.is_nested


def _on_meta(call: Call) -> Any:
    """Return a call's results on the meta device, or None if PyTorch cannot compute their shapes.

    If the arguments do not fit, the error of the computing kernel is raised.
    """
    dense = call.op.name in DENSE_WITH_SPARSE and any(map(_has_strides, call.tensors()))

    def shape_of(x: torch.Tensor) -> torch.Tensor:
        if dense and x.layout is torch.sparse_coo:
            return torch.empty(x.size(), dtype=x.dtype, device="meta")
        if not _has_strides(x):
            raise NotImplementedError
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    kernel = SHAPES.get(call.op.name, call.func)
    try:
        return kernel(*_mapped(shape_of, call.args), **_mapped(shape_of, call.kwargs))
    except NotImplementedError:
        return None
    except (IndexError, RuntimeError) as error:
        if torch.Tag.dynamic_output_shape in call.func.tags and "a meta tensor" in str(error):
            return None
        raise _error_of_kernel(call, error) from None


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Return an operator's arguments `x` with `change` applied to each tensor.

    Random generators become None.
    """
    if isinstance(x, torch.Tensor):
        with _DisableTorchDispatch():
            return change(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(change, y) for y in x)
    if isinstance(x, dict):
        return {key: _mapped(change, value) for key, value in x.items()}
    if isinstance(x, torch.Generator):
        return None
    return x


def _error_of_kernel(call: Call, error: Exception) -> Exception:
    """Return the error that the computing kernel raises for a call, in place of a meta kernel's.

    `error` is that of the meta kernel, which has other words. To find the right one, the computing
    kernel gets tensors of the same shapes. Tensors that it only reads take no memory.
    """
    written = call.written()
    if sum(x.numel() for x in written) > LARGEST_WRITTEN:
        return error

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        if any(x is target for target in written):
            return torch.empty(x.size(), dtype=x.dtype, device="cpu")
        return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.size())

    try:
        call.func(*_mapped(stand_in, call.args), **_mapped(stand_in, call.kwargs))
    except NotImplementedError:
        return error
    except (IndexError, RuntimeError) as own:
        return own
    return error


def infer(call: Call) -> Any:
    """Run an operator without computing values, and return its results."""
    targets = call.written()
    op, gpu = call.op, call.gpu
    finite = op.name == FINITE and not gpu.machine.values
    for x in targets:
        if not (finite and x is call.argument("found_inf")):
            forget(x)
    if op.outs:
        resize(call, targets)
    if op.only_writes:
        results = len(op.func._schema.returns)
        if results == 0:
            return None
        if results == 1:
            return targets[0]
        return tuple(targets)

    answer = None
    if not gpu.machine.values:
        answer = _answer_of_check(call)

    def result_of(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.layout is not torch.strided:
                raise unsupported("a sparse result of tensors whose values were not kept")
            if answer is not None and gpu.machine.may_keep(x.numel(), torch.bool):
                with _DisableTorchDispatch():
                    return wrap(torch.full(x.size(), answer, device="cpu"), gpu)
            # A number that was made by shrinking the tensor it sums up keeps that tensor's memory.
            nbytes = 0 if x.dim() else x.untyped_storage().nbytes()
            return empty_without_values(gpu, x.size(), x.stride(), x.dtype, storage=nbytes)
        if isinstance(x, (list, tuple)):
            return type(x)(result_of(y) for y in x)
        return x

    return result_of(shapes_of(call))


def _answer_of_check(call: Call) -> bool | None:
    """Return the made-up result of an operator that checks values, or None for other operators.

    No value counts as NaN or infinite, because a script would skip a step with such values.
    `isfinite` consists of these operators. All arguments of a distribution are valid
    (`_is_all_true`).
    """
    name, makes_up = call.op.name, call.gpu.machine.makes_up
    if name == "_is_all_true":
        return True
    if makes_up is not None and call.func is torch.ops.aten.all.default:
        makes_up(torch.bool)
        return True  # most programs continue if all() is true, and stop or wait otherwise
    if name in ("isnan", "isinf"):
        return False
    if name in ("eq", "ne") and call.args[1] is call.args[0]:
        return name == "eq"
    if name in ("eq", "ne") and isinstance(call.args[1], float) and isinf(call.args[1]):
        return name == "ne"
    return None


def resize(call: Call, targets: list[torch.Tensor]) -> None:
    """Resize the tensors in `targets`, the outputs of a call, to the sizes of its results."""
    # split_with_sizes_copy returns nothing. PyTorch checks the sizes of the given tensors.
    if not call.op.func._schema.returns:
        on_meta(call)
        return
    for x, shape in zip(targets, tensors(shapes_of(call)), strict=True):
        if x.size() != shape.size():
            fresh = empty_without_values(call.gpu, shape.size(), shape.stride(), shape.dtype)
            with _DisableTorchDispatch():
                x.set_(fresh)  # type: ignore[call-overload]  # the stubs do not know tensors here


def shapes_of(call: Call) -> Any:
    """Return the results of a call as meta tensors.

    Raises RuntimeError if PyTorch cannot compute their shapes without the values.
    """
    shapes = on_meta(call)
    if shapes is None:
        shapes = _largest(call)
    if shapes is None:
        raise RuntimeError(
            f"{call.func._schema.name}: the shape of its result depends on values, and these "
            f"{NOT_KEPT}"
        )
    return shapes


def _largest(call: Call) -> Any:
    """Return results of the largest possible shapes on the meta device, or None.

    These are the shapes for masks that are true everywhere, and for elements that all differ.
    Returns None if values may not be made up, or if the results have no largest shape.
    """
    makes_up, largest = call.gpu.machine.makes_up, LARGEST.get(call.op.name)
    if makes_up is None or largest is None:
        return None
    makes_up(torch.bool)
    return largest(call)


def forget(x: torch.Tensor) -> None:
    """Note that a tensor's storage has no values any more, because they were overwritten.

    Raises NotImplementedError if another process sees the tensor.
    """
    memory = memory_of(x)
    if memory.shared and memory.kept is not None:
        raise unsupported(
            "writing values that were not kept into a tensor that another process sees"
        )
    memory.forget()


def all_known(*values: Any) -> bool:
    """Return whether all device tensors among these values, also in lists, have values."""
    return all(
        type(x) is not VirtualTensor or memory_of(x).kept is not None for x in tensors(*values)
    )
