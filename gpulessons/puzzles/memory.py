"""Puzzles about the memory of tensors at the peak, and about the memory that stays reserved."""

import torch
from torch.nn import functional as F

from labkit.puzzles.definitions import COPIES_TO_HOST, PEAK, RESERVED, TIME, Puzzle

MIB = 1 << 20
PIXELS = 4 << 20  # of an image, which has 16 MiB
POINTS, CENTRES, COORDINATES = 2048, 512, 16
ROWS, WIDTH, CLASSES = 512, 64, 50_000
STEPS, HEADS = 32, 1024
SAMPLES, OUTPUTS = 12, 1024
TOKENS, CHANNELS = 512, 64
HIDDEN = (8192, 64, 64, 64, 64, 64, 64, 8192)  # the channels inside each block


def contrast(image):
    centred = image - image.mean()
    magnitude = centred.abs()
    root = magnitude.sqrt()
    sign = centred.sign()
    return root * sign


def nearest(points, centres):
    offsets = points[:, None] - centres
    squares = offsets * offsets
    distances = squares.sum(dim=2).sqrt()
    return distances.min(dim=1).values


def loss_and_gradients(rows, weight, targets):
    logits = rows @ weight.T
    loss = F.cross_entropy(logits, targets)
    gradients = torch.autograd.grad(loss, (rows, weight))
    return loss, *gradients


def cached_keys(keys):
    cache = keys[0]
    for key in keys[1:]:
        cache = torch.cat([cache, key])
    return cache


def accumulated(inputs, errors):
    gradients = []
    for x, error in zip(inputs, errors, strict=True):
        gradients.append(error.T @ x)
    return torch.stack(gradients).mean(dim=0)


def gradients_of_blocks(tokens, blocks):
    for up, down in blocks:
        hidden = F.gelu(tokens @ up)
        tokens = tokens + hidden @ down
    loss = tokens.square().mean()
    weights = [weight for block in blocks for weight in block]
    return torch.autograd.grad(loss, weights)


def _image(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.rand(PIXELS, generator=generator).cuda(),)


def _points(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.randn(POINTS, COORDINATES, generator=generator).cuda()
    return points, torch.randn(CENTRES, COORDINATES, generator=generator).cuda()


def _rows(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.randn(ROWS, WIDTH, generator=generator).cuda().requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=generator).cuda().requires_grad_()
    return rows, weight, torch.randint(CLASSES, (ROWS,), generator=generator).cuda()


def _keys(generator: torch.Generator) -> tuple[list[torch.Tensor]]:
    keys = torch.randn(STEPS, 256, HEADS, generator=generator).cuda()
    return (list(keys),)


def _samples(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, 64, OUTPUTS, generator=generator).cuda()
    return inputs, torch.randn(SAMPLES, 64, OUTPUTS, generator=generator).cuda()


def _blocks(
    generator: torch.Generator,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    tokens = torch.randn(TOKENS, CHANNELS, generator=generator).cuda()
    blocks = []
    for hidden in HIDDEN:
        up = torch.randn(CHANNELS, hidden, generator=generator).cuda() / CHANNELS**0.5
        down = torch.randn(hidden, CHANNELS, generator=generator).cuda() / hidden**0.5
        blocks.append((up.requires_grad_(), down.requires_grad_()))
    return tokens, blocks


FREE_FIRST = Puzzle(
    name="free first",
    task="Return the same image with a lower peak of memory.",
    lesson="05",
    function=contrast,
    inputs=_image,
    score=PEAK,
    budget=65 * MIB,
    par=49 * MIB,
)
NO_TEMPORARY = Puzzle(
    name="no temporary",
    task="Return the distance of each point to its nearest centre with a lower peak of memory.",
    lesson="09",
    function=nearest,
    inputs=_points,
    score=PEAK,
    budget=40 * MIB,
    par=5 * MIB,
)
MANY_CLASSES = Puzzle(
    name="50,000 classes",
    task="Return the same loss and the same gradients with a lower peak of memory.",
    lesson="09",
    function=loss_and_gradients,
    inputs=_rows,
    score=PEAK,
    budget=150 * MIB,
    par=126 * MIB,
)
GROWING_CACHE = Puzzle(
    name="growing cache",
    task="Return the same cache and let the allocator reserve less memory.",
    lesson="05",
    function=cached_keys,
    inputs=_keys,
    score=RESERVED,
    budget=110 * MIB,
    par=64 * MIB,
)
NO_SPIKE = Puzzle(
    name="no spike",
    task="Return the same mean of the gradients with a lower peak of memory.",
    lesson="09",
    function=accumulated,
    inputs=_samples,
    score=PEAK,
    budget=52 * MIB,
    par=43 * MIB,
)
ONE_CHECKPOINT = Puzzle(
    name="one checkpoint",
    task="Return the same gradients with a lower peak of memory, in at most 2 ms.",
    lesson="09",
    function=gradients_of_blocks,
    inputs=_blocks,
    score=PEAK,
    budget=130 * MIB,
    par=127 * MIB,
    limits={TIME: 2e-3, COPIES_TO_HOST: 0},
)
