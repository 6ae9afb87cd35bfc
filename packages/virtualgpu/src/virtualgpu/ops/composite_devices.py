"""Device checks that composite operators make in C++, where every tensor looks like a CPU tensor.

Each function raises RuntimeError with the words of the file of aten/src/ATen that it names.
"""

from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.errors import argument_differs, at_least_two
from virtualgpu.ops.call import checks

Tensor = torch.Tensor


def _argument(args: tuple, kwargs: dict, position: int, name: str) -> Any:
    """Return an argument, given its position and its name, or None if the call does not have it."""
    if position < len(args):
        return args[position]
    return kwargs.get(name)


@checks("meshgrid", "meshgrid.indexing")
def meshgrid(args: tuple, kwargs: dict) -> None:
    """Check the devices of `meshgrid`, as native/TensorShape.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    if len({x.device for x in args[0]}) > 1:
        raise RuntimeError("meshgrid expects all tensors to have the same device")


@checks("tensor_split.tensor_indices_or_sections")
def tensor_split(args: tuple, kwargs: dict) -> None:
    """Check the device of `tensor_split`'s indices, as native/TensorShape.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    where = args[1]
    if where.device.type != "cpu":
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to be on cpu, "
            f"but it's on {where.device}"
        )


@checks("_sparse_mm")
def sparse_product(args: tuple, kwargs: dict) -> None:
    """Check the devices of a sparse product, as the generated code of `_sparse_addmm` does.

    The summand of `_sparse_addmm` is on the device of the dense matrix.

    Source: native/sparse/SparseTensorMath.cpp.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    first, second = args[:2]
    if first.device != second.device and first.layout is torch.sparse_coo:
        raise RuntimeError(
            argument_differs([("self", second), ("mat1", first)], "wrapper_SparseCUDA__addmm")
        )


@checks("inner", "inner.out")
def inner(args: tuple, kwargs: dict) -> None:
    """Check the device types of `inner`, as native/LinearAlgebra.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    first = args[0]
    for x in (kwargs.get("out"), args[1]):
        if x is not None and x.device.type != first.device.type:
            raise RuntimeError(
                f"Expected tensor to have {first.device.type} DeviceType, but got tensor with "
                f"{x.device.type} DeviceType (while checking arguments for inner())"
            )


@checks("take_along_dim", "take_along_dim.out")
def take_along_dim(args: tuple, kwargs: dict) -> None:
    """Check the devices of `take_along_dim`, as native/TensorAdvancedIndexing.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    first = args[0]
    for x in (kwargs.get("out"), args[1]):
        if x is not None and x.device != first.device:
            raise RuntimeError(
                f"Expected tensor to have {first.device} Device, but got tensor with {x.device} "
                "Device (while checking arguments for torch.take_along_dim():)"
            )


@checks("linalg_multi_dot", "linalg_multi_dot.out")
def multi_dot(args: tuple, kwargs: dict) -> None:
    """Check the devices of `multi_dot`, as native/LinearAlgebra.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    first, *others = args[0]
    for number, x in enumerate(others, start=1):
        if x.device != first.device:
            raise RuntimeError(
                "multi_dot(): all tensors must be on the same device but tensor 0 is on "
                f"{first.device} and tensor {number} on {x.device}"
            )
    out = kwargs.get("out")
    if out is not None and out.device != first.device:
        raise RuntimeError(
            f"multi_dot(): expected out tensor to be on device {first.device} but got {out.device}"
        )


@checks(
    "quantile",
    "quantile.out",
    "quantile.scalar_out",
    "nanquantile",
    "nanquantile.out",
    "nanquantile.scalar_out",
)
def quantile(args: tuple, kwargs: dict) -> None:
    """Check the devices of `quantile` and `nanquantile`, as native/Sorting.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    x, q, out = args[0], args[1], kwargs.get("out")
    if isinstance(q, Tensor) and x.device != q.device:
        raise RuntimeError("quantile() q tensor must be on the same device as the input tensor")
    if out is not None and x.device != out.device:
        raise RuntimeError("quantile() out tensor must be on the same device as the input tensor")


@checks("tensordot.out")
def tensordot(args: tuple, kwargs: dict) -> None:
    """Check the devices of `tensordot` and its `out`, as native/Linear.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    (first, second), out = args[:2], kwargs["out"]
    if not first.device == second.device == out.device:
        raise RuntimeError(
            "tensordot: Expected the output and input tensors to be on the same device, but got "
            f"the output tensor on {out.device}, input tensor a on {first.device}, and input "
            f"tensor b on {second.device}"
        )


@checks("special_ndtr.out")
def ndtr(args: tuple, kwargs: dict) -> None:
    """Check the device of the `out` of `ndtr`, as native/UnaryOps.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    x, out = args[0], kwargs["out"]
    if x.device != out.device:
        raise RuntimeError(at_least_two([("self", x), ("result", out)]))


def _result_on_device(function: str, of_result: bool = True) -> Callable[[tuple, dict], None]:
    """Return a check that `out` of `function` is on the device of the input.

    `of_result` is False for functions that call `checkSameDevice` with exchanged arguments.
    """

    def check(args: tuple, kwargs: dict) -> None:
        """Check the device of `out`, as native/LinearAlgebraUtils.h does.

        `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the
        wrong devices.
        """
        x, out = args[0].device, kwargs["out"].device
        result, given = (out, x) if of_result else (x, out)
        if x != out:
            raise RuntimeError(
                f"{function}: Expected result and input tensors to be on the same device, "
                f"but got result on {result} and input on {given}"
            )

    return check


_check_norm = _result_on_device("linalg.norm", of_result=False)
_check_matrix_norm = _result_on_device("linalg.matrix_norm", of_result=False)
checks("linalg_norm.out", "linalg_norm.ord_str_out")(_check_norm)
checks("linalg_matrix_norm.out", "linalg_matrix_norm.str_ord_out")(_check_matrix_norm)
checks("linalg_cond.out", "linalg_cond.p_str_out")(_result_on_device("linalg.cond"))
checks("linalg_tensorinv.out")(_result_on_device("tensorinv"))
checks("linalg_tensorsolve.out")(_result_on_device("tensorsolve"))


def _windowed(name: str, position: int) -> Callable[[tuple, dict], None]:
    """Return a check that the window of the operator `name` is on the input's device.

    `position` is the position of the window among the arguments.
    """

    def check(args: tuple, kwargs: dict) -> None:
        """Check the device of the window, as native/SpectralOps.cpp does.

        `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the
        wrong devices.
        """
        x, window = args[0], _argument(args, kwargs, position, "window")
        if isinstance(window, Tensor) and window.device != x.device:
            raise RuntimeError(
                f"{name} input and window must be on the same device but got self on {x.device} "
                f"and window on {window.device}"
            )

    return check


checks("stft", "stft.center")(_windowed("stft", 4))
checks("istft")(_windowed("istft", 4))


@checks("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor")
def matrix_rank(args: tuple, kwargs: dict) -> None:
    """Check the devices of the tolerances, as native/LinearAlgebra.cpp does.

    `args` and `kwargs` are the arguments of the call. Raises RuntimeError if they are on the wrong
    devices.
    """
    x = args[0]
    tolerances = {"tol": args[1]} if len(args) > 1 else kwargs
    for name in ("tol", "atol", "rtol"):
        tolerance = tolerances.get(name)
        if isinstance(tolerance, Tensor) and tolerance.device != x.device:
            raise RuntimeError(
                f"torch.linalg.matrix_rank: Expected {name} and input tensors to be on the same "
                f"device, but got {name} on {tolerance.device} and input on {x.device}"
            )
