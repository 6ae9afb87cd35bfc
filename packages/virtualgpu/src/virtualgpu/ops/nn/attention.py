"""Scaled dot product attention: the values, memory and time of CUDA's backends.

`attention_backends` chooses the backend. The allocations follow PyTorch's
native/transformers/cuda/attention.cu and attention_backward.cu, CUTLASS's kernel_backward.h (the
workspace of the memory-efficient backward pass), and native/cudnn/MHA.cpp. The workspaces of cuDNN
are estimates from measurements on an H200 (cuDNN 9.19).

Query, key and value have the shape (batch, heads, positions, width).
"""

from collections.abc import Sequence
from math import ceil, inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import _DisableTorchDispatch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from virtualgpu.errors import cpp_name
from virtualgpu.hardware import Gpu
from virtualgpu.ops.blas import product_format
from virtualgpu.ops.call import (
    Call,
    Work,
    bytes_of,
    checks,
    common_gpu,
    composes,
    composes_dtensors,
    handles,
    made_of,
)
from virtualgpu.ops.half import HALF, sums_in_float32
from virtualgpu.ops.nn.attention_backends import backend, require_mask_beside_query
from virtualgpu.ops.passes import compared
from virtualgpu.ops.sequence import Out, Plan, perform, play
from virtualgpu.tensor import VirtualTensor, empty, empty_without_values, memory_of

aten = torch.ops.aten
Tensor = torch.Tensor
# Shares of a product's rate, from benchmarks/timing/kernels.json (one H200, torch 2.11,
# cuDNN 9.19), rounded.
ATTENTION, ATTENTION_BACKWARD = 0.62, 0.6
# Queries with which half of that rate is reached in float16. A block of queries takes the same time
# to start and to end in every format.
ATTENTION_HALF, ATTENTION_BACKWARD_HALF = 256, 512

fused = aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
sums_in_float32(fused, stay=(1,))  # result 1 has the logarithms of the softmax's sums
sums_in_float32(fused_backward)


def scratch_tensor(gpu: Gpu, nbytes: int) -> VirtualTensor:
    """Return a tensor of `nbytes` bytes on the GPU without values.

    It stands for memory that a library or an autograd graph uses.
    """
    return empty_without_values(gpu, (nbytes,), (1,), torch.uint8)


@checks("scaled_dot_product_attention")
def check_devices(args: tuple, kwargs: dict) -> None:
    """Raise PyTorch's RuntimeError unless query, key and value are on one device."""
    query, key, value = (x.device for x in args[:3])
    if not query == key == value:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {query} key.device: {key} and value.device: {value} instead."
        )


@composes("scaled_dot_product_attention")
def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` with the backend of CUDA.

    The steps around the backend are those of native/transformers/attention.cpp. Raises RuntimeError
    for arguments that PyTorch refuses.
    """
    if type(q) is not VirtualTensor:
        # Only the mask is on a GPU. PyTorch then chooses a kernel for the CPU.
        operator = aten.scaled_dot_product_attention.default
        return made_of(
            operator, q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _check(q, k, v, attn_mask, is_causal)
    chosen = backend(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _as_summand(attn_mask, q.dtype)
    if chosen == "math":
        return aten._scaled_dot_product_attention_math.default(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if scale is None:
        scale = q.shape[3] ** -0.5
    width = v.shape[3]
    if chosen == "flash" and width % 8:
        q, k, v = (F.pad(x, (0, 8 - width % 8)) for x in (q, k, v))
    if attn_mask is not None:
        keys = k.shape[2]
        if chosen == "efficient" and keys % 8:
            attn_mask = F.pad(attn_mask, (0, 8 - keys % 8))[..., :keys]
        if chosen == "efficient":
            attn_mask = attn_mask.expand(*q.shape[:3], keys)
        require_mask_beside_query(chosen, q, attn_mask)
    out = Attention.apply(q, k, v, attn_mask, dropout_p, is_causal, scale, chosen)
    if out.shape[3] != width:
        return out[..., :width]
    return out


def _as_summand(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to a tensor that is added to the scores of attention.

    It has 0 for True and -inf for False.
    """
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.scalar_tensor(-inf, dtype=dtype, device=mask.device))


@composes_dtensors("scaled_dot_product_attention")
def attention_of_dtensors(
    q: Any, k: Any, v: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Compute the attention of DTensors and return a DTensor.

    If the query is sharded by batches or heads that divide evenly, each rank computes its own ones.
    Otherwise each rank computes all (the rules of torch/distributed/tensor/_ops/_matrix_ops.py).
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not all(isinstance(x, DTensor) for x in (q, k, v, attn_mask) if x is not None):
        raise RuntimeError(
            "aten.scaled_dot_product_attention.default got mixed torch.Tensor and DTensor, need to "
            "convert all torch.Tensor to DTensor before calling distributed operators!"
        )
    mesh = q.device_mesh
    placements = []
    for index, placement in enumerate(q.placements):
        stays = _splits_evenly(placement, mesh.size(index), (q, k, v))
        placements.append(placement if stays else Replicate())
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-2], *attn_mask.shape[-2:])
    parts: list[Any] = [
        None if x is None else x.redistribute(mesh, placements).to_local()
        for x in (q, k, v, attn_mask)
    ]
    result = F.scaled_dot_product_attention(*parts, *args, **kwargs)
    return DTensor.from_local(result, mesh, placements, run_check=False)


def _splits_evenly(placement: Any, ranks: int, tensors: tuple) -> bool:
    """Return whether a DTensor placement divides all batches or all heads evenly.

    `tensors` are query, key and value, which are divided among `ranks` ranks.
    """
    if tensors[0].dim() != 4:
        return False
    for dim in (0, 1):
        if placement.is_shard(dim) and not any(x.shape[dim] % ranks for x in tensors):
            return True
    return False


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    """Raise RuntimeError for arguments that PyTorch's `validate_sdpa_input` refuses."""
    common_gpu(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{cpp_name(q.dtype)} key.dtype: {cpp_name(k.dtype)} and value.dtype: "
            f"{cpp_name(v.dtype)} instead."
        )
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be  at least 2 dimensional")
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype}"
        )
    if mask is not None and causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
            "is_causal=True"
        )


# Values


def _plain(x: Tensor) -> Tensor:
    """Return the values of a device tensor as a CPU tensor, in float32 for half precision."""
    x = aten.alias.default(x)
    if x.dtype in HALF:
        return x.float()
    return x


def _operands(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the values of query, key, value and mask as plain tensors.

    Key and value are repeated to have as many heads as the query.
    """
    heads = q.shape[1] // k.shape[1]
    keys, values = _plain(k), _plain(v)
    if heads > 1:
        keys, values = keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1)
    return _plain(q), keys, values, None if mask is None else _plain(mask)


def _cpu_is_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> bool:
    """Return whether the CPU has a fused kernel for an attention with these arguments.

    The program's choice of backends is ignored, because it is meant for CUDA.
    """
    before = torch._C._get_flash_sdp_enabled()
    torch._C._set_sdp_use_flash(True)
    try:
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, scale=scale)
    finally:
        torch._C._set_sdp_use_flash(before)
    return choice == SDPBackend.FLASH_ATTENTION.value


def probabilities(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the weights of attention: the softmax of the scores of query and key.

    A row that is masked as a whole becomes zero.
    """
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        all_true = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu")
        scores.masked_fill_(all_true.tril_().logical_not_(), -inf)
    result = scores.softmax(-1)
    if mask is not None:
        result.nan_to_num_(0.0)
    return result


class Attention(torch.autograd.Function):
    """Autograd function for a fused attention kernel of one of CUDA's backends."""

    @staticmethod
    @compared
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float,
        chosen: str,
    ) -> Tensor:
        """Compute the attention's output, and keep what the backward pass needs.

        `chosen` is the backend: "cudnn", "flash" or "efficient".
        """
        gpu = q._gpu  # type: ignore[attr-defined]
        gpu.machine.require_alive()
        gpu.machine.selected.gpu = gpu
        needs_gradient = any(ctx.needs_input_grad[:4])
        known = all(memory_of(x).kept is not None for x in (q, k, v, mask) if x is not None)
        seeds = []
        if chosen == "cudnn":
            seeds = [scratch_tensor(gpu, 8), scratch_tensor(gpu, 8)]
        like_query = chosen != "efficient"
        out = _output(gpu, q, (*q.shape[:3], v.shape[3]), like_query)
        sums = None
        if needs_gradient or chosen == "flash":
            sums = scratch_tensor(gpu, _sum_bytes(q, chosen))
        if chosen == "flash":
            seeds = [scratch_tensor(gpu, 16), scratch_tensor(gpu, 8)]
        play(gpu, _forward_workspace(q, v, dropout, chosen))
        kept = logarithms = None
        bias_needs_gradient = mask is not None and ctx.needs_input_grad[3]
        if known and memory_of(out).kept is not None:
            with _DisableTorchDispatch():
                queries, keys, values, added = _operands(q, k, v, mask)
                if not bias_needs_gradient and _cpu_is_fused(
                    queries, keys, values, added, dropout, causal, scale
                ):
                    value, logarithms = fused.default(
                        queries, keys, values, dropout, causal, attn_mask=added, scale=scale
                    )
                else:
                    p = probabilities(queries, keys, added, causal, scale)
                    if dropout > 0:
                        draws = gpu.generator.next_draws(p.numel())
                        kept = torch.empty_like(p).bernoulli_(1 - dropout, generator=draws)
                        p = p * kept.div_(1 - dropout or 1)
                    value = p @ values
                aten.copy_.default(out, value)
        gpu.launch(*attention_work(q, k, v, causal), name="attention")
        if needs_gradient:
            ctx.save_for_backward(mask, k, q, v, sums, out, *seeds)
            ctx.settings = causal, scale, chosen, kept, bias_needs_gradient, logarithms
        return out

    @staticmethod
    @once_differentiable
    @compared
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of query, key, value and mask, and None for the other arguments."""
        mask, k, q, v, _, out, *_ = ctx.saved_tensors
        causal, scale, chosen, kept, bias_needs_gradient, logarithms = ctx.settings
        gpu = q._gpu
        gpu.machine.selected.gpu = gpu
        held = [scratch_tensor(gpu, size) for size in _copied_bytes(grad, out, chosen)]
        grads = [_output(gpu, x, x.shape, chosen != "efficient") for x in (q, k, v)]
        bias = None
        if bias_needs_gradient:
            bias = _bias_gradient(gpu, q, k)
        play(gpu, _backward_workspace(q, k, v, grad, chosen))
        del held
        if all(memory_of(x).kept is not None for x in (grad, q, k, v, *grads)):
            with _DisableTorchDispatch():
                operands = _operands(q, k, v, mask)
                if logarithms is not None:
                    *tensors, added = operands
                    results = fused_backward.default(
                        _plain(grad), *tensors, _plain(out), logarithms, 0.0, causal,
                        attn_mask=added, scale=scale,
                    )  # fmt: skip
                else:
                    results = _gradients(
                        _plain(grad), *operands, causal=causal, scale=scale, kept=kept
                    )
                for x, value in zip((*grads, bias), results, strict=False):
                    if x is not None:
                        shared = value.shape[1] // x.shape[1]  # heads of the query that share x
                        if shared > 1:
                            value = value.unflatten(1, (-1, shared)).sum(2)
                        aten.copy_.default(x, value)
        gpu.launch(*attention_work(q, k, v, causal, backward=True), name="attention_backward")
        return *grads, bias, None, None, None, None


def _output(gpu: Gpu, model: Tensor, shape: Sequence[int], like_model: bool) -> VirtualTensor:
    """Return an empty output of attention with the dtype of `model` and this shape.

    With `like_model`, its dimensions have the same order in memory as those of `model`. Otherwise
    the order is (batch, position, head, width).
    """
    order = [0, 2, 1]
    if like_model:
        strides = model.stride()
        order = sorted(range(3), key=lambda d: (-strides[d], d))
    step, stride = shape[3], [0, 0, 0, 1]
    for d in reversed(order):
        stride[d] = step
        step *= shape[d]
    return empty(gpu, shape, stride, model.dtype)


def _bias_gradient(gpu: Gpu, q: Tensor, k: Tensor) -> Tensor:
    """Return an empty tensor for the gradient of the mask, for the query `q` and the key `k`.

    Its rows are padded to multiples of 16 elements.
    """
    keys = k.shape[2]
    _, heads, queries, _ = q.shape
    width = -(-keys // 16) * 16
    strides = heads * queries * width, queries * width, width, 1
    return empty(gpu, (*q.shape[:3], width), strides, q.dtype)[..., :keys]


def _gradients(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    kept: Tensor | None,
) -> Any:
    """Return the gradients of attention for query, keys, values and mask.

    `grad` is the output's gradient. `kept` holds the factors of dropout, or None without dropout.
    The other arguments are those of the forward pass.
    """
    p = probabilities(q, keys, mask, causal, scale)
    dropped = p
    if kept is not None:
        dropped = p * kept
    of_values = dropped.mT @ grad
    of_p = grad @ values.mT
    if kept is not None:
        of_p = of_p * kept
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True))
    return of_scores @ keys * scale, of_scores.mT @ q * scale, of_values, of_scores


# Memory


def _sum_bytes(q: Tensor, chosen: str) -> int:
    """Return the bytes that attention keeps per call for the logarithms of the softmax's sums.

    They are float32, with one for each query and head. The memory-efficient kernel (`chosen` is
    "efficient") rounds the number of queries up to a multiple of 32.
    """
    batch, heads, queries, _ = q.shape
    if chosen == "efficient":
        queries = -(-queries // 32) * 32
    return 4 * batch * heads * queries


def _forward_workspace(q: Tensor, v: Tensor, dropout: float, chosen: str) -> Plan:
    """Return the memory plan of the forward pass of attention, without its results.

    `chosen` is the backend: "cudnn", "flash" or "efficient".
    """
    if chosen == "cudnn":
        return (256, -256) if q.shape[2] > 1 else ()  # an estimate
    if chosen == "flash":
        if dropout > 0:
            return (16, -16)
        return ()
    if q.dtype in HALF and v.shape[3] > 128:
        size = 4 * prod(q.shape[:3]) * v.shape[3]  # the output is accumulated in float32
        return size, -size
    return ()


def _copied_bytes(grad: Tensor, out: Tensor, chosen: str) -> list[int]:
    """Return the bytes of the contiguous copies that the backward pass of attention makes.

    It may copy `grad`, the output's gradient, and `out`, the output. `chosen` is the backend.
    """
    if chosen == "cudnn":
        if grad.stride() == out.stride():
            return []
        return [bytes_of(grad)]
    copies = []
    if not grad.transpose(1, 2).is_contiguous():
        copies.append(bytes_of(grad))
    if chosen != "efficient" and not out.transpose(1, 2).is_contiguous():
        copies.append(bytes_of(out))
    return copies


def _backward_workspace(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, chosen: str) -> Plan:
    """Return the memory plan of the backward pass of attention, without its results.

    `chosen` is the backend: "cudnn", "flash" or "efficient".
    """
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    if chosen == "cudnn":
        # An estimate: the query's gradient and a sum per row in float32. If heads of the query
        # share keys, also the gradients of keys and values for each head.
        size = 4 * batch * heads * queries * width + 4 * batch * heads * queries + 256
        if k.shape[1] != heads:
            size += sum(2 * batch * heads * keys * x.shape[3] for x in (k, v))
        return size, -size
    if chosen == "flash":
        rows = batch * heads * -(-queries // 128) * 128
        sums, accumulator = 4 * rows, 4 * rows * -(-width // 32) * 32
        return sums, accumulator, -accumulator, -sums
    return _efficient_backward(q, v, grad, keys)


def _efficient_backward(q: Tensor, v: Tensor, grad: Tensor, keys: int) -> Plan:
    """Return the memory plan of the backward pass of the memory-efficient kernel.

    `keys` is the number of keys. Before the kernel's workspace comes delta, the sum of gradient *
    output for each row. In half precision, the kernel computes delta itself.
    """
    batch, heads, queries, width = q.shape
    half, widest = q.dtype in HALF, max(width, v.shape[3])
    rows = 4 * batch * heads * queries
    block, columns = (64, 1) if widest <= 64 else (128, ceil(width / 64))
    size = batch * heads * ceil(queries / block) * columns * (block * 64 * 4 + 16)
    if half and widest > 128:
        size += batch * heads * -(-keys // 64) * 64 * 2 * 4 * -(-widest // 128) * 128
    if half:
        return rows, size, -rows, -size
    product = bytes_of(grad)
    delta: Plan = (rows, rows, -rows) if queries > 1 and heads > 1 else (rows,)
    return product, *delta, -product, size, -rows, -size


@handles("_safe_softmax")
def safe_softmax(call: Call) -> Any:
    """Run `_safe_softmax`: a softmax with zeros in the rows that are masked as a whole.

    CUDA finds these rows by comparison, and fills them in place.
    """
    x, dim = call.args[0], call.args[1]

    def plan(outputs: list[Any]) -> Plan:
        n, rows, item = x.numel(), x.numel() // max(x.shape[dim], 1), outputs[0].itemsize
        return Out(0), n, rows, item, -item, -rows, -n

    return perform(call, plan)


# Time


def attention_work(q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool = False) -> Work:
    """Return the work of an attention kernel, in the forward or in the backward pass.

    The forward pass has two products, and the backward pass five. A causal mask halves them.
    """
    queries, outputs = q.shape[2], prod(q.shape[:3]) * v.shape[3]
    flops: float = 2 * k.shape[2] * prod(q.shape[:3]) * (q.shape[3] + v.shape[3])
    moved = sum(map(bytes_of, (q, k, v))) + outputs * q.itemsize
    share, half = ATTENTION, ATTENTION_HALF
    if backward:
        flops *= 2.5
        moved *= 2
        share, half = ATTENTION_BACKWARD, ATTENTION_BACKWARD_HALF
    if causal:
        flops *= 0.5
    gpu = q._gpu  # type: ignore[attr-defined]
    format, peak = product_format(q.dtype, gpu), gpu.profile.peak_flops
    # Faster formats need more queries.
    half_queries = half * (peak[format] / peak["float16"])
    efficiency = share * queries / (queries + half_queries)
    return Work(moved, flops / efficiency, format, outputs)
