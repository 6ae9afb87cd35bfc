"""Random numbers: in-place distributions, dropout, and drawing with and without replacement.

Sources: PyTorch's native/cuda/DistributionTemplates.h, MultinomialKernel.cu and
native/Distributions.cpp, Randperm.cu, Dropout.cu. Compared with an H200 (PyTorch 2.11, CUDA 13.0)
for 1 to 10,000,000 elements.
"""

from math import ceil, log, log2
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.errors import not_implemented, scalar_name
from virtualgpu.generators import chosen
from virtualgpu.hardware import Gpu
from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import (
    Call,
    Work,
    asserts,
    bytes_of,
    composes,
    device_time,
    handles,
    operator,
    overwrites,
    shapes_by,
    temporaries,
)
from virtualgpu.ops.reductions import of_all
from virtualgpu.ops.sequence import OUT, Plan, perform, play
from virtualgpu.ops.sorting import topk_plan
from virtualgpu.ops.without_values import infer, loses_values
from virtualgpu.ops.work import RANDOM, work
from virtualgpu.tensor import VirtualTensor, wrap_all

aten = torch.ops.aten
# All of these overwrite their first argument. `bernoulli_` reads the probabilities if they are a
# tensor, but not the old contents.
IN_PLACE = (
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
)

overwrites(*IN_PLACE)
asserts(
    "probability tensor contains either `inf`, `nan` or element < 0",
    "multinomial",
    cpu="^probability tensor|^invalid multinomial",
)
# ATen/native/cuda/Distributions.cu. Of a number of elements that is no multiple of four, the last
# ones are p3, p2 and p1.
_PROBABILITY = "^Expected p_in >= 0 && p_in <= 1"
asserts("0 <= p4 && p4 <= 1", "bernoulli", "bernoulli_", cpu=_PROBABILITY)
_RATE = 'lambda >= 0 && "invalid Poisson rate, expected rate to be non-negative"'
asserts(_RATE, "poisson", cpu="^invalid Poisson rate")


@device_time(*IN_PLACE)
def in_place(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a kernel that fills a tensor with random numbers.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x = call.args[0]
    return Work(moved - bytes_of(x), clocks=RANDOM * x.numel())


# Dropout


@composes("dropout")
def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return dropout of `x` with the probability `p`. CUDA needs one kernel.

    The kernel also writes a mask of one byte per element. Source: aten/src/ATen/native/Dropout.cpp.
    """
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or not x.numel():
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    return torch.native_dropout(x, p, True)[0]


@handles("native_dropout")
def native_dropout(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator `native_dropout`. The mask is allocated before the output.

    Source: aten/src/ATen/native/cuda/Dropout.cu.
    """
    gpu = call.common_gpu()
    x, p, train = call.args
    if train is not False and p != 1:
        _require_real("fused_dropout", x.dtype)
    if loses_values(call):
        mask = infer(Call(operator(aten.ne.Scalar), (x, 0), {}))
        output = infer(Call(operator(aten.neg.default), (x,), {}))
    else:
        with _DisableTorchDispatch():
            if train is False or p == 1:
                output, mask = call.func(x, p, train)
            else:  # with the GPU's own generator, because the operator accepts none
                generator = gpu.generator.next_draws(x.numel())
                mask = torch.empty_like(x, dtype=torch.bool)
                mask.bernoulli_(1 - p, generator=generator)
                output = x.mul(mask).mul_(1 / (1 - p))
        mask, output = wrap_all((mask, output), gpu)
    gpu.launch(*work(call, (output, mask)), name="native_dropout")
    return output, mask


def _require_real(kernel: str, dtype: torch.dtype) -> None:
    """Raise CUDA's error if the dtype is not a floating-point dtype that the kernel supports.

    `kernel` is the name in the error. The CPU would accept integers and complex numbers.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise not_implemented(kernel, dtype)


@handles("native_dropout_backward")
def native_dropout_backward(call: Call) -> Any:
    """Compute the gradient of dropout (aten/src/ATen/native/cuda/Dropout.cu)."""
    gradient, mask = call.args[:2]
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"Mask should be Bool Scalar Type{scalar_name(mask.dtype)}")
    _require_real("masked_scale", gradient.dtype)
    return operators.compute_or_into_given(call)


# Drawing


@handles("multinomial")
def multinomial(call: Call) -> Any:
    """Run `multinomial`: draw indices by their probabilities.

    With replacement they are drawn from cumulative sums. Without replacement the largest values of
    p / exponential are taken, after a check for invalid probabilities.
    """
    if call.op.outs:
        return operators.draw(call)
    gpu = call.common_gpu()
    x, draws, replacement = call.args[0], call.args[1], call.argument("replacement")
    generator = chosen(call.argument("generator"), gpu).next_draws(x.numel())
    rows, n = 1, x.shape[0]
    if x.dim() > 1:
        rows, n = x.shape
    size = x.numel() * x.itemsize
    if replacement and draws > 1:
        scan = cub.scan(n, x.itemsize) if rows == 1 else 0
        plan: Plan = (OUT, size, size, size, scan, -scan, -size, -size, -size)
    else:
        plan = _plan_without_replacement(gpu, x, rows, n, draws)
    return perform(call.with_arguments(x, draws, replacement, generator=generator), plan)


def _plan_without_replacement(gpu: Gpu, x: torch.Tensor, rows: int, n: int, draws: int) -> Plan:
    """Return the memory plan of `multinomial` without replacement.

    `x` holds `rows` rows of `n` probabilities. `draws` indices are drawn from each row.
    """
    item, size = x.itemsize, x.numel() * x.itemsize
    # The host reads whether max < inf and min >= 0, then whether any row's sum is zero.
    largest, smallest = of_all("max", x), of_all("min", x)
    check: tuple[int, ...] = (item, *largest, 1, item, *smallest, 1, 1, -1, -item, -1, -item)
    sums: tuple[int, ...] = (rows * item, rows, 1, -rows, -rows * item)
    if x.dim() == 1:
        sums = (item, 1, -item)
    pick: tuple[int, ...] = ()
    if draws != 1:
        nbytes = rows * draws * item
        pick = (nbytes, *topk_plan(rows, n, item, gpu.profile.multiprocessors), -nbytes)
    return (OUT, *check, *sums, 1, -1, size, *pick, -size, -1, -1)


@handles("normal")
def normal(call: Call) -> Any:
    """Run the operator `normal`. The host checks the deviations before and after the draw.

    Source: aten/src/ATen/native/DistributionTemplates.h.
    """
    mean = call.args[0] if call.args else None
    deviation = call.args[1] if len(call.args) > 1 else None

    def look() -> None:
        if type(deviation) is VirtualTensor and deviation.numel() and not call.op.outs:
            item = deviation.itemsize
            play(call.common_gpu(), (item, *of_all("min", deviation), 1, -1, -item))
            call.gpu.read(1)

    look()
    result = operators.draw(call)
    look()
    if type(mean) is VirtualTensor and not call.op.outs and type(deviation) is not VirtualTensor:
        call.gpu.scratch((bytes_of(mean),))
    return result


@handles("bernoulli", "bernoulli_")
def draw_bernoulli(call: Call) -> Any:
    """Run `bernoulli` or `bernoulli_`, which draw zeros and ones.

    Raises RuntimeError for integers as probabilities. Source:
    aten/src/ATen/native/cuda/Bernoulli.cu.
    """
    chances = None
    if "p" not in call.op.arguments:
        chances = call.args[0]
    elif isinstance(call.argument("p"), torch.Tensor):
        chances = call.argument("p")
    if chances is not None and not chances.dtype.is_floating_point:
        raise RuntimeError(
            f"expected probabilities tensor to have floating type, got {scalar_name(chances.dtype)}"
        )
    return operators.draw(call)


@temporaries("bernoulli")
def bernoulli(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the float32 copy that CUDA makes of half-precision probabilities."""
    x = call.args[0]
    if x.itemsize == 2 and len(call.args) == 1:
        return (4 * x.numel(),)
    return ()


@handles("randperm")
def randperm(call: Call) -> Any:
    """Run `randperm`: make a random permutation by sorting numbers with random keys.

    The keys have just enough bits to make equal keys rare (`randperm_out_cuda`).
    """
    if "generator" in call.op.arguments:
        result = operators.draw(call)
    else:
        result = operators.into_given(call)
    n, item = result.numel(), result.itemsize
    if n:
        bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
        key = 4 if bits <= 32 else 8
        sort = cub.radix_sort(n, key, item, bits)
        keys, numbers = n * key, n * item
        steps = (item, -item, numbers, keys, keys, sort, -sort, -keys, -keys, -numbers)
        play(result._gpu, steps)
    return result


@shapes_by("_sample_dirichlet", "_dirichlet_grad", "_standard_gamma_grad")
def same_shape(x: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
    """Return a meta tensor like the first argument, for operators without a meta kernel."""
    return torch.empty_like(x)


@shapes_by("binomial")
def binomial_shape(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    """Return a meta tensor with the shape of `binomial`'s result.

    Both arguments are broadcast to this shape.
    """
    size = torch.broadcast_shapes(count.shape, prob.shape)
    return torch.empty(size, dtype=count.dtype, device=count.device)
