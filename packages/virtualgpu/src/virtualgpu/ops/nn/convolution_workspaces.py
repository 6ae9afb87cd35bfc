"""Bytes of the workspaces that cuDNN uses for a convolution's output and for its two gradients.

cuDNN chooses an algorithm by heuristics that are not published. We have two recordings of its
workspaces. The table holds 111,000 convolutions of common layers on an H200, as straight lines over
the batch (benchmarks/fidelity/cudnn.py). The rule is for all others. It was learned from 350,000
convolutions on an H100 (benchmarks/fidelity/convolution_sweep.py). For each of the three results, a
decision tree chooses one of some hundred formulas. benchmarks/fidelity/convolution_rule.py builds
the trees and says how far off they are for convolutions that they were not built from.

Most formulas are copies of the tensors with channels last, whose channels are padded to whole
vectors. Some add memory for partial results: several partial weights, or the tiles that two or more
multiprocessors compute together.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)  # the results that have a workspace
DTYPES = ("float32", "bfloat16", "float16")
MULTIPROCESSORS = 132  # of the H100 that was measured
STEP = 32  # terms of a sum that a tile adds at a time
NO_SLOPE = -1  # the slope of a line in the table that is a single point
LEAF = -1  # the question of a tree's leaf


class Convolution(NamedTuple):
    """A convolution as cuDNN sees it. A field may be a NumPy array, for many convolutions at once.

    `kernel`, `stride`, `padding`, `dilation`, `extent` and `result` are triples, filled up with
    ones (zeros for the padding). `extent` is the size of the input and `result` that of the output.
    """

    dtype: Any  # index in DTYPES
    channels_last: Any
    transposed: Any
    into: Any  # input channels
    out: Any  # output channels
    groups: Any
    batch: Any
    dims: Any
    kernel: Sequence[Any]
    stride: Sequence[Any]
    padding: Sequence[Any]
    dilation: Sequence[Any]
    extent: Sequence[Any]
    result: Sequence[Any]

    @property
    def item(self) -> Any:
        """Bytes of an element."""
        return 4 - 2 * (self.dtype > 0)

    @property
    def vector(self) -> Any:
        """Channels in 16 bytes."""
        return 16 // self.item

    def channels(self) -> tuple[Any, Any]:
        """Return (input channels, output channels) of one group."""
        return self.into // self.groups, self.out // self.groups

    def copies(self, multiple: Any) -> tuple[Any, Any, Any]:
        """Return the bytes of input, output and weight with channels padded to this multiple."""
        into, out = (_ceiling(channels, multiple) * multiple for channels in self.channels())
        pixels, positions = self.batch * prod(self.extent), self.batch * prod(self.result)
        weight = into * out * self.groups * prod(self.kernel)
        return (
            pixels * into * self.groups * self.item,
            positions * out * self.groups * self.item,
            weight * self.item,
        )

    def product(self, result: int) -> tuple[Any, Any, Any]:
        """Return (rows, columns, terms) of the matrix product that computes this result.

        `result` is the number of the output, of the input's gradient or of the weight's gradient.
        """
        into, out = self.channels()
        pixels, positions = self.batch * prod(self.extent), self.batch * prod(self.result)
        taps = prod(self.kernel)
        if result == OUTPUT:
            return positions, out, into * taps
        if result == INPUT_GRADIENT:
            return pixels, into, out * taps
        return out, into * taps, positions


# Arithmetic of numbers and of NumPy arrays alike.


def _ceiling(number: Any, divisor: Any) -> Any:
    """Return number / divisor, rounded up to an integer."""
    return -(-number // divisor)


def _smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers."""
    return a + (b - a) * (b < a)


def _larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers."""
    return a + (b - a) * (b > a)


def _largest(numbers: Sequence[Any]) -> Any:
    """Return the largest of three numbers."""
    first, second, third = numbers
    return _larger(_larger(first, second), third)


def features(convolution: Convolution, result: int) -> dict[str, Any]:
    """Return the numbers about which a decision tree may ask, by name.

    `result` is the result whose workspace the tree finds.
    """
    c = convolution
    into, out = c.channels()
    rows, columns, terms = c.product(result)
    x, y, w = c.copies(1)
    taps, pixels, positions = prod(c.kernel), prod(c.extent), prod(c.result)
    centered = True
    for size, padding, dilation in zip(c.kernel, c.padding, c.dilation, strict=True):
        centered = centered & (2 * padding == dilation * (size - 1))
    numbers = {
        "dtype": c.dtype,
        "channels last": c.channels_last,
        "transposed": c.transposed,
        "dimensions": c.dims,
        "depthwise": (c.groups == c.into) & (c.into > 1),
        "groups": c.groups,
        "input channels": c.into,
        "output channels": c.out,
        "input channels of a group": into,
        "output channels of a group": out,
        "batch": c.batch,
        "pixels": pixels,
        "positions": positions,
        "taps": taps,
        "kernel": _largest(c.kernel),
        "width of the kernel": c.kernel[1],
        "stride": _largest(c.stride),
        "dilation": _largest(c.dilation),
        "padding": _largest(c.padding),
        "centered": centered,
        "rows": rows,
        "columns": columns,
        "terms": terms,
        "input bytes": x,
        "output bytes": y,
        "weight bytes": w,
        "all bytes": x + y + w,
        "all pixels": c.batch * pixels,
        "all positions": c.batch * positions,
        "height": c.extent[0],
        "width": c.extent[1],
        "height of the output": c.result[0],
        "input channels per output channel": into / out,
        "products": c.batch * positions * into * out * taps * c.groups,
        "terms per element": terms / (rows * columns),
        "tiles of 64": _ceiling(rows, 64) * _ceiling(columns, 64),
        "tiles of 128": _ceiling(rows, 128) * _ceiling(columns, 128),
        "tiles of the last wave": _ceiling(rows, 128) * _ceiling(columns, 128) % MULTIPROCESSORS,
        "tiles of 128 by 256": _ceiling(rows, 128) * _ceiling(columns, 256),
        "rows of the last tile": rows % 128,
        "columns of the last tile": columns % 128,
    }
    for multiple in (2, 4, 8, 32, 64):
        numbers[f"input channels by {multiple}"] = into % multiple == 0
        numbers[f"output channels by {multiple}"] = out % multiple == 0
    return numbers


class Formula(NamedTuple):
    """Formula for the bytes of a workspace, which is the sum of these parts.

    copies: the tensors that are copied, where X, Y and W are input, output and weight
    multiple: the multiple to which the copies' channels are padded, or 0 for a vector of 16 bytes
    wide: whether the copies are in float32
    by_group: whether one group is copied at a time
    fixed: bytes that do not depend on the convolution
    weights: the number of partial weights in float32
    outputs: the number of partial results in float32
    each_sample: whether each sample has a partial weight in float32
    tile: height, width and multiprocessors of a tile, if the last wave of tiles is divided
    """

    copies: str = ""
    multiple: int = 1
    wide: bool = False
    by_group: bool = False
    fixed: int = 0
    weights: int = 0
    outputs: int = 0
    each_sample: bool = False
    tile: tuple[int, int, int] | None = None

    def bytes(self, convolution: Convolution, result: int) -> Any:
        """Return the bytes that this formula gives for the workspace of a convolution's result."""
        multiple = convolution.vector if self.multiple == 0 else self.multiple
        sizes = dict(zip("XYW", convolution.copies(multiple), strict=True))
        in_float32 = 4 // convolution.item
        total = sum((sizes[name] for name in self.copies), 0 * convolution.batch)
        if self.wide:
            total = total * in_float32
        if self.by_group:
            total = total // convolution.groups
        total = total + self.fixed
        if self.weights:
            total = total + self.weights * sizes["W"] * in_float32
        if self.outputs:
            written = "YXW"[result]
            total = total + self.outputs * sizes[written] * in_float32
        if self.each_sample:
            total = total + convolution.batch * sizes["W"] * in_float32
        if self.tile is not None:
            total = total + _shared_tiles(convolution.product(result), *self.tile)
        return total


def _shared_tiles(product: tuple[Any, Any, Any], height: int, width: int, side: int) -> Any:
    """Return the bytes of the buffers in which multiprocessors exchange partial tiles.

    The last wave has fewer tiles than multiprocessors. The sum of each tile is therefore divided
    among several multiprocessors, and every part is written in float32. `side` is the number of
    multiprocessors that compute a tile together.
    """
    rows, columns, terms = product
    tiles = _ceiling(rows, height * side) * _ceiling(columns, width)
    most = MULTIPROCESSORS // side
    last = tiles % most
    parts = most // (last + (last == 0))
    parts = _smaller(parts, _larger(terms // STEP, 1 + 0 * terms))
    return (last > 0) * last * parts * side * height * width * 4


class Tree(NamedTuple):
    """A decision tree in preorder, as three lists with an entry per node.

    question: the index of the feature that decides, or LEAF
    threshold: the largest value for which the left branch is taken, which follows its node
    right: the index of the right branch's node. For a leaf, the index of the formula.
    """

    question: list[int]
    threshold: list[float]
    right: list[int]

    def formula(self, numbers: Sequence[Any]) -> int:
        """Return the index of the formula for these features (see `features`)."""
        node = 0
        while self.question[node] != LEAF:
            if numbers[self.question[node]] <= self.threshold[node]:
                node += 1
            else:
                node = self.right[node]
        return self.right[node]


class Rule(NamedTuple):
    """The learned rule: a tree and a list of formulas for each of the three results."""

    trees: tuple[Tree, ...]
    formulas: tuple[tuple[Formula, ...], ...]

    def bytes(self, convolution: Convolution, result: int) -> int:
        """Return the bytes of the workspace for one of the three results of a convolution."""
        numbers = list(features(convolution, result).values())
        formula = self.formulas[result][self.trees[result].formula(numbers)]
        return int(formula.bytes(convolution, result))


def _profile(name: str) -> Any:
    """Return the contents of the JSON file `name` in the folder of profiles."""
    return json.loads((files("virtualgpu.profiles") / name).read_text())


@lru_cache(maxsize=1)
def rule() -> Rule:
    """Return the learned rule from its file."""
    found = _profile("cudnn_convolution_rule.json")["results"]
    trees = tuple(Tree(*entry["tree"]) for entry in found)
    return Rule(trees, tuple(tuple(map(_formula, entry["formulas"])) for entry in found))


def _formula(fields: dict[str, Any]) -> Formula:
    """Return the formula that these fields of a JSON file describe."""
    if "tile" in fields:
        fields = fields | {"tile": tuple(fields["tile"])}
    return Formula(**fields)


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, list[list[int]]]]:
    """Return the table of recorded workspaces: lines over the batch, by layer and by input size."""
    lines: dict[str, dict[str, list[list[int]]]] = _profile("cudnn_convolution_h200.json")["lines"]
    return lines


def on_line(lines: list[int], batch: int) -> int:
    """Return the bytes of a workspace for a batch size, from recorded lines over the batch.

    Each line is three numbers: its first batch, the bytes there, and the bytes per sample.
    """
    starts = lines[::3]
    at = max((i for i, start in enumerate(starts) if start <= batch), default=0)
    start, size, slope = lines[3 * at : 3 * at + 3]
    if slope != NO_SLOPE:
        return max(0, size + slope * (batch - start))
    if start == batch or not size:
        return size
    if at + 1 < len(starts) and batch > start:  # between two points
        following, larger = lines[3 * at + 3 : 3 * at + 5]
        return size + (larger - size) * (batch - start) // (following - start)
    return size * batch // start


def layer_key(convolution: Convolution) -> str:
    """Return the key of a convolution's layer in the table of recorded workspaces."""
    c = convolution
    order = "first"
    if c.channels_last:
        order = "last"
    kind = "F"
    if c.transposed:
        kind = "T"
    settings = (c.kernel, c.stride, c.padding, c.dilation)
    joined = " ".join(",".join(map(str, numbers[: c.dims])) for numbers in settings)
    return f"{DTYPES[c.dtype]} {order} {kind} {c.into} {c.out} {joined} {c.groups}"


@lru_cache(maxsize=4096)
def workspaces(convolution: Convolution) -> tuple[int, int, int]:
    """Return the bytes of cuDNN's three workspaces for a convolution.

    They are for the output, the input's gradient and the weight's gradient. They come from the
    table if the layer was recorded at this size, and else from the rule.
    """
    size = ",".join(map(str, convolution.extent[: convolution.dims]))
    lines = table().get(layer_key(convolution), {}).get(size)
    if lines is not None:
        found = [on_line(line, convolution.batch) for line in lines]
    else:
        results = OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT
        found = [rule().bytes(convolution, result) for result in results]
    output, input_gradient, weight_gradient = found
    return output, input_gradient, weight_gradient
