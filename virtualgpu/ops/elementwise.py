"""What pointwise operators, softmax, dropout and losses ask for where CUDA computes them otherwise than the CPU.

Most pointwise operators ask for their output alone. The others follow PyTorch's sources, named at each. Held against recordings
from an H200 (torch 2.11, CUDA 13.0).
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.hardware import Gpu
from virtualgpu.ops import kernels, operators, registry, without_values
from virtualgpu.ops.reductions import contiguous_staging, staging, sum_bytes
from virtualgpu.ops.registry import composes, handles, temporaries
from virtualgpu.ops.sequence import OUT, perform
from virtualgpu.tensor import wrap_all

aten = torch.ops.aten
NONE, MEAN = 0, 1  # reductions of a loss (aten/src/ATen/core/Reduction.h)


def evaluate(func: Any, args: tuple, kwargs: dict, values: Callable[[], Any]) -> Any:
    """The operator's result by another way of computing its values: `values` gives plain tensors. Counted as one kernel."""
    gpu: Gpu
    gpu, moved = operators.common_gpu(args, kwargs)
    if without_values.loses_values(func, args, kwargs, gpu):
        result = without_values.infer(func, args, kwargs, gpu)
    else:
        with _DisableTorchDispatch():
            result = values()
        result = wrap_all(result, gpu)
    gpu.launch(*kernels.work(func, args, kwargs, result, moved), name=func._schema.name.removeprefix("aten::"))
    return result


# Pointwise


@temporaries("abs")
def of_complex(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """Of complex numbers they are computed as complex numbers first (aten/src/ATen/native/UnaryOps.cpp)."""
    x = args[0]
    return (x.numel() * x.itemsize,) if x.dtype.is_complex and not result.dtype.is_complex else ()


@handles("angle")
def angle(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Of complex numbers: as complex numbers, before there is room for the result (aten/src/ATen/native/UnaryOps.cpp)."""
    x = args[0]
    if "out" in kwargs or not x.dtype.is_complex:
        return operators.into_given(func, args, kwargs) if "out" in kwargs else operators.compute(func, args, kwargs)
    size = x.numel() * x.itemsize
    return perform(func, args, kwargs, lambda outputs: (size, OUT, -size))


@temporaries("pow")
def power_of_a_number(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """The number becomes a tensor on the GPU, but for 1, whose powers are filled in (aten/src/ATen/native/Pow.cpp)."""
    if func is not aten.pow.Scalar or args[0] == 1:
        return ()
    return (_kind_of(args[0]).itemsize,)


def _kind_of(number: Any) -> torch.dtype:
    """The type of C++'s tensor of a Python number."""
    return {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(number), torch.complex128)


@handles("dist")
def dist(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """The norm of the difference (aten/src/ATen/native/Distance.cpp)."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    x, y, p = (*args, 2)[:3]
    return torch.linalg.vector_norm(x - y, p)


@handles("log_sigmoid_forward")
def log_sigmoid(func: Any, args: tuple, kwargs: dict) -> Any:
    """CUDA keeps no buffer for the backward (aten/src/ATen/native/Activation.cpp)."""
    x = args[0]
    if "output" in kwargs:
        return operators.into_given(func, args, kwargs)
    output = evaluate(aten.log_sigmoid.default, args, kwargs, lambda: func(x)[0])
    return output, x.new_empty(0)


@handles("log_sigmoid_backward")
def log_sigmoid_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    gradient, x = args[:2]
    return evaluate(aten.sigmoid_backward.default, (gradient, x), kwargs, lambda: func(gradient, x, torch.exp(-x.abs())))


def _choice(x: Any, other: Any, condition: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, other)
    device = condition.device
    x, other = (v.to(dtype) if isinstance(v, torch.Tensor) else torch.scalar_tensor(v, dtype=dtype, device=device) for v in (x, other))
    return torch.where(condition, x, other)


@composes("where.ScalarOther")
def where_scalar_other(condition: torch.Tensor, x: torch.Tensor, other: Any) -> torch.Tensor:
    """A number becomes a tensor on the GPU (aten/src/ATen/native/TensorCompare.cpp)."""
    return _choice(x, other, condition)


@composes("where.ScalarSelf")
def where_scalar_self(condition: torch.Tensor, x: Any, other: torch.Tensor) -> torch.Tensor:
    return _choice(x, other, condition)


@handles("allclose")
def allclose(func: Any, args: tuple, kwargs: dict) -> bool:
    """The operators of `isclose`, and whether all are (aten/src/ATen/native/TensorCompare.cpp)."""
    close = registry.made_of(aten.isclose.default, *args, **kwargs)
    return bool(close.all().item())


@handles("isfinite")
def isfinite(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Made of comparisons wherever it is called from."""
    return registry.made_of(func, *args, **kwargs)


@handles("count_nonzero")
def count_nonzero(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """The sum of a comparison with zero (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    return (x != 0).sum(dims)


# Softmax


def contiguous_copies(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Bytes of the copies that a kernel makes of those that do not lie contiguous."""
    return tuple(x.numel() * x.itemsize for x in tensors if not x.is_contiguous())


@temporaries("_softmax", "_log_softmax")
def softmax_input(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """The kernels read contiguous memory (aten/src/ATen/native/cuda/SoftMax.cu)."""
    return contiguous_copies(args[0])


@temporaries("_softmax_backward_data")
def softmax_backward(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """The product of gradient and output (aten/src/ATen/native/cuda/SoftMax.cu)."""
    return args[0].numel() * args[0].itemsize, *contiguous_copies(args[1])


@temporaries("_log_softmax_backward_data")
def log_softmax_backward(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    return contiguous_copies(*args[:2])


@handles("_softmax", "_log_softmax")
def softmax(func: Any, args: tuple, kwargs: dict) -> Any:
    """CUDA reads float16 and writes float32 in one kernel."""
    if "out" in kwargs or not args[2]:
        return operators.into_given(func, args, kwargs) if "out" in kwargs else operators.compute(func, args, kwargs)
    result = evaluate(func, args, kwargs, lambda: func(args[0].float(), args[1], False))
    result._gpu.scratch(contiguous_copies(args[0]))
    return result


@handles("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward_data(func: Any, args: tuple, kwargs: dict) -> Any:
    gradient, output, dim, dtype = args
    if kwargs or gradient.dtype is dtype:
        return operators.compute(func, args, kwargs) if not kwargs else operators.into_given(func, args, kwargs)
    result = evaluate(func, args, kwargs, lambda: func(gradient, output, dim, gradient.dtype).to(dtype))
    rule = log_softmax_backward if "log" in func._schema.name else softmax_backward
    result._gpu.scratch(rule(func, args, kwargs, result))
    return result


def _softmax_of(operator: Any) -> Callable[..., torch.Tensor]:
    def composed(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The choice of aten/src/ATen/native/SoftMax.cpp."""
        if x.dtype is torch.float16 and dtype is torch.float32:
            return operator(x, dim, True)
        return operator(x if dtype is None else x.to(dtype), dim, False)

    return composed


composes("softmax.int")(_softmax_of(aten._softmax.default))
composes("log_softmax.int")(_softmax_of(aten._log_softmax.default))


@handles("logsumexp")
def logsumexp(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """By the operators of aten/src/ATen/native/ReduceOps.cpp."""
    x, dims = args[:2]
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if "out" in kwargs or not x.numel() or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return operators.into_given(func, args, kwargs)
    if x.dtype.is_complex:
        return operators.compute(func, args, kwargs)
    largest = x.amax(dims, True)
    squeezed = largest if keepdim else largest.squeeze(tuple(dims) or tuple(range(x.dim())))
    sizes = squeezed.abs()
    infinite = sizes == inf
    squeezed.masked_fill_(infinite, 0)
    del infinite, sizes  # in this order
    return (x - largest).exp_().sum(dims, keepdim).log_().add_(squeezed)


# Dropout


@composes("dropout")
def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One kernel with a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or not x.numel():
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    return torch.native_dropout(x, p, True)[0]


@handles("native_dropout")
def native_dropout(func: Any, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask is allocated before the output (aten/src/ATen/native/cuda/Dropout.cu)."""
    mask, output = _swapped(func, args, kwargs)
    return output, mask


def _swapped(func: Any, args: tuple, kwargs: dict) -> Any:
    gpu, moved = operators.common_gpu(args, kwargs)
    if without_values.loses_values(func, args, kwargs, gpu):
        mask = without_values.infer(aten.ne.Scalar, (args[0], 0), {}, gpu)
        output = without_values.infer(aten.neg.default, args[:1], {}, gpu)
    else:
        x, p, train = args
        with _DisableTorchDispatch():
            if train is False or p == 1:
                output, mask = func(x, p, train)
            else:  # by the GPU's own generator: the operator itself takes none
                mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=gpu.generator.next_draws(x.numel()))
                output = x.mul(mask).mul_(1 / (1 - p))
        mask, output = wrap_all((mask, output), gpu)
    gpu.launch(*kernels.work(func, args, kwargs, (output, mask), moved), name="native_dropout")
    return mask, output


# Losses


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


@handles("huber_loss")
def huber_loss(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """The losses of all elements, then their reduction (aten/src/ATen/native/Loss.cpp)."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    x, y, reduction, delta = (*args, *(1, 1.0)[len(args) - 2 :])
    return _reduced(operators.compute(func, (x, y, NONE, delta), {}), reduction)


@handles("binary_cross_entropy_with_logits")
def cross_entropy_with_logits(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """By the operators of aten/src/ATen/native/Loss.cpp."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    x, y, weight, pos_weight, reduction = (*args, *(None, None, MEAN)[len(args) - 2 :])
    log_sigmoid = torch.nn.functional.logsigmoid(x)
    if pos_weight is not None:
        log_sigmoid.mul_((pos_weight - 1).mul(y).add_(1))
    loss = (1 - y).mul_(x).sub_(log_sigmoid)
    if weight is not None:
        loss.mul_(weight)
    return _reduced(loss, reduction)


@temporaries("binary_cross_entropy")
def cross_entropy(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """The losses of all elements fill the output, which then shrinks to their mean or sum (aten/src/ATen/native/cuda/Loss.cu)."""
    x = args[0]
    if (args[3] if len(args) > 3 else kwargs.get("reduction", MEAN)) == NONE:
        return ()
    return x.itemsize, *contiguous_staging(x._gpu, x.numel(), sum_bytes(x.dtype))


@temporaries("multi_margin_loss")
def multi_margin_loss(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """A loss a row, then their sum (aten/src/ATen/native/cuda/MultiMarginLoss.cu)."""
    x = args[0]
    reduction = args[5] if len(args) > 5 else kwargs.get("reduction", MEAN)
    if x.dim() < 2 or reduction == NONE:
        return ()
    return x.shape[0] * x.itemsize, *contiguous_staging(x._gpu, x.shape[0], sum_bytes(x.dtype))


@temporaries("renorm", "renorm_")
def renorm(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[int, ...]:
    """The norm of each slice (aten/src/ATen/native/Normalization.cpp)."""
    x, _, dim = args[:3]
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    accumulator = sum_bytes(x.dtype)
    norms = x.shape[dim] * accumulator
    return norms, *staging(x, others, accumulator)
