"""Choice of the backend that computes an attention on CUDA, and the reasons against each of them.

The rules are those of PyTorch's native/transformers/cuda/sdp_utils.cpp. PyTorch tries the backends
in an order of priority. On Hopper and Blackwell, the order is cuDNN, flash, memory-efficient, math,
unless the program has set an order of its own.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from virtualgpu.errors import VERSION, argument_differs, cpp_name, scalar_name
from virtualgpu.hardware import Machine
from virtualgpu.ops.call import Call, handles
from virtualgpu.ops.half import HALF
from virtualgpu.source_lines import warn_as_cpp
from virtualgpu.tensor import VirtualTensor

Tensor = torch.Tensor
_UNSET_ORDER = torch._C._get_sdp_priority_order()  # before any program has set an order
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_NUMBERS = {
    "math": SDPBackend.MATH.value,
    "flash": SDPBackend.FLASH_ATTENTION.value,
    "efficient": SDPBackend.EFFICIENT_ATTENTION.value,
    "cudnn": _CUDNN,
}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_ENABLED = {
    "cudnn": torch._C._get_cudnn_sdp_enabled,
    "flash": torch._C._get_flash_sdp_enabled,
    "efficient": torch._C._get_mem_efficient_sdp_enabled,
}
_TITLES = {
    "efficient": "Memory efficient",
    "flash": "Flash attention",
    "cudnn": "CuDNN attention" if VERSION < (2, 13) else "cuDNN attention",
}
_DISABLED = {
    "efficient": "Memory Efficient attention has been runtime disabled.",
    "flash": "Flash attention has been runtime disabled.",
    "cudnn": f"{_TITLES['cudnn']} has been runtime disabled.",
}
_NO_VIABLE_BACKEND = (
    "No viable backend for scaled_dot_product_attention was found. "
    "This is likely due to turning off both the math kernel and the fused kernels."
)


class Attention(NamedTuple):
    """Arguments of one attention, as PyTorch's `SDPAParams` holds them.

    `gqa` says whether several heads of the query may share a head of key and value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False


Capability = tuple[int, int]  # a GPU's compute capability, such as (9, 0)
# Returns why a backend cannot compute an attention, or None.
Reason = Callable[[Attention, Capability], str | None]


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    questions = {
        "_can_use_cudnn_attention": "cudnn",
        "_can_use_flash_attention": "flash",
        "_can_use_mem_efficient_attention": "efficient",
    }
    answers = {
        name: _can_use(backend) for name, backend in questions.items() if hasattr(torch._C, name)
    }
    yield torch._C, {"_is_flash_attention_available": lambda: True} | answers


# The module of causal biases. It imports the compiler, which takes a second.
CAUSAL_BIASES = "torch.nn.attention.bias"


def causal_biases(module: ModuleType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield PyTorch's module of causal attention biases, with functions that replace its own.

    For a bias that ends in the lower right corner, PyTorch would call operators that only have CUDA
    kernels. Here the bias becomes a mask instead.
    """
    names = ("can_use_flash_attention", "can_use_efficient_attention")
    yield module, {name: _only_on_cpu(getattr(module, name)) for name in names}


def backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> str:
    """Return the backend that CUDA chooses: "cudnn", "flash", "efficient" or "math".

    Query, key and value have the shape (batch, heads, positions, width). Raises RuntimeError if no
    backend may run, after warnings with the reasons.
    """
    attention = Attention(q, k, v, mask, dropout, causal, gqa)
    capability = _capability(q)
    math_is_enabled = torch._C._get_math_sdp_enabled()
    for name in _order(capability):
        if name == "math":
            if math_is_enabled:
                return name
        elif reason_against(name, attention, capability) is None:
            return name
    if not math_is_enabled and not any(enabled() for enabled in _ENABLED.values()):
        raise RuntimeError(_NO_VIABLE_BACKEND)
    for name, title in _TITLES.items():
        _warn(f"{title} kernel not used because:")
        _warn(reason_against(name, attention, capability))
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(capability: Capability) -> Iterator[str]:
    """Yield the names of the attention backends in the order in which PyTorch tries them.

    The order depends on the GPU's compute capability.
    """
    order = torch._C._get_sdp_priority_order()
    if order == _UNSET_ORDER and capability[0] in (9, 10):
        yield "cudnn"
        order = [number for number in order if number != _CUDNN]
        order.sort(key=lambda number: number == _NUMBERS["math"])
    for number in order:
        if number in _NAMES:
            yield _NAMES[number]


def _capability(query: Tensor) -> Capability:
    """Return the compute capability of the query's GPU."""
    profile = query._gpu.profile  # type: ignore[attr-defined]
    return profile.major, profile.minor


def _warn(reason: str | None) -> None:
    """Warn with the text `reason`, as PyTorch's C++ does. None means no warning."""
    if reason is not None:
        source = "/pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
        warn_as_cpp(f"{reason} (Triggered internally at {source}.)")


def reason_against(name: str, attention: Attention, capability: Capability) -> str | None:
    """Return why the backend `name` cannot compute this attention, in PyTorch's words.

    Returns None if it can.
    """
    if not _ENABLED[name]():
        return _DISABLED[name]
    for reason in (_shapes, *_REASONS[name]):
        found = reason(attention, capability)
        if found is not None:
            return found
    return None


def require_mask_beside_query(name: str, query: Tensor, mask: Tensor) -> None:
    """Raise RuntimeError unless the mask is on the query's device.

    `name` is the backend, whose operator has its own words for this error.
    """
    if mask.device != query.device:
        method = f"wrapper_CUDA___scaled_dot_product_{name}_attention"
        raise RuntimeError(argument_differs([("query", query), ("attn_bias", mask)], method))


@handles("_fused_sdp_choice")
def choose_backend(call: Call) -> int:
    """Return the number of the backend that CUDA would choose."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "enable_gqa")
    call.common_gpu()
    return _NUMBERS[backend(*(call.argument(name) for name in names))]


def _can_use(name: str) -> Callable[..., bool]:
    """Return PyTorch's function that says whether the backend `name` can compute an attention.

    With `debug`, the function warns about the reason if the backend cannot.
    """

    def can_use(parameters: Any, debug: bool = False) -> bool:
        q, k, v = parameters.query, parameters.key, parameters.value
        attention = Attention(
            q,
            k,
            v,
            parameters.attn_mask,
            parameters.dropout,
            parameters.is_causal,
            parameters.enable_gqa,
        )
        reason: str | None
        if type(q) is VirtualTensor:
            reason = reason_against(name, attention, _capability(q))
        else:
            reason = (
                f"All tensors need to be on cuda device. Got query on device: {q.device}, "
                f"key on device: {k.device}, value on device: {v.device}"
            )
        if debug:
            _warn(reason)
        return reason is None

    return can_use


def _only_on_cpu(can_use: Callable[..., bool]) -> Callable[..., bool]:
    """Return `can_use`, changed to return False for a query on a virtual GPU."""

    def can_use_on_cpu(parameters: Any, debug: bool = False) -> bool:
        return type(parameters.query) is not VirtualTensor and can_use(parameters, debug)

    return can_use_on_cpu


# Reasons against a backend. Each function returns PyTorch's text if it refuses, and else None.


def _shapes(attention: Attention, capability: Capability) -> str | None:
    """Return an error text unless the tensors have four dimensions and are not empty.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    q, k, v = attention[:3]
    if not q.dim() == k.dim() == v.dim() == 4:
        return (
            "All fused kernels requires query, key and value to be 4 dimensional, but got "
            f"Query dim: {q.dim()}, Key dim: {k.dim()}, Value dim: {v.dim()} instead."
        )
    if 0 in (q.numel(), k.numel(), v.numel()):
        return "All fused kernels do not support zero seq_len_q or seq_len_kv."
    return None


def _dense(attention: Attention, capability: Capability) -> str | None:
    """Return an error text unless the tensors and the mask have a contiguous last dimension.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    q, k, v, mask = attention[:4]
    if all(x is None or x.stride(-1) == 1 for x in (q, k, v, mask)):
        return None
    of_mask = ""
    if mask is not None:
        of_mask = f", Attn_mask.stride(-1): {mask.stride(-1)}"
    return (
        "All fused kernels require the last dimension of the input to have stride 1. "
        f"Got Query.stride(-1): {q.stride(-1)}, Key.stride(-1): {k.stride(-1)}, "
        f"Value.stride(-1): {v.stride(-1)}{of_mask} instead."
    )


def _dtype(attention: Attention, allowed: tuple[torch.dtype, ...]) -> str | None:
    """Return PyTorch's text about a wrong dtype if the query's dtype is not in `allowed`.

    Otherwise return None.
    """
    if attention.query.dtype in allowed:
        return None
    return _wrong_dtype(tuple(x.dtype for x in attention[:3]), allowed)


@lru_cache(maxsize=64)
def _wrong_dtype(given: tuple[torch.dtype, ...], allowed: tuple[torch.dtype, ...]) -> str:
    """Return PyTorch's text that query, key and value have wrong dtypes.

    `given` has their three dtypes, and `allowed` those that the backend supports.
    """
    q, k, v = map(cpp_name, given)
    names = ", ".join(map(scalar_name, allowed))
    return (
        f"Expected query, key and value to all be of dtype: {{{names}}}. "
        f"Got Query dtype: {q}, Key dtype: {k}, and Value dtype: {v} instead."
    )


def _half_precision(attention: Attention, capability: Capability) -> str | None:
    """Return an error text unless the dtype is float16 or, from Ampere on, bfloat16.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    return _dtype(attention, HALF if capability >= (8, 0) else (torch.float16,))


def _half_or_float32(attention: Attention, capability: Capability) -> str | None:
    """Return an error text unless the dtype is float16, float32 or, from Ampere on, bfloat16.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    if capability < (8, 0):
        return _dtype(attention, (torch.float16, torch.float32))
    return _dtype(attention, (torch.float16, torch.float32, torch.bfloat16))


def _from_ampere_on(kernel: str) -> Reason:
    """Return a rule that refuses GPUs older than Ampere for the attention kernel of this name."""

    def reason(attention: Attention, capability: Capability) -> str | None:
        if capability >= (8, 0):
            return None
        return (
            f"{kernel} only supports gpu architectures in the range [sm80, sm121]. "
            f"Attempting to run on a sm {capability[0]}.{capability[1]} gpu."
        )

    return reason


def _widths(attention: Attention) -> str:
    """Return the end of an error text, which gives the widths of query, key and value."""
    q, k, v = (x.shape[-1] for x in attention[:3])
    return f"Got Query.size(-1): {q}, Key.size(-1): {k}, Value.size(-1): {v} instead."


def _cudnn_mask(attention: Attention, capability: Capability) -> str | None:
    """Return an error text if the mask requires a gradient, which cuDNN does not compute.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    if attention.mask is not None and attention.mask.requires_grad:
        return "cuDNN attention does not compute the gradient of attn_mask."
    return None


def _cudnn_widths(attention: Attention, capability: Capability) -> str | None:
    """Return an error text for widths that are too large for cuDNN or no multiples of 8.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    widths = attention.query.shape[3], attention.value.shape[3]
    limit = 128
    if capability >= (9, 0):
        limit = 256
    if max(widths) > limit:
        return f"head_dim should be no more than {limit}"
    if any(width % 8 for width in widths):
        return "head_dim should be a multiple of 8"
    return None


def _cudnn_lengths(attention: Attention, capability: Capability) -> str | None:
    """Return an error text for one query with one key, or one query with dropout.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    queries, keys = attention.query.shape[2], attention.key.shape[2]
    if queries == 1 and keys == 1:
        return "cudnn SDPA does not support key/value sequence length 1."
    if queries == 1 and attention.dropout > 0:
        return "cudnn SDPA does not support query sequence length 1 with dropout."
    return None


def _flash_mask(attention: Attention, capability: Capability) -> str | None:
    """Return an error text if there is a mask.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    if attention.mask is None:
        return None
    return "Flash Attention does not support non-null attn_mask."


def _flash_widths(attention: Attention, capability: Capability) -> str | None:
    """Return an error text for widths that differ or are larger than 256.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    q, k, v = (x.shape[3] for x in attention[:3])
    if q == k == v and q <= 256:
        return None
    return (
        "Flash attention requires q,k,v to have the same last dimension and to be less than or "
        f"equal to 256. {_widths(attention)}"
    )


def _flash_causal(attention: Attention, capability: Capability) -> str | None:
    """Return an error text for causal attention if the numbers of queries and keys differ.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    queries, keys = attention.query.shape[2], attention.key.shape[2]
    if not attention.causal or queries == keys:
        return None
    return (
        "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. "
        f"Got seqlen_q: {queries} seqlen_k: {keys}. If you would like to use causal attention with "
        "non-square masks, please see CausalAttnMask."
    )


def _efficient_widths(attention: Attention, capability: Capability) -> str | None:
    """Return an error text unless the widths are multiples of the dtype's alignment.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    alignment = 1
    if attention.query.dtype in HALF:
        alignment = 8
    elif capability >= (8, 0):
        alignment = 4
    if attention.query.shape[3] % alignment == attention.value.shape[3] % alignment == 0:
        return None
    return (
        "Mem efficient attention requires last dimension of inputs to be divisible by "
        f"{alignment}. {_widths(attention)}"
    )


def _efficient_heads(attention: Attention, capability: Capability) -> str | None:
    """Return an error text if the batches or the numbers of heads differ.

    Returns None if there is no error. `capability` is the compute capability of the GPU.
    """
    q, k, v = (x.shape for x in attention[:3])
    if not attention.gqa and q[:2] == k[:2] == v[:2]:
        return None
    what = "num_heads"
    if not q[0] == k[0] == v[0]:
        what = "batch_size"
    return (
        "For dense inputs, both fused kernels require query, key and value to have the same "
        f"{what}. Query.sizes(): {list(q)}, Key.sizes(): {list(k)}, Value.sizes(): {list(v)} "
        "instead. To broadcast dense inputs, try using unsqueeze and expand_to before passing them "
        "into the kernel."
    )


_REASONS: dict[str, tuple[Reason, ...]] = {
    "cudnn": (
        _half_precision,
        _cudnn_mask,
        _from_ampere_on("cuDNN MHA"),
        _dense,
        _cudnn_widths,
        _cudnn_lengths,
    ),
    "flash": (
        _flash_mask,
        _flash_widths,
        _from_ampere_on("Flash attention"),
        _flash_causal,
        _half_precision,
        _dense,
    ),
    "efficient": (_efficient_widths, _dense, _efficient_heads, _half_or_float32),
}
