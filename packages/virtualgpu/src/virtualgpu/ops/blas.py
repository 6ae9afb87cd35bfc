"""Memory and time of matrix products: workspaces of cuBLAS, copies of factors, and work.

A library handle belongs to a thread, and a workspace to a handle on a stream. A workspace is
allocated at its first use, after the operator's output, and stays. cuBLAS cannot read every
factor as it lies: PyTorch copies the others first. Rules from PyTorch's sources:
aten/src/ATen/cuda/CublasHandlePool.cpp (sizes, handles),
aten/src/ATen/cuda/detail/DeviceThreadHandles.h (who holds which handle),
aten/src/ATen/native/cuda/Blas.cpp (which product takes which library).
Compared with recordings from an H200 (torch 2.11, CUDA 13.0).
"""

import os
import re
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import torch

from virtualgpu.allocator import Block
from virtualgpu.clock.costs import BIASED_SPLIT_TERMS, SPLIT_TERMS
from virtualgpu.errors import cpp_name, not_implemented, scalar_name
from virtualgpu.hardware import Gpu
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, Work, device_time, shapes_by, temporaries
from virtualgpu.ops.call import handles as handles_operators
from virtualgpu.ops.determinism import require_fixed_workspaces
from virtualgpu.ops.half import sums_in_float32
from virtualgpu.ops.tf32 import SINGLE, rounds_factors
from virtualgpu.tensor import VirtualTensor, memory_of, tensors

KIB = 1024
WORKSPACE = 8 * 1024 * KIB + 8 * 16 * KIB  # two of 4 MiB and eight of 16 KiB
WORKSPACE_HOPPER = 32 * 1024 * KIB  # from compute capability 9.0 on
WORKSPACE_LT = 1024 * KIB
_PAIR = re.compile(r":(\d+):(\d+)")
# Matrix products: the argument positions of the two factors.
PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1),
    "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2),
    "addmv": (1, 2), "addmv_": (1, 2), "_addmm_activation": (1, 2),
}  # fmt: skip
# Products with a vector use no TF32. PyTorch turns it off for matrix times vector
# (ATen/cuda/CUDABlas.cpp), and cuBLAS computes dot products without tensor cores.
WITH_VECTORS = {"mv", "dot", "vdot", "addmv", "addmv_"}
FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
# The names that CUDA gives the kernels that it does not have for integers.
INTEGER_PRODUCT = {
    **dict.fromkeys(("bmm", "baddbmm", "baddbmm_"), "baddbmm_cuda"),
    **dict.fromkeys(("mv", "addmv", "addmv_"), "addmv_impl_cuda"),
    "dot": "dot",
    "vdot": "vdot",
}
sums_in_float32(*(getattr(torch.ops.aten, name) for name in (*PRODUCTS, "addr", "addbmm")))
_is_deterministic = torch._C._get_deterministic_algorithms
_current_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


def workspace_bytes(major: int, environment: Mapping[str, str]) -> int:
    """Return the bytes of cuBLAS's workspace on a GPU of compute capability `major`.

    CUBLAS_WORKSPACE_CONFIG in the environment sets the size, as pairs ":KIBS:COUNT". Without it,
    the size is NVIDIA's advice for the architecture.
    """
    default = WORKSPACE_HOPPER if major in (9, 10) else WORKSPACE
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if config is None:
        return default
    pairs = _PAIR.findall(config)
    if not pairs:
        warnings.warn(
            "Could not parse CUBLAS_WORKSPACE_CONFIG, "
            f"using default workspace size of {default} bytes.",
            stacklevel=2,
        )
        return default
    return sum(int(size) * int(count) for size, count in pairs) * KIB


def workspace_lt_bytes(environment: Mapping[str, str]) -> int:
    """Return the bytes of cuBLASLt's own workspace, or 0 if it shares the workspace of cuBLAS.

    CUBLASLT_WORKSPACE_SIZE in the environment sets the size in KiB.
    """
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return 0
    given = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    if given.isdigit():
        return int(given) * KIB
    return WORKSPACE_LT


class Held:
    """A cuBLAS handle that a thread holds. It is given back when the thread ends."""

    def __init__(self, handles: "Handles") -> None:
        """Take the cuBLAS handle that was given back last, or make a new one."""
        self._free = handles.free
        self.number = handles.free.pop() if handles.free else handles.new()
        # The streams whose workspaces are allocated: twice the stream's number for cuBLAS, and
        # one more for cuBLASLt.
        self.ready: set[int] = set()
        handles.held.add(self)

    def __del__(self) -> None:
        """Give the cuBLAS handle back to the GPU's handles."""
        self._free.append(self.number)


class Handles:
    """The cuBLAS handles of one GPU, and the workspaces that belong to them.

    Each GPU has a thread of its own for the operators of a backward pass. This thread takes a
    handle like any other thread, and keeps it.
    """

    def __init__(self, gpu: Gpu) -> None:
        """Start without handles on `gpu`, and read the workspaces' sizes from the environment."""
        self.free: list[int] = []  # given back by threads that ended: the last is taken first
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()  # by threads, at present
        self._gpu = gpu
        self._count = 0
        self._workspaces: dict[tuple[int, int], Block | None] = {}
        self._threads = threading.local()
        self._autograd: Held | None = None
        self._bytes = workspace_bytes(gpu.profile.major, os.environ), workspace_lt_bytes(os.environ)
        self.lt = os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"

    def new(self) -> int:
        """Return the number of a new cuBLAS handle."""
        self._count += 1
        return self._count

    def use(self, lt: bool = False) -> None:
        """Allocate the workspaces of the calling thread's handle for its current stream.

        With `lt`, allocate the workspace of cuBLASLt too. Existing workspaces are kept.
        """
        if _current_graph_task() != -1:
            held = self._autograd = self._autograd or Held(self)
        else:
            held = self._threads.__dict__.get("held") or self._take()
        stream = self._gpu.stream.stream_id
        if 2 * stream + lt in held.ready:
            return
        for library in (False, True) if lt else (False,):
            key = (held.number, 2 * stream + library)
            if key not in self._workspaces:
                self._workspaces[key] = self._gpu.allocate(self._bytes[library])
            held.ready.add(key[1])

    @property
    def workspaces(self) -> set[tuple[int, int]]:
        """Return (handle, stream) of each workspace that is allocated."""
        return set(self._workspaces)

    def give_back(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Free the workspaces of all handles and streams, except those in `kept`.

        `kept` has pairs (handle, stream).
        """
        for key in self.workspaces.difference(kept):
            block = self._workspaces.pop(key)
            if block is not None:
                self._gpu.allocator.free(block)
            for held in self.held:
                if held.number == key[0]:
                    held.ready.discard(key[1])

    def _take(self) -> Held:
        """Give the calling thread a cuBLAS handle, and return it."""
        held = self._threads.held = Held(self)
        return held


def handles(gpu: Gpu) -> Handles:
    """Return the cuBLAS handles of a GPU. The first call creates them."""
    found = gpu.libraries.get("cublas")
    if found is None:
        found = gpu.libraries["cublas"] = Handles(gpu)
    return found


def held_workspaces(gpu: Gpu) -> set[tuple[int, int]]:
    """Return (handle, stream) of each cuBLAS workspace that is allocated on this GPU."""
    found = gpu.libraries.get("cublas")
    if found is None:
        return set()
    return found.workspaces


def free_workspaces(gpu: Gpu, kept: Collection[tuple[int, int]]) -> None:
    """Free cuBLAS's workspaces on this GPU, except those in `kept`.

    `kept` has pairs (handle, stream).
    """
    found = gpu.libraries.get("cublas")
    if found is not None:
        found.give_back(kept)


def clear_workspaces(gpu: Gpu) -> None:
    """Free cuBLAS's workspaces. Each handle allocates a new one at its next use.

    It replaces `torch._C._cuda_clearCublasWorkspaces`.
    """
    found = gpu.libraries.pop("cublas", None)
    if found is not None:
        found.give_back()


def copied_bytes(matrix: torch.Tensor) -> int:
    """Return the bytes of the copy that PyTorch makes of a matrix before cuBLAS multiplies it.

    Returns 0 if PyTorch makes no copy. The last two dimensions of `matrix` are the matrix. cuBLAS
    can read it without a copy if its rows or its columns are contiguous and do not overlap.
    """
    if matrix.layout is not torch.strided or matrix.is_contiguous():
        return 0
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    if (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows)):
        return 0
    if matrix.dim() == 2 and matrix.t().is_contiguous():
        return 0
    return matrix.numel() * matrix.itemsize


def _product(
    left: torch.Tensor, right: torch.Tensor, result: VirtualTensor, lt: bool = False
) -> Iterator[int]:
    """Yield the bytes of the copies of `left` and `right`, then allocate cuBLAS's workspace.

    The two are the factors of the product `result`. No copy is made of a factor that cuBLAS can
    read. With `lt`, the workspace of cuBLASLt is allocated, too.
    """
    if not result.numel() or not left.numel():
        return  # nothing to multiply: cuBLAS is not called
    copy = copied_bytes(left)
    if copy:
        yield copy
    copy = copied_bytes(right)
    if copy:
        yield copy
    handles(result._gpu).use(lt)


@handles_operators(*PRODUCTS, "addbmm", "addbmm_")
def product(call: Call) -> Any:
    """Run an operator that is a matrix product, and return its result.

    Raises:
        NotImplementedError: CUDA has no product of this dtype: an integer, float8 or complex32.
        RuntimeError: The operands differ in dtype or GPU.
    """
    call.common_gpu()
    by_cublas_lt = call.op.name == "addmm" and call.args[0].dim() == 1
    if _is_deterministic() and not by_cublas_lt:
        require_fixed_workspaces()
    dtype = call.args[0].dtype
    multiplied = dtype.is_floating_point or dtype.is_complex
    if not multiplied or dtype.itemsize == 1 or dtype is torch.complex32:
        raise not_implemented(INTEGER_PRODUCT.get(call.op.name, "addmm_cuda"), dtype)
    for x in call.args[1:3]:
        if isinstance(x, torch.Tensor) and x.dtype is not dtype:
            _require_one_dtype(call)
    if call.op.outs:
        return operators.into_given(call)
    return operators.run(call)


@handles_operators("_int_mm")
def product_of_bytes(call: Call) -> Any:
    """Run the operator for a product of int8 matrices, and return its result.

    Source: `_int_mm_out_cuda` in ATen/native/cuda/Blas.cpp. Raises RuntimeError for sizes that
    cuBLASLt does not multiply.
    """
    call.common_gpu()
    left, right = call.args[0], call.args[1]
    if left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]:
        (rows, terms), columns = left.shape, right.shape[1]
        if rows <= 16:
            raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {rows}")
        for name, size in (("self", terms), ("mat2", columns)):
            if size == 0 or size % 8:
                raise RuntimeError(
                    f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but got {size}"
                )
    if call.op.outs:
        return operators.into_given(call)
    return operators.run(call)


@handles_operators("_scaled_mm")
def scaled_product(call: Call) -> Any:
    """Run the operator for a product of float8 matrices with scales, and return its result.

    Source: `_scaled_mm_out_cuda` in ATen/native/cuda.

    Raises:
        RuntimeError: The GPU or cuBLASLt does not multiply matrices of these forms.
    """
    gpu = call.common_gpu()
    if (gpu.profile.major, gpu.profile.minor) < (8, 9):
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability "
            ">= 9.0 or 8.9, or ROCm MI300+"
        )
    left, right = call.args[0], call.args[1]
    if left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]:
        (rows, terms), columns = left.shape, right.shape[1]
        if terms % 16:
            raise RuntimeError(
                "Expected trailing dimension of mat1 to be divisible by 16 "
                f"but got mat1 shape: ({rows}x{terms})."
            )
        if columns % 16:
            raise RuntimeError(f"mat2 shape ({terms}x{columns}) must be divisible by 16")
        if left.dtype == right.dtype == torch.float8_e5m2:
            raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
        if left.stride(1) != 1 or right.stride(0) != 1:
            raise RuntimeError(
                "Only multiplication of row-major and column-major matrices "
                "is supported by cuBLASLt"
            )
    bias = call.argument("bias")
    if bias is not None:
        _require_bias_of_half_precision(bias.dtype, call.argument("out_dtype") or left.dtype)
    if call.op.outs:
        return operators.into_given(call)
    return operators.run(call)


def _require_bias_of_half_precision(bias: torch.dtype, out: torch.dtype) -> None:
    """Check that cuBLASLt can add a bias of dtype `bias` to an output of dtype `out`.

    Raises:
        RuntimeError: cuBLASLt does not support these dtypes.
    """
    name = scalar_name(bias)
    if out is torch.float32:
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
    if bias not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"Bias must be BFloat16 or Half, but got {name}")
    if out is torch.bfloat16 and bias is not torch.bfloat16:
        raise RuntimeError(f"Bias must be BFloat16 to compute BFloat16 output, but got {name}")
    if out is torch.float16 and bias is not torch.float16:
        raise RuntimeError(f"Bias must be Float16 to compute Half output, but got {name}")


def _require_one_dtype(call: Call) -> None:
    """Check that the operands have one dtype, if CUDA's error text differs from the CPU's.

    Source: benchmarks/fidelity/h200/mixed_dtypes.json.

    Raises:
        RuntimeError: The operands differ in dtype.
    """
    if call.func._overloadname.startswith("dtype"):
        return
    name = call.op.name.removesuffix("_")
    kinds = [x.dtype for x in call.args[:3] if isinstance(x, torch.Tensor)]
    words = [scalar_name(kind) for kind in kinds]
    if name in ("addmm", "addbmm", "_addmm_activation"):
        left, position = "self", 0
        if kinds[0] == kinds[2]:
            left, position = "mat1", 1
        raise RuntimeError(
            f"{left} and mat2 must have the same dtype, but got {words[position]} and {words[2]}"
        )
    if name == "baddbmm":
        summand, first, second = map(cpp_name, kinds)
        raise RuntimeError(
            f"Input dtypes must be the same, got: input {summand}, "
            f"batch1: {first}, batch2: {second}"
        )
    if name == "mv":
        raise RuntimeError(f"expected scalar type {words[0]} but found {words[1]}")


def product_format(dtype: torch.dtype, gpu: Gpu, operation: str = "matmul") -> str:
    """Return the format in which a GPU's library multiplies matrices of a dtype.

    `operation` is "matmul" for cuBLAS, and "conv" or "rnn" for cuDNN.
    """
    if dtype in SINGLE and gpu.multiplies_in_tf32(operation):
        return "tf32"
    return FORMATS.get(dtype, "float32")


def multiplies_in_tf32(*args: Any, **kwargs: Any) -> bool:
    """Return whether a matrix product of these arguments uses TF32. Sparse products do not.

    If a race changes what a product has read, the product is computed again with plain tensors.
    """
    gpu = getattr(args[0], "_gpu", None)
    if gpu is None:
        gpu = next((x._gpu for x in args if type(x) is VirtualTensor), None)
    if gpu is None or product_format(args[0].dtype, gpu) != "tf32":
        return False
    return all(x.layout is torch.strided for x in tensors(args, kwargs))


for _name, _positions in PRODUCTS.items():
    if _name not in WITH_VECTORS:
        rounds_factors(getattr(torch.ops.aten, _name), _positions, multiplies_in_tf32)
# PyTorch computes these with one matrix product for each matrix of a batch, group or window.
for _name in ("addbmm", "addbmm_"):
    rounds_factors(getattr(torch.ops.aten, _name), (1, 2), multiplies_in_tf32)
for _name in ("_grouped_mm", "conv_tbc"):
    rounds_factors(getattr(torch.ops.aten, _name), (0, 1), multiplies_in_tf32)


def matrix_work(name: str, args: tuple) -> tuple[int, int] | None:
    """Return (floating-point operations, output elements) of the matrix product `name`.

    `args` are the operator's arguments. Returns None for an operator that is not a matrix product.
    """
    positions = PRODUCTS.get(name)
    if positions is None:
        return None
    left, right = args[positions[0]], args[positions[1]]
    terms = left.shape[-1]
    outputs = left.numel() // max(terms, 1)
    if right.dim() > 1:
        outputs *= right.shape[-1]
    return 2 * outputs * terms, outputs


@device_time(*PRODUCTS)
def product_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a matrix product, in the format in which cuBLAS multiplies.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    flops, outputs = matrix_work(call.op.name, call.args) or (0, 0)
    left, right = (call.args[position] for position in PRODUCTS[call.op.name])
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    dtype = call.args[0].dtype
    if call.op.name in WITH_VECTORS:
        format = FORMATS.get(dtype, "float32")
    else:
        format = product_format(dtype, call.gpu)
    split_terms = SPLIT_TERMS
    if format == "float32" and call.op.name == "addmm" and call.args[0].dim() == 1:
        split_terms = BIASED_SPLIT_TERMS  # a bias: cuBLASLt computes this
    return Work(moved, flops, format, outputs, matrix=(rows, columns), split_terms=split_terms)


@device_time("_grouped_mm")
def grouped_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a grouped product.

    Each matrix of a group is multiplied only with the columns of its own group.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    left, right = call.args[:2]
    times = left.shape[0] if left.dim() > right.dim() else 1
    flops = 2 * left.numel() * right.shape[-1] // times
    return Work(moved, flops, product_format(left.dtype, call.gpu), results[0].numel())


@shapes_by("_grouped_mm")
def grouped_shape(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> torch.Tensor:
    """Return a meta tensor with the shape of a grouped product's result.

    Rows begin at multiples of 16 bytes (aten/src/ATen/native/GroupedMMUtils.h).
    """
    if left.dtype is torch.bfloat16:
        return torch.ops.aten._grouped_mm.default(left, right, offs, bias, out_dtype)
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim() == 3:
        groups = left.shape[:1]
    elif left.dim() == right.dim():
        groups = offs.shape
    rows, columns = left.shape[-2], right.shape[-1]
    width = -(-columns * left.itemsize // 16) * 16 // left.itemsize
    strides = (rows * width, width, 1)[-2 - len(groups) :]
    return torch.empty_strided((*groups, rows, columns), strides, dtype=left.dtype, device="meta")


@temporaries("mm", "bmm")
def multiply(call: Call, result: VirtualTensor) -> Iterator[int]:
    """Yield the bytes of the temporary copies for a matrix product, one for each copied factor."""
    # A bias may be added next: see virtualgpu.ops.gradients.
    result._gpu.machine.selected.product = weakref.ref(memory_of(result))
    return _product(call.args[0], call.args[1], result)


@temporaries("baddbmm", "baddbmm_")
def add_batched_product(call: Call, result: VirtualTensor) -> Iterator[int]:
    """Yield the bytes of the temporary copies of the factors, for `baddbmm` and similar operators.

    These add a batched product to a summand.
    """
    return _product(call.args[1], call.args[2], result)


@temporaries("addmm", "addmm_", "_addmm_activation")
def add_product(call: Call, result: VirtualTensor) -> Iterator[int]:
    """Yield the bytes of the temporary copies of the factors, for `addmm`.

    cuBLASLt adds a one-dimensional bias as part of the product. Any other summand is copied into
    the result first.
    """
    bias, left, right = call.args[:3]
    rows, columns = right.shape
    lt = bias.dim() == 1 and bias.shape[0] == columns and bias.is_contiguous()
    lt = lt and rows > 1 and columns > 1 and result.is_contiguous()
    lt = lt and call.argument("beta") == 1
    lt = lt and not result.dtype.is_complex and handles(result._gpu).lt
    return _product(left, right, result, lt)


def _vector_product(
    matrix: torch.Tensor, vector: torch.Tensor, result: VirtualTensor
) -> Iterator[int]:
    """Yield the bytes of the copies of `matrix` and `vector`, then allocate cuBLAS's workspace.

    The product of the two is `result`. No copy is made of an operand that cuBLAS can read.
    """
    if not matrix.numel():
        return
    if vector.stride(0) == 0:
        yield vector.numel() * vector.itemsize
    rows, columns = matrix.shape
    down, along = matrix.stride()
    dense_columns = down == 1 and along >= max(1, rows)
    dense_rows = along == 1 and down >= max(1, columns)
    if not dense_columns and not dense_rows and not matrix.is_contiguous():
        yield matrix.numel() * matrix.itemsize
    handles(result._gpu).use()


@temporaries("mv")
def matrix_vector(call: Call, result: VirtualTensor) -> Iterator[int]:
    """Yield the bytes of the temporary copies for a product of a matrix and a vector."""
    return _vector_product(call.args[0], call.args[1], result)


@temporaries("addmv", "addmv_")
def add_matrix_vector(call: Call, result: VirtualTensor) -> Iterator[int]:
    """Yield the bytes of the temporary copies for a matrix times a vector, plus a summand."""
    return _vector_product(call.args[1], call.args[2], result)


@temporaries("addbmm", "addbmm_", "dot", "vdot", "triangular_solve")
def with_cublas(call: Call, result: Any) -> tuple:
    """Allocate cuBLAS's workspace for an operator whose operands need no copies.

    Returns (), because the operator has no temporaries. Examples are products of vectors, sums of
    products and triangular systems.
    """
    handles(call.args[0]._gpu).use()
    return ()


@handles_operators("_trilinear")
def trilinear(call: Call) -> torch.Tensor:
    """Compute `_trilinear`: a bilinear layer, or its gradients (native/Linear.cpp).

    PyTorch computes it slice by slice along one dimension, each as products of two factors.
    """
    factors, expanded = list(call.args[:3]), call.args[3:6]
    summed, along = set(call.args[6]), call.argument("unroll_dim")
    dims = factors[0].dim() + len(expanded[0])
    for i, places in enumerate(expanded):
        for d in sorted(places):
            factors[i] = factors[i].unsqueeze(d)
    pairs = list(zip(factors, expanded, strict=True))
    size = [next(x.shape[d] for x, places in pairs if d not in places) for d in range(dims)]
    del pairs
    shape = list(size)
    for d in summed:
        shape[d] = 1
    result = torch.zeros(shape, dtype=factors[0].dtype, device=factors[0].device)
    first = [d for d in summed if d in expanded[2] and d != along]
    second = [d for d in summed if d not in expanded[2] and d != along]
    if all(x.numel() for x in factors):
        for k in range(size[along]):
            part = list(factors)
            for i, places in enumerate(expanded):
                if along not in places:
                    part[i] = part[i].narrow(along, k, 1)
            term = _sum_of_products(part[0], part[1], first)
            term = _sum_of_products(term, part[2], second)
            if along in summed:
                result.add_(term)
            else:
                result.narrow(along, k, 1).add_(term)
            del term
    for d in sorted(summed, reverse=True):
        result = result.squeeze(d)
    return result


def _sum_of_products(left: torch.Tensor, right: torch.Tensor, summed: list[int]) -> torch.Tensor:
    """Return the sum of left * right over the dimensions `summed`.

    It is computed as a batched product of matrices. The summed dimensions stay, with one element
    (`sumproduct_pair` in native/Linear.cpp).
    """
    if not summed:
        return left * right
    both: list[int] = []  # dimensions
    ours, theirs = both[:], both[:]
    for d in range(left.dim()):
        in_left, in_right = left.shape[d] != 1, right.shape[d] != 1
        if d in summed:
            if in_left and not in_right:
                left = left.sum(d, keepdim=True)
            elif in_right and not in_left:
                right = right.sum(d, keepdim=True)
        elif in_left and in_right:
            both.append(d)
        elif in_left:
            ours.append(d)
        else:
            theirs.append(d)
    summed = sorted(summed)
    shape = (
        [left.shape[d] for d in both + ours] + [1] * len(summed) + [right.shape[d] for d in theirs]
    )
    order = [*both, *ours, *summed, *theirs]
    batch, terms = prod(left.shape[d] for d in both), prod(left.shape[d] for d in summed)
    left = left.permute(order).reshape(batch, -1, terms)
    right = right.permute([*both, *summed, *theirs, *ours]).reshape(batch, terms, -1)
    return torch.bmm(left, right).view(shape).permute([order.index(d) for d in range(len(order))])
