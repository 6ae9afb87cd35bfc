"""Networks, optimizers and precisions of which a learner estimates and measures the memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LARGEST_SIZE = 1 << 20


@dataclass(frozen=True)
class Network:
    """Base class of the networks, whose fields are sizes.

    Raises ValueError for a size that is not a whole number from 1 to 1048576.
    """

    def __post_init__(self) -> None:
        for size in fields(self):
            value = getattr(self, size.name)
            if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
                raise ValueError(
                    f"expected a whole number from 1 to {LARGEST_SIZE} for {size.name} "
                    f"of {type(self).__name__}, got {value!r}"
                )

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        """Return the network with float32 parameters on `device`.

        With `checkpointing`, the backward pass computes the segments' activations again.
        """
        raise NotImplementedError

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Return `rows` input rows and their targets on `device`.

        All values are zero. The targets have dtype int64.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MLP(Network):
    """Multilayer perceptron: `depth` linear layers of `width` neurons with ReLU, and a classifier.

    The classifier is a linear layer with `classes` outputs. An input row has `width` numbers.
    Raises ValueError for a size that is no whole number from 1 to 1048576.
    """

    width: int = 2048
    depth: int = 8
    classes: int = 10

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        size = segment_size(self.depth)
        segments: list[nn.Module] = []
        for first in range(0, self.depth, size):
            layers = min(size, self.depth - first)
            hidden = [
                nn.Sequential(nn.Linear(self.width, self.width, device=device), nn.ReLU())
                for _ in range(layers)
            ]
            segments.append(nn.Sequential(*hidden))
        classifier = nn.Linear(self.width, self.classes, device=device)
        return Segments(nn.Identity(), segments, classifier, checkpointing)

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (rows, width), float32, and classes (rows,), int64. All values are zero."""
        inputs = torch.zeros(rows, self.width, device=device)
        return inputs, torch.zeros(rows, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class GPT(Network):
    """Transformer of `layers` blocks with `heads` heads each, which predicts the next token.

    An input row has `tokens` tokens. GPT() has the sizes of the smallest GPT-2 (Radford and others,
    2019). Raises ValueError for a size that is no whole number from 1 to 1048576, and for a width
    that is no multiple of 8 · heads.
    """

    width: int = 768
    layers: int = 12
    heads: int = 12
    tokens: int = 1024
    vocabulary: int = 50257

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (8 * self.heads):
            raise ValueError(
                f"expected a width that is a multiple of 8 · heads = {8 * self.heads}, "
                f"got {self.width}"
            )

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        blocks = [TransformerBlock(self.width, self.heads, device) for _ in range(self.layers)]
        end = nn.Sequential(
            nn.LayerNorm(self.width, device=device),
            nn.Linear(self.width, self.vocabulary, bias=False, device=device),
            nn.Flatten(0, 1),
        )
        return Segments(Embedding(self, device), blocks, end, checkpointing)

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens (rows, tokens) and the next tokens (rows · tokens,), both int64.

        All values are zero.
        """
        inputs = torch.zeros(rows, self.tokens, dtype=torch.int64, device=device)
        return inputs, torch.zeros(rows * self.tokens, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class ResNet(Network):
    """Residual network of four stages with `blocks` blocks each.

    The stages have `width`, then 2, 4 and 8 times `width` channels. An input row is a picture of
    `side` × `side` pixels in three colours. ResNet() is ResNet-18 (He and others, 2015).
    Raises ValueError for a size that is no whole number from 1 to 1048576.
    """

    width: int = 64
    blocks: int = 2
    side: int = 224
    classes: int = 1000

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        start = nn.Sequential(
            *convolution_and_norm(3, self.width, 7, 2, device),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks = [Residual(*sizes, device) for sizes in self.residuals()]
        end = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * self.width, self.classes, device=device),
        )
        return Segments(start, blocks, end, checkpointing)

    def residuals(self) -> list[tuple[int, int, int]]:
        """Return (input channels, output channels, stride) of each block."""
        sizes = []
        before = self.width
        for stage in range(4):
            after = self.width * 2**stage
            for _ in range(self.blocks):
                sizes.append((before, after, 1 if before == after else 2))
                before = after
        return sizes

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Return pictures (rows, 3, side, side), float32, and classes (rows,), int64.

        All values are zero.
        """
        pictures = torch.zeros(rows, 3, self.side, self.side, device=device)
        return pictures, torch.zeros(rows, dtype=torch.int64, device=device)


def segment_size(depth: int) -> int:
    """Return the number of layers in each checkpointed segment of an MLP with `depth` layers.

    With about √depth layers, all checkpoints need about as much memory as the activations of one
    segment.
    """
    return max(1, round(depth**0.5))


def linear_layers(layers: int, width: int, device: Any) -> nn.Sequential:
    """Return `layers` linear layers of `width` neurons, each followed by ReLU."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width, device=device), nn.ReLU()]
    return nn.Sequential(*modules)


class Segments(nn.Module):
    """Network that consists of a first part, segments and a last part.

    With `checkpointing`, the forward pass keeps only the inputs of the segments. The backward pass
    computes each segment again.
    """

    def __init__(
        self, start: nn.Module, segments: Sequence[nn.Module], end: nn.Module, checkpointing: bool
    ) -> None:
        super().__init__()
        self.start = start
        self.segments = nn.ModuleList(segments)
        self.end = end
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for segment in self.segments:
            if self.checkpointing:
                x = checkpoint(segment, x, use_reentrant=False)
            else:
                x = segment(x)
        return self.end(x)


class Embedding(nn.Module):
    """Embedding of tokens, to which a learned embedding of their positions is added."""

    def __init__(self, sizes: GPT, device: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width, device=device)
        self.position = nn.Parameter(torch.zeros(sizes.tokens, sizes.width, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class TransformerBlock(nn.Module):
    """Block of a transformer: attention, followed by two linear layers with GELU.

    Each part has a LayerNorm before it and a residual connection around it.
    """

    def __init__(self, width: int, heads: int, device: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, device=device)
        self.norm2 = nn.LayerNorm(width, device=device)
        self.qkv = nn.Linear(width, 3 * width, device=device)
        self.out = nn.Linear(width, width, device=device)
        self.up = nn.Linear(width, 4 * width, device=device)
        self.down = nn.Linear(4 * width, width, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attention(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return heads.transpose(1, 2).flatten(2)


def convolution_and_norm(
    before: int, after: int, kernel: int, stride: int, device: Any
) -> list[nn.Module]:
    """Return a convolution from `before` to `after` channels, and its BatchNorm."""
    convolution = nn.Conv2d(
        before, after, kernel, stride, padding=kernel // 2, bias=False, device=device
    )
    return [convolution, nn.BatchNorm2d(after, device=device)]


class Residual(nn.Module):
    """Residual block of two convolutions with BatchNorm.

    If the number of channels changes, the residual connection has a convolution, too.
    """

    def __init__(self, before: int, after: int, stride: int, device: Any) -> None:
        super().__init__()
        first = convolution_and_norm(before, after, 3, stride, device)
        second = convolution_and_norm(after, after, 3, 1, device)
        self.path = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        resized: list[nn.Module] = [nn.Identity()]
        if before != after:
            resized = convolution_and_norm(before, after, 1, stride, device)
        self.beside = nn.Sequential(*resized)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.path(x)
        out += self.beside(x)
        return F.relu_(out)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "Adam fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
}
PRECISIONS = {
    "float32": None,
    "autocast bfloat16": torch.bfloat16,
    "autocast float16": torch.float16,
}
