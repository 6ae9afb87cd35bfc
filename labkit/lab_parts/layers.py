"""What each layer of a network asks of a GPU's memory in a training step, by formula: weights, what stays, what is in flight.

A forward keeps what its backward will read. *In flight* is what lives for a moment: results on their way to the next layer, gradients
on their way back, workspaces of the libraries. All sizes in bytes but for `weights` and `buffers`, in elements.
"""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from labkit.lab_parts.networks import GPT, MLP, Network, ResNet, segment_size
from virtualgpu.workspaces import REDUCTION_THREADS, convolution_bytes, reduction_bytes

FULL, HALF, INDEX = 4, 2, 8  # bytes of a float32, of a float16 or bfloat16, of an int64


class Mode(NamedTuple):
    """How layers compute: `mixed` is autocast, to "float16" or "bfloat16", else ""; of the GPU its multiprocessors and their threads."""

    mixed: str
    multiprocessors: int
    threads: int

    @property
    def size(self) -> int:
        """Bytes of a number that a matrix product makes."""
        return HALF if self.mixed else FULL


class LayerMemory(NamedTuple):
    """One layer, for one batch.

    Attributes:
        reads: bytes of its input that its backward reads; none where the input is the batch.
        kept: what it leaves for the backward beside its input: its output, if it reads that (`keeps_output`), copies, statistics.
        forward: what is in flight at the highest moment of its forward, beside what stays.
        backward: the same of its backward, the gradients of its own weights included.
        output: bytes that it hands on.
        weights, buffers: elements of each parameter, and of each tensor that is stored with them but not trained.
        segment: the number of the checkpoint that it belongs to; -1 for none.
    """

    name: str
    reads: int
    kept: int
    forward: int
    backward: int
    output: int
    keeps_output: bool = False
    weights: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    segment: int = -1


@singledispatch
def layers(network: Network, rows: int, mode: Mode) -> list[LayerMemory]:
    """The layers of a network for a batch of so many rows, in order, the loss at the end."""
    raise TypeError(f"there is no formula for {type(network).__name__}")


def linear(
    name: str,
    rows: int,
    before: int,
    after: int,
    mode: Mode,
    *,
    bias: bool = True,
    shared: bool = False,
    first: bool = False,
    beside: int = 0,
) -> LayerMemory:
    """A linear layer. `shared` says that the layer before reads its input too, `first` that the input is the batch, which gets no gradient;
    `beside` is in flight meanwhile, on the way back.

    Autocast makes copies of the weights in half precision, which the backward reads; and gradients in half before those in float32.
    Backward: the gradients of output, input and weight at once. The gradient of the bias is a sum over the rows, whose parts meet in a
    staging buffer; the layer has let go of its input and copies by then.
    """
    x, y, weight = mode.size * rows * before, mode.size * rows * after, mode.size * before * after
    copies = HALF * (before * after + bias * after) if mode.mixed else 0
    batch = x if first and mode.mixed else 0  # a copy of it in half precision
    gradients = (0 if first else x) + weight
    summed = y + gradients + _staging(rows, after, mode) - copies - (batch if first else 0 if shared else x) if bias else 0
    cast = gradients + FULL * before * after if mode.mixed else 0
    weights = (before * after, after) if bias else (before * after,)
    return LayerMemory(name, 0 if first else x, copies + batch, y, beside + max(y + gradients, summed, cast), y, weights=weights)


def _staging(rows: int, columns: int, mode: Mode) -> int:
    """Where a sum over rows is cut among blocks of threads, they put their parts there: large if rows are many and columns few."""
    shape, strides, reduced, aligned = (rows, columns), (columns, 1), (0,), 0
    return sum(reduction_bytes(shape, strides, reduced, aligned, FULL, REDUCTION_THREADS, mode.multiprocessors, mode.threads))


def loss(rows: int, classes: int, mode: Mode) -> LayerMemory:
    """Cross-entropy: the softmax keeps its logarithms, in the precision of the outputs; the loss reads them in float32.

    Backward: the gradient of the logarithms, and that of the outputs beside it; under autocast the loss has let go by then.
    """
    numbers = rows * classes
    kept = (HALF + FULL if mode.mixed else FULL) * numbers
    return LayerMemory("loss", 0, kept, mode.size * numbers, (FULL if mode.mixed else 2 * FULL) * numbers, 0)


# A network of linear layers


@layers.register
def _(network: MLP, rows: int, mode: Mode) -> list[LayerMemory]:
    """ReLU reads its own result, which is the next layer's input too."""
    hidden = mode.size * rows * network.width
    found = []
    for number in range(network.depth):
        segment = number // segment_size(network.depth)
        layer = linear(f"layer {number + 1}", rows, network.width, network.width, mode, shared=True, first=number == 0)
        relu = LayerMemory(f"ReLU {number + 1}", 0, hidden, hidden, 2 * hidden, hidden, keeps_output=True)
        found += [layer._replace(segment=segment), relu._replace(segment=segment)]
    return [*found, linear("output", rows, network.width, network.classes, mode, shared=True), loss(rows, network.classes, mode)]


# A transformer


@layers.register
def _(network: GPT, rows: int, mode: Mode) -> list[LayerMemory]:
    positions = rows * network.tokens
    stream = FULL * positions * network.width  # what the residual connections hand on, in float32 in both cases
    weights = network.vocabulary * network.width, network.tokens * network.width
    embedding = LayerMemory("embedding", 0, 0, 2 * stream, stream + FULL * sum(weights), stream, weights=weights)
    blocks = [layer for number in range(network.layers) for layer in _block(network, rows, mode, number)]
    head = linear("head", positions, network.width, network.vocabulary, mode, bias=False)
    return [embedding, *blocks, _norm("norm", positions, network.width, mode), head, loss(positions, network.vocabulary, mode)]


def _block(network: GPT, rows: int, mode: Mode, number: int) -> Iterator[LayerMemory]:
    """The layers of a block. Each half of it ends in a sum with its input; on the way back, the sum's gradient waits beside the half."""
    positions, width = rows * network.tokens, network.width
    stream, hidden = FULL * positions * width, mode.size * positions * width
    cast = hidden if mode.mixed else 0  # of the sum's gradient, as it enters the half
    name = f"block {number + 1}: "

    def dense(part: str, before: int, after: int, shared: bool = False) -> LayerMemory:
        return linear(name + part, positions, before, after, mode, shared=shared, beside=stream)._replace(segment=number)

    def last(part: str, before: int, shared: bool = False) -> LayerMemory:
        """Its gradient is that of the sum, which has been counted: it comes in as it is, or as a copy in half precision."""
        layer = dense(part, before, width, shared)
        return layer._replace(forward=hidden + stream, backward=layer.backward - hidden + cast, output=stream)

    yield _norm(name + "first norm", positions, width, mode, stream, number)
    yield dense("query, key, value", width, 3 * width)
    yield _attention(name, network, rows, mode, number)
    yield last("attention's output", width, shared=True)
    yield _norm(name + "second norm", positions, width, mode, stream, number)
    yield dense("up", width, 4 * width)
    yield LayerMemory(name + "GELU", 4 * hidden, 0, 4 * hidden, stream + 8 * hidden, 4 * hidden, segment=number)
    yield last("down", 4 * width)


def _norm(name: str, positions: int, width: int, mode: Mode, beside: int = 0, segment: int = -1) -> LayerMemory:
    """LayerNorm in float32 keeps mean and deviation of each position."""
    stream = FULL * positions * width
    return LayerMemory(name, stream, 2 * FULL * positions, stream, 2 * stream + beside, stream, weights=(width, width), segment=segment)


def _attention(name: str, network: GPT, rows: int, mode: Mode, number: int) -> LayerMemory:
    """Fused attention keeps its result and one number for each head and position, never the weights of all pairs.

    Backward: three gradients, beside the result's and a buffer in float32; then beside their copy in one.
    """
    positions = rows * network.tokens
    stream, hidden = FULL * positions * network.width, mode.size * positions * network.width
    kept = hidden + FULL * positions * network.heads
    backward = stream + max(4 * hidden + stream, 6 * hidden)
    return LayerMemory(name + "attention", 3 * hidden, kept, 0, backward, hidden, keeps_output=True, segment=number)


# A convolutional network


@layers.register
def _(network: ResNet, rows: int, mode: Mode) -> list[LayerMemory]:
    side = -(-network.side // 2)
    channels, last = network.width, 8 * network.width
    start, norm = _convolution("start: ", rows, (3, network.side), (channels, side), 7, 2, mode)
    pictures = rows * 3 * network.side**2
    start = start._replace(reads=0, kept=start.kept + (HALF * pictures if mode.mixed else 0), backward=start.backward - start.reads)
    half = -(-side // 2)
    pooled = rows * channels * half**2
    pool = LayerMemory("pool", 0, INDEX * pooled, mode.size * pooled, mode.size * (pooled + rows * channels * side**2), mode.size * pooled)
    found = [start, _with_relu(norm), pool]
    side = half
    for number, (before, after, stride) in enumerate(network.residuals()):
        found += _residual(f"block {number + 1}: ", rows, (before, side), (after, -(-side // stride)), stride, mode, number)
        side = -(-side // stride)
    means = mode.size * rows * last
    mean = LayerMemory("mean", 0, 0, means, means * (1 + side**2), means)
    return [*found, mean, linear("output", rows, last, network.classes, mode), loss(rows, network.classes, mode)]


Map = tuple[int, int]  # channels, and pixels along each side


def _residual(name: str, rows: int, before: Map, after: Map, stride: int, mode: Mode, number: int) -> Iterator[LayerMemory]:
    """Two convolutions, the one beside them, if any, and the sum, which ReLU overwrites and reads.

    On the way back the gradient of the sum waits until the path has its own; where there is a convolution beside, its input's does.
    """
    x, y = (mode.size * rows * channels * side**2 for channels, side in (before, after))
    resized = before != after
    first, norm1 = _convolution(name + "first ", rows, before, after, 3, stride, mode, number)
    second, norm2 = _convolution(name + "second ", rows, after, after, 3, 1, mode, number)
    waiting = x if resized else y
    for layer in (first, _with_relu(norm1), second, norm2):
        yield layer._replace(backward=layer.backward + waiting)
    if resized:
        for layer in _convolution(name + "beside ", rows, before, after, 1, stride, mode, number):
            yield layer._replace(reads=layer.reads if layer.weights[1:] else 0, forward=layer.forward + y, backward=layer.backward + y)
    yield LayerMemory(name + "sum", 0, y, y, 2 * y, y, keeps_output=True, segment=number)


def _convolution(
    name: str, rows: int, before: Map, after: Map, kernel: int, stride: int, mode: Mode, segment: int = -1
) -> tuple[LayerMemory, LayerMemory]:
    """A convolution, and BatchNorm, which keeps mean and deviation of each channel.

    cuDNN takes a workspace for the output, for the input's gradient and for the weight's: mostly copies of input, output and weight in
    the order that its kernels want. The table and the rule are those of virtual GPUs (`virtualgpu.ops.nn.convolution_workspaces`).
    """
    (into, side), (channels, smaller) = before, after
    dtype = getattr(torch, mode.mixed or "float32")
    inputs = torch.empty(rows, into, side, side, dtype=dtype, device="meta")
    weight = torch.empty(channels, into, kernel, kernel, dtype=dtype, device="meta")
    result = torch.empty(rows, channels, smaller, smaller, dtype=dtype, device="meta")
    x, y, weights = inputs.nbytes, result.nbytes, weight.numel()
    copies = HALF * weights if mode.mixed else 0
    output, input_gradient, weight_gradient = convolution_bytes(inputs, result, weight, (stride,), (kernel // 2,), (1,), False, 1)
    backward = x + y + max(input_gradient, weight.nbytes + weight_gradient)
    convolution = LayerMemory(name + "convolution", x, copies, y + output, backward, y, weights=(weights,), segment=segment)
    statistics = 2 * FULL * channels
    sizes: dict[str, Any] = {"weights": (channels, channels), "buffers": (channels, channels, 1)}
    return convolution, LayerMemory(name + "norm", y, statistics, y, 2 * y, y, **sizes, segment=segment)


def _with_relu(norm: LayerMemory) -> LayerMemory:
    """ReLU overwrites the norm's result, and reads it."""
    return norm._replace(kept=norm.kept + norm.output, forward=0, keeps_output=True)


def block_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes of float32 tensors of so many elements: the allocator hands out multiples of 512 bytes."""
    return sum(-(-size * FULL // 512) * 512 for size in sizes)
