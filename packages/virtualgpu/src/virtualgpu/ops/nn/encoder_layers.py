"""The single operators that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call in evaluation, instead of their parts.

What they are made of: native/transformers/cuda/attention.cu (`native_multi_head_attention_cuda`), native/transformers/transformer.cpp.
"""

from typing import Any

import torch
import torch.nn.functional as F

from virtualgpu import hardware
from virtualgpu.ops import operators
from virtualgpu.ops.blas import product_format
from virtualgpu.ops.call import Call, Work, device_time, handles
from virtualgpu.ops.nn import attention


@handles("_native_multi_head_attention")
def multi_head_attention(call: Call) -> Any:
    """Of one tensor, without a mask and weights: a product, a fused attention where there is one, a product. Else CUDA's older kernels."""
    query, key, value, embedding, heads, weight, bias, weight_out, bias_out = call.args[:9]
    call.common_gpu()
    alone = (
        query is key is value
        and not query.is_nested
        and query.dim() == 3
        and call.argument("mask") is None
    )
    if not alone or call.argument("need_weights") or embedding // heads % 8:
        return operators.compute(call)
    apart = query.view(query.shape[0], -1, heads, embedding // heads).transpose(1, 2)
    if attention.backend(apart, apart, apart, None, 0.0, False, False) == "math":
        return operators.compute(call)
    with hardware.machine().host_operators:
        q, k, v = (
            x.unflatten(-1, (heads, -1)).transpose(1, 2)
            for x in F.linear(query, weight, bias).chunk(3, -1)
        )
        mixed = attention.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(query.shape)
        return F.linear(mixed, weight_out, bias_out), None


@device_time("_native_multi_head_attention")
def multi_head_attention_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Four products of each position with weights, and two of all positions with each other."""
    query, key = call.args[:2]
    if query.is_nested:
        return Work(moved)
    width = call.argument("embed_dim")
    flops = query.numel() * (8 * width + 4 * key.numel() // (key.shape[0] * width))
    return Work(moved, flops, product_format(query.dtype, call.gpu), query.numel())


@handles("_transformer_encoder_layer_fwd")
def encoder_layer(call: Call) -> Any:
    """The same function of C++ for CPU and CUDA: it calls the layer's parts one by one."""
    if call.args[0].is_nested:
        return operators.compute(call)
    with hardware.machine().host_operators:
        return call.func._op_dk(torch._C.DispatchKey.CPU, *call.args, **call.kwargs)
