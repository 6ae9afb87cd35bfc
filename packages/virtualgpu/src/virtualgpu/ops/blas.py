"""What matrix products ask for: the workspaces of cuBLAS and cuBLASLt, and copies of factors that cuBLAS cannot read.

A library handle belongs to a thread, and a workspace to a handle on a stream. A workspace is allocated at its first use, after
the operator's output, and stays. Rules from PyTorch's sources: aten/src/ATen/cuda/CublasHandlePool.cpp (sizes, handles),
aten/src/ATen/cuda/detail/DeviceThreadHandles.h (who holds which handle), aten/src/ATen/native/cuda/Blas.cpp (which product takes
which library). Held against recordings from an H200 (torch 2.11, CUDA 13.0).
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
    "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmv": (1, 2), "addmv_": (1, 2),
    "_addmm_activation": (1, 2),
}  # fmt: skip
# Products with a vector use no TF32. PyTorch turns it off for matrix times vector
# (ATen/cuda/CUDABlas.cpp), and cuBLAS computes dot products without tensor cores.
WITH_VECTORS = {"mv", "dot", "vdot", "addmv", "addmv_"}
FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
# The names that CUDA gives the kernels it does not have for integers.
INTEGER_PRODUCT = {"bmm": "baddbmm_cuda", "baddbmm": "baddbmm_cuda", "baddbmm_": "baddbmm_cuda", "dot": "dot", "vdot": "vdot"}
INTEGER_PRODUCT |= {"mv": "addmv_impl_cuda", "addmv": "addmv_impl_cuda", "addmv_": "addmv_impl_cuda"}
sums_in_float32(*(getattr(torch.ops.aten, name) for name in (*PRODUCTS, "addr", "addbmm")))
_is_deterministic = torch._C._get_deterministic_algorithms
_current_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


def workspace_bytes(major: int, environment: Mapping[str, str]) -> int:
    """The size of cuBLAS's workspace: CUBLAS_WORKSPACE_CONFIG, pairs of ":KIBS:COUNT", or NVIDIA's advice for the architecture."""
    default = WORKSPACE_HOPPER if major in (9, 10) else WORKSPACE
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if config is None:
        return default
    pairs = _PAIR.findall(config)
    if not pairs:
        warnings.warn(f"Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size of {default} bytes.", stacklevel=2)
        return default
    return sum(int(size) * int(count) for size, count in pairs) * KIB


def workspace_lt_bytes(environment: Mapping[str, str]) -> int:
    """The size of cuBLASLt's workspace: CUBLASLT_WORKSPACE_SIZE in KiB; none where it shares that of cuBLAS."""
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return 0
    given = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(given) * KIB if given.isdigit() else WORKSPACE_LT


class Held:
    """A handle in the hands of a thread. It goes back, workspaces and all, when the thread and its local variables end."""

    def __init__(self, handles: "Handles") -> None:
        self._free = handles.free
        self.number = handles.free.pop() if handles.free else handles.new()
        self.ready: set[int] = set()  # streams whose workspaces are there: twice the stream, and one more for cuBLASLt's
        handles.held.add(self)

    def __del__(self) -> None:
        self._free.append(self.number)


class Handles:
    """The cuBLAS handles of one GPU, and the workspaces bound to them.

    The operators of a backward run on a thread of the GPU's own, which takes a handle like any other thread and keeps it.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.free: list[int] = []  # given back by threads that ended: the last one is taken first
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()  # by threads, at present
        self._gpu = gpu
        self._count = 0
        self._workspaces: dict[tuple[int, int], Block | None] = {}
        self._threads = threading.local()
        self._autograd: Held | None = None
        self._bytes = workspace_bytes(gpu.profile.major, os.environ), workspace_lt_bytes(os.environ)
        self.lt = os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"

    def new(self) -> int:
        self._count += 1
        return self._count

    def use(self, lt: bool = False) -> None:
        """Have the workspaces of the calling thread's handle for its current stream, those of cuBLASLt too if that is meant."""
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
        """The handle and the stream of each workspace that is allocated."""
        return set(self._workspaces)

    def give_back(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Free the workspaces, except those that are `kept`."""
        for key in self.workspaces.difference(kept):
            block = self._workspaces.pop(key)
            if block is not None:
                self._gpu.allocator.free(block)
            for held in self.held:
                if held.number == key[0]:
                    held.ready.discard(key[1])

    def _take(self) -> Held:
        held = self._threads.held = Held(self)
        return held


def handles(gpu: Gpu) -> Handles:
    """The GPU's cuBLAS handles."""
    found = gpu.libraries.get("cublas")
    if found is None:
        found = gpu.libraries["cublas"] = Handles(gpu)
    return found


def held_workspaces(gpu: Gpu) -> set[tuple[int, int]]:
    """The handle and the stream of each of cuBLAS's workspaces that is allocated on this GPU."""
    found = gpu.libraries.get("cublas")
    return set() if found is None else found.workspaces


def free_workspaces(gpu: Gpu, kept: Collection[tuple[int, int]]) -> None:
    """Free cuBLAS's workspaces on this GPU, except those that are `kept`."""
    found = gpu.libraries.get("cublas")
    if found is not None:
        found.give_back(kept)


def clear_workspaces(gpu: Gpu) -> None:
    """`torch._C._cuda_clearCublasWorkspaces`: each handle asks anew at its next use."""
    if (found := gpu.libraries.pop("cublas", None)) is not None:
        found.give_back()


def copied_bytes(matrix: torch.Tensor) -> int:
    """Bytes of the copy of a factor (its last two dimensions are the matrix) that cuBLAS cannot read as it lies; 0 for none.

    cuBLAS reads a matrix whose rows or whose columns lie dense, at a distance of at least their length.
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


def _product(left: torch.Tensor, right: torch.Tensor, result: VirtualTensor, lt: bool = False) -> Iterator[int]:
    if not result.numel() or not left.numel():
        return  # nothing to multiply: cuBLAS is not called
    if copy := copied_bytes(left):
        yield copy
    if copy := copied_bytes(right):
        yield copy
    handles(result._gpu).use(lt)


@handles_operators(*PRODUCTS, "addbmm", "addbmm_")
def product(call: Call) -> Any:
    """A matrix product. CUDA has none of integers, float8 and complex numbers in half precision."""
    call.common_gpu()
    if _is_deterministic() and not (call.op.name == "addmm" and call.args[0].dim() == 1):  # that is cuBLASLt's
        require_fixed_workspaces()
    dtype = call.args[0].dtype
    multiplied = dtype.is_floating_point or dtype.is_complex
    if not multiplied or dtype.itemsize == 1 or dtype is torch.complex32:
        raise not_implemented(INTEGER_PRODUCT.get(call.op.name, "addmm_cuda"), dtype)
    for x in call.args[1:3]:
        if isinstance(x, torch.Tensor) and x.dtype is not dtype:
            _require_one_dtype(call)
    return operators.into_given(call) if call.op.outs else operators.run(call)


@handles_operators("_int_mm")
def product_of_bytes(call: Call) -> Any:
    """A product of int8 matrices, of the sizes that cuBLASLt multiplies (`_int_mm_out_cuda`, ATen/native/cuda/Blas.cpp)."""
    call.common_gpu()
    left, right = call.args[0], call.args[1]
    if left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]:
        (rows, terms), columns = left.shape, right.shape[1]
        if rows <= 16:
            raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {rows}")
        for name, size in (("self", terms), ("mat2", columns)):
            if size == 0 or size % 8:
                raise RuntimeError(f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but got {size}")
    return operators.into_given(call) if call.op.outs else operators.run(call)


@handles_operators("_scaled_mm")
def scaled_product(call: Call) -> Any:
    """A product of float8 matrices with scales, of the forms that cuBLASLt multiplies (`_scaled_mm_out_cuda`, ATen/native/cuda)."""
    gpu = call.common_gpu()
    if (gpu.profile.major, gpu.profile.minor) < (8, 9):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+")
    left, right = call.args[0], call.args[1]
    if left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]:
        (rows, terms), columns = left.shape, right.shape[1]
        if terms % 16:
            raise RuntimeError(f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({rows}x{terms}).")
        if columns % 16:
            raise RuntimeError(f"mat2 shape ({terms}x{columns}) must be divisible by 16")
        if left.dtype == right.dtype == torch.float8_e5m2:
            raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
        if left.stride(1) != 1 or right.stride(0) != 1:
            raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
    bias = call.argument("bias")
    if bias is not None:
        _require_bias_of_half_precision(bias.dtype, call.argument("out_dtype") or left.dtype)
    return operators.into_given(call) if call.op.outs else operators.run(call)


def _require_bias_of_half_precision(bias: torch.dtype, out: torch.dtype) -> None:
    """Raises RuntimeError for a bias of a dtype that cuBLASLt does not add to an output of that dtype."""
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
    """Raises RuntimeError for operands of two dtypes where CUDA's words are not the CPU's (benchmarks/fidelity/h200/mixed_dtypes.json)."""
    name, kinds = call.op.name.removesuffix("_"), [x.dtype for x in call.args[:3] if isinstance(x, torch.Tensor)]
    if call.func._overloadname.startswith("dtype"):
        return
    words = [scalar_name(kind) for kind in kinds]
    if name in ("addmm", "addbmm", "_addmm_activation"):
        left, position = ("self", 0) if kinds[0] != kinds[2] else ("mat1", 1)
        raise RuntimeError(f"{left} and mat2 must have the same dtype, but got {words[position]} and {words[2]}")
    if name == "baddbmm":
        summand, first, second = map(cpp_name, kinds)
        raise RuntimeError(f"Input dtypes must be the same, got: input {summand}, batch1: {first}, batch2: {second}")
    if name == "mv":
        raise RuntimeError(f"expected scalar type {words[0]} but found {words[1]}")


def product_format(dtype: torch.dtype, gpu: Gpu, operation: str = "matmul") -> str:
    """Return the format in which cuBLAS multiplies matrices, or cuDNN ("conv", "rnn")."""
    if dtype in SINGLE and gpu.multiplies_in_tf32(operation):
        return "tf32"
    return FORMATS.get(dtype, "float32")


def multiplies_in_tf32(*args: Any, **kwargs: Any) -> bool:
    """Return whether a matrix product of these arguments uses TF32. cuSPARSE does not."""
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
    """Floating-point operations and output elements of a matrix product; None for another operator."""
    positions = PRODUCTS.get(name)
    if positions is None:
        return None
    left, right = args[positions[0]], args[positions[1]]
    terms = left.shape[-1]
    outputs = left.numel() // max(terms, 1) * (right.shape[-1] if right.dim() > 1 else 1)
    return 2 * outputs * terms, outputs


@device_time(*PRODUCTS)
def product_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    flops, outputs = matrix_work(call.op.name, call.args) or (0, 0)
    left, right = (call.args[position] for position in PRODUCTS[call.op.name])
    matrix = left.shape[-2] if left.dim() > 1 else 1, right.shape[-1] if right.dim() > 1 else 1
    dtype = call.args[0].dtype
    if call.op.name in WITH_VECTORS:
        format = FORMATS.get(dtype, "float32")
    else:
        format = product_format(dtype, call.gpu)
    biased = call.op.name == "addmm" and call.args[0].dim() == 1  # that is cuBLASLt's
    split_terms = BIASED_SPLIT_TERMS if biased and format == "float32" else SPLIT_TERMS
    return Work(moved, flops, format, outputs, matrix=matrix, split_terms=split_terms)


@device_time("_grouped_mm")
def grouped_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Of a batch, each matrix meets only its group of the other's columns."""
    left, right = call.args[:2]
    times = left.shape[0] if left.dim() > right.dim() else 1
    flops = 2 * left.numel() * right.shape[-1] // times
    return Work(moved, flops, product_format(left.dtype, call.gpu), results[0].numel())


@shapes_by("_grouped_mm")
def grouped_shape(left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """Rows begin at multiples of 16 bytes (aten/src/ATen/native/GroupedMMUtils.h)."""
    if left.dtype is torch.bfloat16:
        return torch.ops.aten._grouped_mm.default(left, right, offs, bias, out_dtype)
    groups = left.shape[:1] if left.dim() == right.dim() == 3 else offs.shape if left.dim() == right.dim() else ()
    rows, columns = left.shape[-2], right.shape[-1]
    width = -(-columns * left.itemsize // 16) * 16 // left.itemsize
    strides = (rows * width, width, 1)[-2 - len(groups) :]
    return torch.empty_strided((*groups, rows, columns), strides, dtype=left.dtype, device="meta")


@temporaries("mm", "bmm")
def multiply(call: Call, result: VirtualTensor) -> Iterator[int]:
    result._gpu.machine.selected.product = weakref.ref(memory_of(result))  # a bias may follow: see virtualgpu.ops.gradients
    return _product(call.args[0], call.args[1], result)


@temporaries("baddbmm", "baddbmm_")
def add_batched_product(call: Call, result: VirtualTensor) -> Iterator[int]:
    return _product(call.args[1], call.args[2], result)


@temporaries("addmm", "addmm_", "_addmm_activation")
def add_product(call: Call, result: VirtualTensor) -> Iterator[int]:
    """cuBLASLt adds a bias of one dimension as it multiplies; any other summand is copied into the result first."""
    bias, left, right = call.args[:3]
    rows, columns = right.shape
    lt = bias.dim() == 1 and bias.shape[0] == columns and bias.is_contiguous() and rows > 1 and columns > 1 and result.is_contiguous()
    lt = lt and call.argument("beta") == 1
    lt = lt and not result.dtype.is_complex and handles(result._gpu).lt
    return _product(left, right, result, lt)


def _vector_product(matrix: torch.Tensor, vector: torch.Tensor, result: VirtualTensor) -> Iterator[int]:
    if not matrix.numel():
        return
    if vector.stride(0) == 0:
        yield vector.numel() * vector.itemsize
    rows, columns = matrix.shape
    down, along = matrix.stride()
    if not ((down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))) and not matrix.is_contiguous():
        yield matrix.numel() * matrix.itemsize
    handles(result._gpu).use()


@temporaries("mv")
def matrix_vector(call: Call, result: VirtualTensor) -> Iterator[int]:
    return _vector_product(call.args[0], call.args[1], result)


@temporaries("addmv", "addmv_")
def add_matrix_vector(call: Call, result: VirtualTensor) -> Iterator[int]:
    return _vector_product(call.args[1], call.args[2], result)


@temporaries("addbmm", "addbmm_", "dot", "vdot", "triangular_solve")
def with_cublas(call: Call, result: Any) -> tuple:
    """Products of vectors, sums of products and triangular systems: cuBLAS works on the operands as they are."""
    handles(call.args[0]._gpu).use()
    return ()


@handles_operators("_trilinear")
def trilinear(call: Call) -> torch.Tensor:
    """A bilinear layer, and its gradients: slice by slice along one dimension, as products of two (native/Linear.cpp)."""
    factors, expanded, summed, along = list(call.args[:3]), call.args[3:6], set(call.args[6]), call.argument("unroll_dim")
    dims = factors[0].dim() + len(expanded[0])
    for i, places in enumerate(expanded):
        for d in sorted(places):
            factors[i] = factors[i].unsqueeze(d)
    size = [next(x.shape[d] for x, places in zip(factors, expanded, strict=True) if d not in places) for d in range(dims)]
    result = torch.zeros([1 if d in summed else n for d, n in enumerate(size)], dtype=factors[0].dtype, device=factors[0].device)
    first = [d for d in summed if d in expanded[2] and d != along]
    second = [d for d in summed if d not in expanded[2] and d != along]
    if all(x.numel() for x in factors):
        for k in range(size[along]):
            part = [x if along in places else x.narrow(along, k, 1) for x, places in zip(factors, expanded, strict=True)]
            term = _sum_of_products(part[0], part[1], first)
            term = _sum_of_products(term, part[2], second)
            (result if along in summed else result.narrow(along, k, 1)).add_(term)
            del term
    for d in sorted(summed, reverse=True):
        result = result.squeeze(d)
    return result


def _sum_of_products(left: torch.Tensor, right: torch.Tensor, summed: list[int]) -> torch.Tensor:
    """The sum of left * right over some dimensions, which stay with one element, as a product of matrices (`sumproduct_pair`)."""
    if not summed:
        return left * right
    both: list[int] = []  # dimensions
    ours, theirs = both[:], both[:]
    for d in range(left.dim()):
        in_left, in_right = left.shape[d] != 1, right.shape[d] != 1
        if d in summed:
            if in_left != in_right:
                left, right = (left.sum(d, keepdim=True), right) if in_left else (left, right.sum(d, keepdim=True))
        else:
            (both if in_left and in_right else ours if in_left else theirs).append(d)
    summed = sorted(summed)
    shape = [left.shape[d] for d in both + ours] + [1] * len(summed) + [right.shape[d] for d in theirs]
    order = [*both, *ours, *summed, *theirs]
    batch, terms = prod(left.shape[d] for d in both), prod(left.shape[d] for d in summed)
    left = left.permute(order).reshape(batch, -1, terms)
    right = right.permute([*both, *summed, *theirs, *ours]).reshape(batch, terms, -1)
    return torch.bmm(left, right).view(shape).permute([order.index(d) for d in range(len(order))])
