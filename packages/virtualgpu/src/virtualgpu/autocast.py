"""`torch.autocast("cuda")` on virtual GPUs: which operator runs in which precision, and the cache of cast weights.

PyTorch's own autocast state serves as it is: enabled or not, dtype, nesting. Only the kernels of its CUDA key do not: they ask C++
whether a tensor is on CUDA, and C++ sees a CPU tensor; nor does such a tensor carry the key. So, while autocast is enabled, the key is
added to the thread's own set, and these kernels stand in for PyTorch's. The CPU's autocast kernels stay PyTorch's, for CPU tensors: those
of a GPU carry the CPU's key too, and have to be kept from them.

The lists are those of CUDA: aten/src/ATen/autocast_mode.h and .cpp of PyTorch 2.11, and the table in the documentation of torch.amp.
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
    return tuple(text.split())


# In the region's lower precision: matrix products, convolutions, recurrent cells, attention.
LOWER_PRECISION = words("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
# In float32: what overflows or loses too much in half precision.
FLOAT32 = words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
# Told to give float32, unless the caller names a dtype.
FLOAT32_RESULT = words("""
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod cumprod.dimname cumsum
    cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList
""")
# The overload that takes a dtype, in place of one that does not.
APPEND_FLOAT32 = {
    "norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype", "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}  # fmt: skip
# In the widest type among the arguments.
PROMOTE = words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")


def _casts_have_gradients() -> bool:
    """Return whether the installed torch records the cast of a weight for autograd even in a block without gradients.

    Older versions do not: a weight that was first used under `no_grad` gets no gradient until the region ends. The cache is the same
    on all devices, so that of the CPU answers. Versions that record the cast do not cache it in inference mode, where they cannot.
    """
    weight = torch.ones(1, 1, device="cpu", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


CASTS_HAVE_GRADIENTS = _casts_have_gradients()


class WeightCache:
    """Lower-precision copies of float32 leaves that need gradients: made once, alive until the outermost region ends."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref, torch.Tensor]] = {}

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found = self._casts.get(id(weight))
        if found is not None and found[0]() is weight:
            return found[1]
        with torch.set_grad_enabled(CASTS_HAVE_GRADIENTS or torch.is_grad_enabled()):
            cast = _to(weight, dtype)
        self._casts[id(weight)] = weakref.ref(weight), cast
        return cast

    def clear(self) -> None:
        while self._casts:
            self._casts.popitem()  # the youngest first, as on an H200


cache = WeightCache()


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch, {"set_autocast_enabled": set_autocast_enabled, "clear_autocast_cache": clear_autocast_cache}


def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
    """`torch.set_autocast_enabled(device_type, enabled)`, or (enabled) for CUDA."""
    _set_enabled(*args, **kwargs)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, torch.is_autocast_enabled("cuda"))


def clear_autocast_cache() -> None:
    cache.clear()
    _clear_cache()


def remove() -> None:
    """Leave nothing behind in the calling thread."""
    cache.clear()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)


def register(library: torch.library.Library) -> None:
    """Put the kernels of both keys in place, until the library object goes."""
    for name, kernel in kernels():
        library.impl(name, kernel, KEY)
    for name, kernel in cpu_kernels():
        library.impl(name, kernel, CPU_KEY)


@functools.cache
def cpu_kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return names and kernels of the operators that PyTorch casts for the CPU.

    The first call must find PyTorch's own kernels in place.
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
    """The CPU's kernel, which leaves device tensors as they are."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(type(x) is VirtualTensor for x in torch.utils._pytree.tree_leaves((args, kwargs))):
            with _guard(_cpu_key_set):
                return operator(*args, **kwargs)
        return original.call_boxed(_cpu_key_set, *args, **kwargs)

    return kernel


@functools.cache
def kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return names and kernels of the operators of the lists that PyTorch casts on CUDA."""
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
            if operator is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY):
                found.append((name, maker(operator)))
    return found


def overload(name: str) -> Any:
    """The operator of a name such as "prod" or "prod.dim_int"; None where the installed torch has none of that name."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), variant or "default", None)


# Casting


def eligible(x: Any) -> bool:
    return type(x) is VirtualTensor and x.dtype.is_floating_point and x.dtype is not torch.float64


def cast(x: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
    """A device tensor in this dtype; anything else as it is. `lower` is the region's dtype, whose casts are cached."""
    if isinstance(x, (list, tuple)):
        return type(x)(cast(y, dtype, lower) for y in x)
    if not eligible(x) or x.dtype is dtype:
        return x
    is_weight = dtype is lower and x.dtype is torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    if is_weight and torch.is_autocast_cache_enabled() and not (CASTS_HAVE_GRADIENTS and torch.is_inference_mode_enabled()):
        return cache.cast(x, dtype)
    return _to(x, dtype)


def cast_all(args: tuple, kwargs: dict, dtype: torch.dtype, lower: torch.dtype) -> tuple[tuple, dict]:
    """The arguments cast, the last one first, as PyTorch's compiled code does it: the copies' order in memory and in a backward."""
    named = {name: cast(kwargs[name], dtype, lower) for name in reversed(kwargs)}
    return tuple(reversed([cast(x, dtype, lower) for x in reversed(args)])), named


# One kernel an operator


def casting(choose: Callable[..., torch.dtype]) -> Callable[[Any], Callable[..., Any]]:
    """What makes kernels that cast their arguments to `choose(lower, *arguments)`, where `lower` is the region's dtype."""

    def of(operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            lower = torch.get_autocast_dtype("cuda")
            with _guard(_key_set):
                args, kwargs = cast_all(args, kwargs, choose(lower, *args, *kwargs.values()), lower)
                return operator(*args, **kwargs)

        return kernel

    return of


def with_float32_result(operator: Any) -> Callable[..., Any]:
    position = next(index for index, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    keyword_only = operator._schema.arguments[position].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _guard(_key_set):
            given = args[position] if not keyword_only and position < len(args) else kwargs.get("dtype")
            if given is None and eligible(args[0]):
                args = args if keyword_only else args[:position]
                kwargs = kwargs | {"dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


def with_float32_appended(operator: Any) -> Callable[..., Any]:
    name, variant = operator._schema.name[6:], operator._schema.overload_name
    wider = overload(f"{name}.{APPEND_FLOAT32[f'{name}.{variant}']}")
    arguments = operator._schema.arguments

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _guard(_key_set):
            if not eligible(args[0]):
                return operator(*args, **kwargs)
            rest = (kwargs.get(argument.name, argument.default_value) for argument in arguments[len(args) :])
            return wider(*args, *rest, dtype=torch.float32)

    return kernel


def widest(dtype: torch.dtype, *arguments: Any) -> torch.dtype:
    """float32 if one of the device tensors has it, else `dtype`. Raises RuntimeError for a mixture of half precisions."""
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
    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(input) is VirtualTensor:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
                "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
                "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
                "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
                "safe to autocast."
            )
        with _guard(_key_set):
            return operator(input, *args, **kwargs)

    return kernel
