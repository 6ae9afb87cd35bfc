"""Scaled dot product attention: what each of CUDA's backends computes and allocates, forward and backward.

`attention_backends` chooses the backend.
Allocations: native/transformers/cuda/attention.cu and attention_backward.cu, cutlass' kernel_backward.h (workspace of the memory-
efficient backward), native/cudnn/MHA.cpp. cuDNN's own workspaces are estimates, measured on an H200 (cuDNN 9.19).
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
from virtualgpu.ops.sequence import Out, Plan, perform, play
from virtualgpu.tensor import VirtualTensor, empty, empty_without_values, memory_of

aten = torch.ops.aten
Tensor = torch.Tensor
# Of a product's rate, read off benchmarks/timing/kernels.json (one H200, torch 2.11, cuDNN 9.19), rounded.
ATTENTION, ATTENTION_BACKWARD = 0.62, 0.6
# Queries with which half of that is reached in float16: the start and the end of a block take as long whatever the format.
ATTENTION_HALF, ATTENTION_BACKWARD_HALF = 256, 512

fused, fused_backward = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
sums_in_float32(fused, stay=(1,))  # the logarithm of the sums of the softmax
sums_in_float32(fused_backward)


def scratch_tensor(gpu: Gpu, nbytes: int) -> VirtualTensor:
    """Memory that a graph keeps and nobody reads."""
    return empty_without_values(gpu, (nbytes,), (1,), torch.uint8)


@checks("scaled_dot_product_attention")
def check_devices(args: tuple, kwargs: dict) -> None:
    """Raises RuntimeError unless query, key and value are on one device."""
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
    if (
        type(q) is not VirtualTensor
    ):  # the mask alone is on a GPU: PyTorch chooses a kernel for the CPU
        operator = aten.scaled_dot_product_attention.default
        return made_of(
            operator, q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _check(q, k, v, attn_mask, is_causal)
    chosen = backend(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        where = attn_mask.device
        zero = torch.scalar_tensor(0.0, dtype=q.dtype, device=where)
        attn_mask = torch.where(
            attn_mask, zero, torch.scalar_tensor(-inf, dtype=q.dtype, device=where)
        )
        del zero
    if chosen == "math":
        return aten._scaled_dot_product_attention_math.default(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    scale = q.shape[3] ** -0.5 if scale is None else scale
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
    return out[..., :width] if out.shape[3] != width else out


@composes_dtensors("scaled_dot_product_attention")
def attention_of_dtensors(
    q: Any, k: Any, v: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Each rank computes its batches and heads, or all of them (the rules of torch/distributed/tensor/_ops/_matrix_ops.py)."""
    from torch.distributed.tensor import DTensor, Replicate

    if not all(isinstance(x, DTensor) for x in (q, k, v, attn_mask) if x is not None):
        raise RuntimeError(
            "aten.scaled_dot_product_attention.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor "
            "before calling distributed operators!"
        )
    mesh = q.device_mesh
    placements = [
        p
        if any(
            p.is_shard(dim)
            and q.dim() == 4
            and not any(x.shape[dim] % mesh.size(i) for x in (q, k, v))
            for dim in (0, 1)
        )
        else Replicate()
        for i, p in enumerate(q.placements)
    ]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-2], *attn_mask.shape[-2:])
    parts: list[Any] = [
        None if x is None else x.redistribute(mesh, placements).to_local()
        for x in (q, k, v, attn_mask)
    ]
    return DTensor.from_local(
        F.scaled_dot_product_attention(*parts, *args, **kwargs), mesh, placements, run_check=False
    )


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    """Raises RuntimeError as PyTorch's `validate_sdpa_input` does."""
    common_gpu(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {cpp_name(q.dtype)} "
            f"key.dtype: {cpp_name(k.dtype)} and value.dtype: {cpp_name(v.dtype)} instead."
        )
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be  at least 2 dimensional")
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {mask.dtype}"
        )
    if mask is not None and causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )


# Values


def _plain(x: Tensor) -> Tensor:
    """The values of a device tensor in a plain one, in float32 where they are in half precision."""
    x = aten.alias.default(x)
    return x.float() if x.dtype in HALF else x


def _operands(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Their values, with keys and values for each of the query's heads."""
    heads = q.shape[1] // k.shape[1]
    keys, values = (
        _plain(x).repeat_interleave(heads, 1) if heads > 1 else _plain(x) for x in (k, v)
    )
    return _plain(q), keys, values, None if mask is None else _plain(mask)


def _cpu_is_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> bool:
    """Return whether the CPU has a fused kernel for this attention. The program's choice of backends is for CUDA."""
    before = torch._C._get_flash_sdp_enabled()
    torch._C._set_sdp_use_flash(True)
    try:
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, scale=scale)
    finally:
        torch._C._set_sdp_use_flash(before)
    return choice == SDPBackend.FLASH_ATTENTION.value


def probabilities(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Softmax of the scores; a row that is masked as a whole is zero."""
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril_().logical_not_(),
            -inf,
        )
    return scores.softmax(-1).nan_to_num_(0.0) if mask is not None else scores.softmax(-1)


class Attention(torch.autograd.Function):
    """A fused attention kernel."""

    @staticmethod
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
        gpu = q._gpu  # type: ignore[attr-defined]
        gpu.machine.require_alive()
        gpu.machine.selected.gpu = gpu
        needs = any(ctx.needs_input_grad[:4])
        known = all(memory_of(x).kept is not None for x in (q, k, v, mask) if x is not None)
        seeds = [scratch_tensor(gpu, 8), scratch_tensor(gpu, 8)] if chosen == "cudnn" else []
        like_query = chosen != "efficient"
        out = _output(gpu, q, (*q.shape[:3], v.shape[3]), like_query)
        sums = scratch_tensor(gpu, _sum_bytes(q, chosen)) if needs or chosen == "flash" else None
        if chosen == "flash":
            seeds = [scratch_tensor(gpu, 16), scratch_tensor(gpu, 8)]
        play(gpu, _forward_workspace(q, v, dropout, chosen))
        kept = logarithms = None
        bias_needs = mask is not None and ctx.needs_input_grad[3]
        if known and memory_of(out).kept is not None:
            with _DisableTorchDispatch():
                queries, keys, values, added = _operands(q, k, v, mask)
                if not bias_needs and _cpu_is_fused(
                    queries, keys, values, added, dropout, causal, scale
                ):
                    value, logarithms = fused.default(
                        queries, keys, values, dropout, causal, attn_mask=added, scale=scale
                    )
                else:
                    p = probabilities(queries, keys, added, causal, scale)
                    if dropout > 0:
                        kept = torch.empty_like(p).bernoulli_(
                            1 - dropout, generator=gpu.generator.next_draws(p.numel())
                        )
                        p = p * kept.div_(1 - dropout or 1)
                    value = p @ values
                aten.copy_.default(out, value)
        gpu.launch(*attention_work(q, k, v, causal), name="attention")
        if needs:
            ctx.save_for_backward(mask, k, q, v, sums, out, *seeds)
            ctx.settings = causal, scale, chosen, kept, bias_needs, logarithms
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mask, k, q, v, _, out, *_ = ctx.saved_tensors
        causal, scale, chosen, kept, bias_needs, logarithms = ctx.settings
        gpu = q._gpu
        gpu.machine.selected.gpu = gpu
        shapes = (q, k, v)
        copies = _copies(grad, out, chosen)
        held = [scratch_tensor(gpu, size) for size in copies]
        grads = [_output(gpu, x, x.shape, chosen != "efficient") for x in shapes]
        bias = None
        if bias_needs:
            keys = k.shape[2]
            _, heads, queries, _ = q.shape
            width = -(-keys // 16) * 16
            bias = empty(
                gpu,
                (*q.shape[:3], width),
                (heads * queries * width, queries * width, width, 1),
                q.dtype,
            )[..., :keys]
        play(gpu, _backward_workspace(q, k, v, grad, chosen))
        del held
        if all(memory_of(x).kept is not None for x in (grad, q, k, v, *grads)):
            with _DisableTorchDispatch():
                queries, keys, values, added = operands = _operands(q, k, v, mask)
                if logarithms is not None:
                    results = fused_backward.default(
                        _plain(grad),
                        queries,
                        keys,
                        values,
                        _plain(out),
                        logarithms,
                        0.0,
                        causal,
                        attn_mask=added,
                        scale=scale,
                    )
                else:
                    results = _gradients(
                        _plain(grad), *operands, causal=causal, scale=scale, kept=kept
                    )
                for x, value in zip((*grads, bias), results, strict=False):
                    if x is not None:
                        shared = value.shape[1] // x.shape[1]  # by several heads of the query
                        aten.copy_.default(
                            x, value.unflatten(1, (-1, shared)).sum(2) if shared > 1 else value
                        )
        gpu.launch(*attention_work(q, k, v, causal, backward=True), name="attention_backward")
        return *grads, bias, None, None, None, None


def _output(gpu: Gpu, model: Tensor, shape: Sequence[int], like_model: bool) -> VirtualTensor:
    """An output with the model's order of dimensions, or else in the order batch, position, head, width."""
    strides = model.stride() if like_model else (1, 2, 1, 0)
    order = sorted(range(3), key=lambda d: (-strides[d], d)) if like_model else [0, 2, 1]
    step, stride = shape[3], [0, 0, 0, 1]
    for d in reversed(order):
        stride[d] = step
        step *= shape[d]
    return empty(gpu, shape, stride, model.dtype)


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
    p = probabilities(q, keys, mask, causal, scale)
    dropped = p if kept is None else p * kept
    of_values = dropped.mT @ grad
    of_p = grad @ values.mT
    of_p = of_p if kept is None else of_p * kept
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True))
    return of_scores @ keys * scale, of_scores.mT @ q * scale, of_values, of_scores


# Memory


def _sum_bytes(q: Tensor, chosen: str) -> int:
    """The logarithms of the softmax's sums, in float32; the memory-efficient kernel rounds the positions up to 32."""
    batch, heads, queries, _ = q.shape
    return 4 * batch * heads * (-(-queries // 32) * 32 if chosen == "efficient" else queries)


def _forward_workspace(q: Tensor, v: Tensor, dropout: float, chosen: str) -> Plan:
    if chosen == "cudnn":
        return (256, -256) if q.shape[2] > 1 else ()  # an estimate
    if chosen == "flash":
        return (16, -16) if dropout > 0 else ()
    if (
        q.dtype in HALF and v.shape[3] > 128
    ):  # the output is accumulated in a float32 buffer of its own
        size = 4 * prod(q.shape[:3]) * v.shape[3]
        return size, -size
    return ()


def _copies(grad: Tensor, out: Tensor, chosen: str) -> list[int]:
    """Contiguous copies that the backward makes of the output's gradient and of the output."""
    if chosen == "cudnn":
        return [] if grad.stride() == out.stride() else [bytes_of(grad)]
    copies = [] if grad.transpose(1, 2).is_contiguous() else [bytes_of(grad)]
    return (
        copies
        if chosen == "efficient" or out.transpose(1, 2).is_contiguous()
        else [*copies, bytes_of(out)]
    )


def _backward_workspace(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, chosen: str) -> Plan:
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    if (
        chosen == "cudnn"
    ):  # an estimate: the query's gradient and a sum a row in float32; with shared keys their gradients a head
        shared = (
            sum(2 * batch * heads * keys * x.shape[3] for x in (k, v)) if k.shape[1] != heads else 0
        )
        size = 4 * batch * heads * queries * width + 4 * batch * heads * queries + 256 + shared
        return size, -size
    if chosen == "flash":
        rows = batch * heads * -(-queries // 128) * 128
        sums, accumulator = 4 * rows, 4 * rows * -(-width // 32) * 32
        return sums, accumulator, -accumulator, -sums
    return _efficient_backward(q, v, grad, keys)


def _efficient_backward(q: Tensor, v: Tensor, grad: Tensor, keys: int) -> Plan:
    """delta = sum of gradient * output a row, which the kernel computes itself in half precision; then its workspace."""
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
    """A softmax, then zeros in the rows that are masked as a whole: found by comparison, filled in place."""
    x, dim = call.args[0], call.args[1]

    def plan(outputs: list[Any]) -> Plan:
        n, rows, item = x.numel(), x.numel() // max(x.shape[dim], 1), outputs[0].itemsize
        return Out(0), n, rows, item, -item, -rows, -n

    return perform(call, plan)


# Time


def attention_work(q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool = False) -> Work:
    """What the kernel does: two products forward, five backward; a causal mask spares half of them."""
    queries, outputs = q.shape[2], prod(q.shape[:3]) * v.shape[3]
    flops = (
        2
        * k.shape[2]
        * prod(q.shape[:3])
        * (q.shape[3] + v.shape[3])
        * (2.5 if backward else 1)
        * (0.5 if causal else 1)
    )
    share, half = (
        (ATTENTION_BACKWARD, ATTENTION_BACKWARD_HALF) if backward else (ATTENTION, ATTENTION_HALF)
    )
    gpu = q._gpu  # type: ignore[attr-defined]
    format, peak = product_format(q.dtype, gpu), gpu.profile.peak_flops
    half *= peak[format] / peak["float16"]
    moved = sum(map(bytes_of, (q, k, v))) + outputs * q.itemsize
    return Work(
        moved * (2 if backward else 1),
        flops / (share * queries / (queries + half)),
        format,
        outputs,
    )
