"""`torch.autocast("cuda")` on virtual GPUs: each operator's precision, and a cache of weights.

PyTorch's own autocast state is used: enabled or not, dtype, nesting. Only the kernels of its CUDA
dispatch key are replaced. PyTorch's kernels ask C++ whether a tensor is on CUDA, but C++ sees a CPU
tensor, which does not have the key either. While autocast is enabled, the key is therefore added to
the thread's own set of keys. The CPU's autocast kernels are PyTorch's, but they must skip the
tensors of virtual GPUs, which also have the CPU's key.

The lists of operators are CUDA's (aten/src/ATen/autocast_mode.h and .cpp of PyTorch 2.11, and the
table in the documentation of torch.amp).
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.tensor import VirtualTensor

KEY, CPU_KEY = "AutocastCUDA", "AutocastCPU"
_guard = torch._C._ExcludeDispatchKeyGuard
_key_set = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_cpu_key_set = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_to = torch.Tensor.to
_set_enabled, _clear_cache = torch.set_autocast_enabled, torch.clear_autocast_cache


def words(text: str) -> tuple[str, ...]:
    """Split a text at white space and return its words."""
    return tuple(text.split())


# Operators in the region's lower precision: matrix products, convolutions, recurrent cells,
# attention.
LOWER_PRECISION = words("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")
# Operators in float32, because they overflow or lose too much precision otherwise.
FLOAT32 = words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
# Operators that return float32, unless the caller names a dtype.
FLOAT32_RESULT = words("""
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int
    log_softmax.Dimname cumprod cumprod.dimname cumsum cumsum.dimname linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList
""")
# Overloads without a dtype, each with the overload that takes one and is called instead.
APPEND_FLOAT32 = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
# Operators in the widest dtype of their arguments.
PROMOTE = words(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


def _casts_have_gradients() -> bool:
    """Return whether a weight that autocast first casts under `no_grad` still gets a gradient.

    In older versions of torch the weight gets no gradient until the region ends, because the
    cached cast was not recorded. The cache is the same on all devices, so this is tested on the
    CPU. Versions that record the cast do not cache it in inference mode, where they cannot
    record it.
    """
    weight = torch.ones(1, 1, device="cpu", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


CASTS_HAVE_GRADIENTS = _casts_have_gradients()


class WeightCache:
    """Lower-precision copies of float32 leaves that need gradients.

    Each copy is made once and lives until the outermost autocast region ends.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref, torch.Tensor]] = {}

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of `weight` in `dtype`, from the cache if it is there."""
        found = self._casts.get(id(weight))
        if found is not None and found[0]() is weight:
            return found[1]
        with torch.set_grad_enabled(CASTS_HAVE_GRADIENTS or torch.is_grad_enabled()):
            cast = _to(weight, dtype)
        self._casts[id(weight)] = weakref.ref(weight), cast
        return cast

    def clear(self) -> None:
        """Delete all cached copies, the newest first, as on an H200."""
        while self._casts:
            self._casts.popitem()


cache = WeightCache()


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield (
        torch,
        {
            "set_autocast_enabled": set_autocast_enabled,
            "clear_autocast_cache": clear_autocast_cache,
        },
    )


def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
    """Set whether autocast is enabled. It replaces `torch.set_autocast_enabled`.

    The arguments are (device_type, enabled), or (enabled) for CUDA.
    """
    _set_enabled(*args, **kwargs)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, torch.is_autocast_enabled("cuda"))


def clear_autocast_cache() -> None:
    """Delete the cached casts. It replaces `torch.clear_autocast_cache`."""
    cache.clear()
    _clear_cache()


def remove() -> None:
    """Clean up when the machine is removed.

    This deletes the cached casts and removes the autocast key from the calling thread's keys.
    """
    cache.clear()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)


def register(library: torch.library.Library) -> None:
    """Register autocast kernels for CUDA and the CPU, until the library object is destroyed."""
    for name, kernel in kernels():
        library.impl(name, kernel, KEY)
    for name, kernel in cpu_kernels():
        library.impl(name, kernel, CPU_KEY)


@functools.cache
def cpu_kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return names and kernels of the operators that PyTorch casts on the CPU.

    PyTorch's own kernels must be registered at the first call.
    """
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(CPU_KEY):
        name = name.removeprefix("aten::")
        operator = None if "::" in name else overload(name)
        if operator is not None:
            original = torch.library.get_kernel(f"aten::{name}", CPU_KEY)
            found.append((name, for_cpu_tensors(operator, original)))
    return found


def for_cpu_tensors(operator: Any, original: Any) -> Callable[..., Any]:
    """Return a kernel for the CPU's autocast key that leaves device tensors unchanged.

    For CPU tensors it calls `original`, PyTorch's kernel of `operator`.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(type(x) is VirtualTensor for x in leaves):
            with _guard(_cpu_key_set):
                return operator(*args, **kwargs)
        return original.call_boxed(_cpu_key_set, *args, **kwargs)

    return kernel


@functools.cache
def kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return names and kernels of the operators that PyTorch casts on CUDA."""
    found = []
    makers: list[tuple[Iterable[str], Callable[[Any], Callable[..., Any]]]] = [
        (LOWER_PRECISION, casting(lambda lower, *arguments: lower)),
        (FLOAT32, casting(lambda lower, *arguments: torch.float32)),
        (FLOAT32_RESULT, with_float32_result),
        (PROMOTE, casting(widest)),
        (APPEND_FLOAT32, with_float32_appended),
        (("binary_cross_entropy",), banned),
    ]
    for names, maker in makers:
        for name in names:
            operator = overload(name)
            if operator is None:
                continue
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY):
                found.append((name, maker(operator)))
    return found


def overload(name: str) -> Any:
    """Return the operator of `torch.ops.aten` with this name, such as "prod" or "prod.dim_int".

    Returns None if the installed torch does not have it.
    """
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), variant or "default", None)


# Casting


def eligible(x: Any) -> bool:
    """Return whether autocast may cast `x`: a device tensor of 16-bit or 32-bit floats."""
    return type(x) is VirtualTensor and x.dtype.is_floating_point and x.dtype is not torch.float64


def cast(x: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
    """Convert a device tensor to `dtype`, and return anything else unchanged.

    Tensors in lists are cast, too. Casts of weights to `lower`, the dtype of the autocast region,
    are cached.
    """
    if isinstance(x, (list, tuple)):
        return type(x)(cast(y, dtype, lower) for y in x)
    if not eligible(x) or x.dtype is dtype:
        return x
    is_leaf = dtype is lower and x.dtype is torch.float32 and x.requires_grad and x.is_leaf
    is_weight = is_leaf and not x._is_view()
    if is_weight and torch.is_autocast_cache_enabled():
        can_be_recorded = not (CASTS_HAVE_GRADIENTS and torch.is_inference_mode_enabled())
        if can_be_recorded:
            return cache.cast(x, dtype)
    return _to(x, dtype)


def cast_all(
    args: tuple, kwargs: dict, dtype: torch.dtype, lower: torch.dtype
) -> tuple[tuple, dict]:
    """Return the arguments of an operator after casting its device tensors to `dtype`.

    The last argument is cast first. PyTorch's compiled code has this order, which decides the order
    of the copies in memory and in a backward pass. `lower` is the dtype of the autocast region.
    """
    named = {name: cast(kwargs[name], dtype, lower) for name in reversed(kwargs)}
    backwards = [cast(x, dtype, lower) for x in reversed(args)]
    return tuple(reversed(backwards)), named


# One kernel per operator


def casting(choose: Callable[..., torch.dtype]) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that makes the autocast kernel of an operator.

    The kernel casts all arguments to the dtype `choose(lower, *arguments)`, where `lower` is the
    dtype of the autocast region, and then calls the operator.
    """

    def of(operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            lower = torch.get_autocast_dtype("cuda")
            with _guard(_key_set):
                dtype = choose(lower, *args, *kwargs.values())
                args, kwargs = cast_all(args, kwargs, dtype, lower)
                return operator(*args, **kwargs)

        return kernel

    return of


def with_float32_result(operator: Any) -> Callable[..., Any]:
    """Return an autocast kernel that calls `operator` so that its result is float32."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype")
    keyword_only = operator._schema.arguments[position].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _guard(_key_set):
            given = kwargs.get("dtype")
            if not keyword_only and position < len(args):
                given = args[position]
            if given is None and eligible(args[0]):
                if not keyword_only:
                    args = args[:position]
                kwargs = kwargs | {"dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


def with_float32_appended(operator: Any) -> Callable[..., Any]:
    """Return an autocast kernel that calls the overload of `operator` with a `dtype` argument.

    The dtype is float32.
    """
    name, variant = operator._schema.name[6:], operator._schema.overload_name
    wider = overload(f"{name}.{APPEND_FLOAT32[f'{name}.{variant}']}")
    arguments = operator._schema.arguments

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _guard(_key_set):
            if not eligible(args[0]):
                return operator(*args, **kwargs)
            missing = arguments[len(args) :]
            rest = [kwargs.get(argument.name, argument.default_value) for argument in missing]
            return wider(*args, *rest, dtype=torch.float32)

    return kernel


def widest(dtype: torch.dtype, *arguments: Any) -> torch.dtype:
    """Return float32 if one of the device tensors has this dtype, and `dtype` otherwise.

    `arguments` are those of an operator. Raises RuntimeError if its tensors have different half
    precisions.
    """
    for x in arguments:
        if isinstance(x, (list, tuple)):
            dtype = widest(dtype, *x)
        elif eligible(x):
            if torch.float32 in (dtype, x.dtype):
                dtype = torch.float32
            elif x.dtype is not dtype:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return dtype


def banned(operator: Any) -> Callable[..., Any]:
    """Return an autocast kernel that raises RuntimeError if `operator` gets device tensors.

    CUDA's autocast does the same.
    """

    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(input) is VirtualTensor:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
                "autocast.\n"
                "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
                "In this case, combine the two layers using "
                "torch.nn.functional.binary_cross_entropy_with_logits\n"
                "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
                "BCEWithLogits are\n"
                "safe to autocast."
            )
        with _guard(_key_set):
            return operator(input, *args, **kwargs)

    return kernel
