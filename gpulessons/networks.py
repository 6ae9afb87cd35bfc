"""Three networks that a learner knows, by their sizes: what the budget of memory is about, and what it is measured on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LARGEST = 1 << 20  # of each size


@dataclass(frozen=True)
class Network:
    """What the networks share: sizes that are whole numbers, 1 or more. Raises ValueError for others."""

    def __post_init__(self) -> None:
        for size in fields(self):
            value = getattr(self, size.name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise ValueError(
                    f"{size.name}={value!r} of {type(self).__name__}: give a whole number from 1 to {LARGEST}"
                )

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        """The network, in float32 on `device`; with `checkpointing`, the backward computes its segments again instead of keeping them."""
        raise NotImplementedError

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """So many rows of zeros on `device`, as the network takes them, and the right answers to them, zeros of int64."""
        raise NotImplementedError


@dataclass(frozen=True)
class MLP(Network):
    """`depth` linear layers of `width` neurons with ReLU, and one that tells `classes` apart. A row has `width` numbers.

    Raises ValueError for a size that is no whole number from 1 to 1048576.
    """

    width: int = 2048
    depth: int = 8
    classes: int = 10

    def build(self, checkpointing: bool = False, device: Any = "cuda") -> nn.Module:
        hidden = [
            nn.Sequential(nn.Linear(self.width, self.width, device=device), nn.ReLU())
            for _ in range(self.depth)
        ]
        size = segment_size(self.depth)
        segments = [
            nn.Sequential(*hidden[first : first + size]) for first in range(0, self.depth, size)
        ]
        return Segments(
            nn.Identity(),
            segments,
            nn.Linear(self.width, self.classes, device=device),
            checkpointing,
        )

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers (rows, width), float32, and classes (rows,), int64: zeros on `device`."""
        return torch.zeros(rows, self.width, device=device), torch.zeros(
            rows, dtype=torch.int64, device=device
        )


@dataclass(frozen=True)
class GPT(Network):
    """A transformer that predicts the next token: `layers` blocks of `width`, with `heads` heads each, on rows of `tokens` tokens.

    GPT() has the sizes of the smallest GPT-2 (Radford and others, 2019).
    Raises ValueError for a size that is no whole number from 1 to 1048576, and where the heads do not share the width, or get less than 8
    of it each or no multiple of 8.
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
                f"width={self.width} with heads={self.heads}: the width must be a multiple of 8 times the heads"
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
        """Tokens (rows, tokens) and what follows each (rows · tokens,), int64: zeros on `device`."""
        inputs = torch.zeros(rows, self.tokens, dtype=torch.int64, device=device)
        return inputs, torch.zeros(rows * self.tokens, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class ResNet(Network):
    """A residual network of four stages of `blocks` blocks, with `width`, then 2, 4 and 8 times `width` channels.

    A row is a picture of `side` × `side` pixels, three colours. ResNet() is ResNet-18 (He and others, 2015).
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
        """Channels in, channels out and stride of each block."""
        widths = [self.width * 2**stage for stage in range(4) for _ in range(self.blocks)]
        return [
            (before, after, 1 + (before != after))
            for before, after in zip([self.width, *widths], widths, strict=False)
        ]

    def batch(self, rows: int, device: Any = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures (rows, 3, side, side), float32, and classes (rows,), int64: zeros on `device`."""
        pictures = torch.zeros(rows, 3, self.side, self.side, device=device)
        return pictures, torch.zeros(rows, dtype=torch.int64, device=device)


def segment_size(depth: int) -> int:
    """How many layers of an MLP a checkpoint spans: about the root of their number, where both kinds of memory are about equal."""
    return max(1, round(depth**0.5))


def linear_layers(layers: int, width: int, device: Any) -> nn.Sequential:
    """So many linear layers of one width, each with ReLU."""
    return nn.Sequential(
        *[
            layer
            for _ in range(layers)
            for layer in (nn.Linear(width, width, device=device), nn.ReLU())
        ]
    )


class Segments(nn.Module):
    """A start, segments of which each can be computed again in the backward instead of being kept, and an end."""

    def __init__(
        self, start: nn.Module, segments: Sequence[nn.Module], end: nn.Module, checkpointing: bool
    ) -> None:
        super().__init__()
        self.start, self.segments, self.end, self.checkpointing = (
            start,
            nn.ModuleList(segments),
            end,
            checkpointing,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=False) if self.checkpointing else segment(x)
        return self.end(x)


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, sizes: GPT, device: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width, device=device)
        self.position = nn.Parameter(torch.zeros(sizes.tokens, sizes.width, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class TransformerBlock(nn.Module):
    """Attention, then two linear layers with GELU; each behind a LayerNorm, and beside a residual connection."""

    def __init__(self, width: int, heads: int, device: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, device=device) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, device=device),
            nn.Linear(width, width, device=device),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, device=device),
            nn.Linear(4 * width, width, device=device),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attention(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        return (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


def convolution_and_norm(
    before: int, after: int, kernel: int, stride: int, device: Any
) -> list[nn.Module]:
    convolution = nn.Conv2d(
        before, after, kernel, stride, padding=kernel // 2, bias=False, device=device
    )
    return [convolution, nn.BatchNorm2d(after, device=device)]


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a connection that leaves them out; where the size changes it is a convolution, too."""

    def __init__(self, before: int, after: int, stride: int, device: Any) -> None:
        super().__init__()
        first, second = (
            convolution_and_norm(before, after, 3, stride, device),
            convolution_and_norm(after, after, 3, 1, device),
        )
        self.path = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        resized = (
            convolution_and_norm(before, after, 1, stride, device)
            if before != after
            else [nn.Identity()]
        )
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
