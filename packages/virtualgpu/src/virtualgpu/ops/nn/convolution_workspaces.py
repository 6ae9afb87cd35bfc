"""Bytes of the workspaces that cuDNN takes for a convolution: for its output and its two gradients.

cuDNN chooses an algorithm by heuristics that are not published. We have two recordings of what it
takes. The table holds 111,000 convolutions of common layers on an H200, as straight lines over the
batch (benchmarks/fidelity/cudnn.py). The rule is for all others. It was learned from 350,000
convolutions on an H100 (benchmarks/fidelity/convolution_sweep.py): for each of the three results, a
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

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
DTYPES = ("float32", "bfloat16", "float16")
MULTIPROCESSORS = 132  # of the H100 that was measured
STEP = 32  # terms of a sum that a tile adds at a time
NO_SLOPE = -1  # in the table: a line that is a single point
LEAF = -1


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
        """Return the input and output channels of one group."""
        return self.into // self.groups, self.out // self.groups

    def copies(self, multiple: Any) -> tuple[Any, Any, Any]:
        """Return the bytes of input, output and weight with channels padded to a multiple."""
        into, out = (_ceiling(channels, multiple) * multiple for channels in self.channels())
        pixels, positions = self.batch * prod(self.extent), self.batch * prod(self.result)
        weight = into * out * self.groups * prod(self.kernel)
        return (
            pixels * into * self.groups * self.item,
            positions * out * self.groups * self.item,
            weight * self.item,
        )

    def product(self, result: int) -> tuple[Any, Any, Any]:
        """Return the rows, columns and terms of the matrix product that computes this result."""
        into, out = self.channels()
        pixels, positions = self.batch * prod(self.extent), self.batch * prod(self.result)
        taps = prod(self.kernel)
        if result == OUTPUT:
            return positions, out, into * taps
        if result == INPUT_GRADIENT:
            return pixels, into, out * taps
        return out, into * taps, positions


def _ceiling(number: Any, divisor: Any) -> Any:
    return -(-number // divisor)


def _smaller(a: Any, b: Any) -> Any:
    return a + (b - a) * (b < a)


def _larger(a: Any, b: Any) -> Any:
    return a + (b - a) * (b > a)


def _largest(numbers: Sequence[Any]) -> Any:
    first, second, third = numbers
    return _larger(_larger(first, second), third)


def features(convolution: Convolution, result: int) -> dict[str, Any]:
    """Return the numbers that the tree for this result may ask about, by name."""
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
    """A sum of memory that a workspace may consist of.

    `copies` names the tensors that are copied: X, Y and W are input, output and weight. Channels
    are padded to a `multiple`; 0 stands for a vector of 16 bytes. Copies may be `wide`, in float32,
    or of one group at a time (`by_group`). `weights` and `outputs` count partial results in
    float32. `each_sample` takes a weight in float32 per sample. `tile` has the sides of the tiles
    and how many multiprocessors share one, if the last wave of tiles is divided.
    """

    copies: str = ""
    multiple: int = 1
    wide: bool = False
    by_group: bool = False
    fixed: int = 0  # bytes
    weights: int = 0
    outputs: int = 0
    each_sample: bool = False
    tile: tuple[int, int, int] | None = None

    def bytes(self, convolution: Convolution, result: int) -> Any:
        """Return the bytes of the workspace."""
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
    """Return the bytes in which multiprocessors hand on parts of the tiles of the last wave.

    These tiles are fewer than the multiprocessors. So the sum of each is divided among several,
    and every part of a tile is written in float32.
    """
    rows, columns, terms = product
    tiles = _ceiling(rows, height * side) * _ceiling(columns, width)
    most = MULTIPROCESSORS // side
    last = tiles % most
    parts = most // (last + (last == 0))
    parts = _smaller(parts, _larger(terms // STEP, 1 + 0 * terms))
    return (last > 0) * last * parts * side * height * width * 4


class Tree(NamedTuple):
    """A decision tree in preorder. `question` holds the index of a feature, LEAF in a leaf.

    The left branch follows its node. `right` holds the index of the right branch, in a leaf that of
    the formula.
    """

    question: list[int]
    threshold: list[float]
    right: list[int]

    def formula(self, numbers: Sequence[Any]) -> int:
        """Return the index of the formula for these features."""
        node = 0
        while self.question[node] != LEAF:
            if numbers[self.question[node]] <= self.threshold[node]:
                node += 1
            else:
                node = self.right[node]
        return self.right[node]


class Rule(NamedTuple):
    """Trees and formulas for the three results."""

    trees: tuple[Tree, ...]
    formulas: tuple[tuple[Formula, ...], ...]

    def bytes(self, convolution: Convolution, result: int) -> int:
        numbers = list(features(convolution, result).values())
        formula = self.formulas[result][self.trees[result].formula(numbers)]
        return int(formula.bytes(convolution, result))


def _profile(name: str) -> Any:
    return json.loads((files("virtualgpu.profiles") / name).read_text())


@lru_cache(maxsize=1)
def rule() -> Rule:
    """Read the rule that was learned."""
    found = _profile("cudnn_convolution_rule.json")["results"]
    trees = tuple(Tree(*entry["tree"]) for entry in found)
    return Rule(trees, tuple(tuple(map(_formula, entry["formulas"])) for entry in found))


def _formula(fields: dict[str, Any]) -> Formula:
    if "tile" in fields:
        fields = fields | {"tile": tuple(fields["tile"])}
    return Formula(**fields)


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, list[list[int]]]]:
    """Read the lines over the batch, by layer and by size of the input."""
    lines: dict[str, dict[str, list[list[int]]]] = _profile("cudnn_convolution_h200.json")["lines"]
    return lines


def on_line(lines: list[int], batch: int) -> int:
    """Return the bytes at a batch. Lines are triples: first batch, bytes there, bytes per sample."""
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
    """Return the name of the layer in the table."""
    c = convolution
    order = "last" if c.channels_last else "first"
    kind = "T" if c.transposed else "F"
    settings = (c.kernel, c.stride, c.padding, c.dilation)
    joined = " ".join(",".join(map(str, numbers[: c.dims])) for numbers in settings)
    return f"{DTYPES[c.dtype]} {order} {kind} {c.into} {c.out} {joined} {c.groups}"


@lru_cache(maxsize=4096)
def workspaces(convolution: Convolution) -> tuple[int, int, int]:
    """Return the bytes for the output, the input's gradient and the weight's gradient."""
    size = ",".join(map(str, convolution.extent[: convolution.dims]))
    lines = table().get(layer_key(convolution), {}).get(size)
    if lines is not None:
        output, input_gradient, weight_gradient = (
            on_line(line, convolution.batch) for line in lines
        )
    else:
        output, input_gradient, weight_gradient = (
            rule().bytes(convolution, result)
            for result in (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT)
        )
    return output, input_gradient, weight_gradient
