"""Fused operators of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in evaluation.

In evaluation these modules call one operator each instead of their parts. The parts follow
PyTorch's native/transformers/cuda/attention.cu (`native_multi_head_attention_cuda`) and
native/transformers/transformer.cpp.
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
    """Run `nn.MultiheadAttention` of one tensor with itself as its parts.

    These are a product, a fused attention and a product. With a mask, with weights as a result, or
    without a fused kernel for the sizes, CUDA uses older kernels, which run as one operator.
    """
    query, key, value, embedding, heads, weight, bias, weight_out, bias_out = call.args[:9]
    call.common_gpu()
    is_self_attention = query is key is value and not query.is_nested and query.dim() == 3
    if not is_self_attention or call.argument("mask") is not None:
        return operators.compute(call)
    if call.argument("need_weights") or embedding // heads % 8:
        return operators.compute(call)
    by_head = query.view(query.shape[0], -1, heads, embedding // heads).transpose(1, 2)
    if attention.backend(by_head, by_head, by_head, None, 0.0, False, False) == "math":
        return operators.compute(call)
    with hardware.machine().host_operators:
        projected = F.linear(query, weight, bias).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)
        mixed = attention.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(query.shape)
        return F.linear(mixed, weight_out, bias_out), None


@device_time("_native_multi_head_attention")
def multi_head_attention_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of four products with weights and of two products of all positions.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    query, key = call.args[:2]
    if query.is_nested:
        return Work(moved)
    width = call.argument("embed_dim")
    flops = query.numel() * (8 * width + 4 * key.numel() // (key.shape[0] * width))
    return Work(moved, flops, product_format(query.dtype, call.gpu), query.numel())


@handles("_transformer_encoder_layer_fwd")
def encoder_layer(call: Call) -> Any:
    """Run `nn.TransformerEncoderLayer` with PyTorch's C++ function for the CPU.

    CUDA uses the same function. It calls the layer's parts one by one.
    """
    if call.args[0].is_nested:
        return operators.compute(call)
    with hardware.machine().host_operators:
        return call.func._op_dk(torch._C.DispatchKey.CPU, *call.args, **call.kwargs)
