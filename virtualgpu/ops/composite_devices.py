"""Device checks that composite operators make in C++, where every tensor looks like a CPU tensor.

Each function raises RuntimeError with the words of the file of aten/src/ATen that it names.
"""

from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.ops.call import checks

Tensor = torch.Tensor


def _argument(args: tuple, kwargs: dict, position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


@checks("meshgrid", "meshgrid.indexing")
def meshgrid(args: tuple, kwargs: dict) -> None:
    """native/TensorShape.cpp"""
    if len({x.device for x in args[0]}) > 1:
        raise RuntimeError("meshgrid expects all tensors to have the same device")


@checks("tensor_split.tensor_indices_or_sections")
def tensor_split(args: tuple, kwargs: dict) -> None:
    """native/TensorShape.cpp"""
    where = args[1]
    if where.device.type != "cpu":
        raise RuntimeError(
            f"tensor_split expected tensor_indices_or_sections to be on cpu, but it's on {where.device}"
        )


@checks("inner")
def inner(args: tuple, kwargs: dict) -> None:
    """native/LinearAlgebra.cpp"""
    first, second = args[:2]
    if first.device.type != second.device.type:
        raise RuntimeError(
            f"Expected tensor to have {first.device.type} DeviceType, but got tensor with "
            f"{second.device.type} DeviceType (while checking arguments for inner())"
        )


@checks("take_along_dim")
def take_along_dim(args: tuple, kwargs: dict) -> None:
    """native/TensorAdvancedIndexing.cpp"""
    x, indices = args[:2]
    if x.device != indices.device:
        raise RuntimeError(
            f"Expected tensor to have {x.device} Device, but got tensor with {indices.device} Device "
            "(while checking arguments for torch.take_along_dim():)"
        )


@checks("linalg_multi_dot")
def multi_dot(args: tuple, kwargs: dict) -> None:
    """native/LinearAlgebra.cpp"""
    first, *others = args[0]
    for number, x in enumerate(others, start=1):
        if x.device != first.device:
            raise RuntimeError(
                "multi_dot(): all tensors must be on the same device but tensor 0 is on "
                f"{first.device} and tensor {number} on {x.device}"
            )


@checks("quantile", "nanquantile")
def quantile(args: tuple, kwargs: dict) -> None:
    """native/Sorting.cpp"""
    x, q = args[:2]
    if x.device != q.device:
        raise RuntimeError("quantile() q tensor must be on the same device as the input tensor")


def _windowed(name: str, position: int) -> Callable[[tuple, dict], None]:
    def check(args: tuple, kwargs: dict) -> None:
        """native/SpectralOps.cpp"""
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
    """native/LinearAlgebra.cpp"""
    x = args[0]
    tolerances = {"tol": args[1]} if len(args) > 1 else kwargs
    for name in ("tol", "atol", "rtol"):
        tolerance = tolerances.get(name)
        if isinstance(tolerance, Tensor) and tolerance.device != x.device:
            raise RuntimeError(
                f"torch.linalg.matrix_rank: Expected {name} and input tensors to be on the same device, "
                f"but got {name} on {tolerance.device} and input on {x.device}"
            )
