"""Puzzles about streams, copies between host and GPU, and CUDA graphs."""

import torch
from torch.nn import functional as F

from labkit.puzzles.definitions import COPIES_TO_HOST, RESERVED, TIME, WAITS, Puzzle

MIB = 1 << 20
MILLISECOND = 1e-3
BATCHES, ROWS, WIDTH = 6, 512, 1024
LARGE_ROWS, COLUMNS = 3072, 256  # a large batch has 12 MiB
LAYERS = 8
STEPS, SAMPLES, UNITS = 20, 32, 64


def copied_products(batches, weight):
    results = []
    for batch in batches:
        x = batch.cuda()
        results.append(x @ weight)
    return results


def staged_products(batches, weight):
    side = torch.cuda.Stream()
    buffers = [torch.empty_like(batches[0], device="cuda") for _ in range(2)]
    results = []
    for index, batch in enumerate(batches):
        buffer = buffers[index % 2]
        with torch.cuda.stream(side):
            buffer.copy_(batch, non_blocking=True)
        torch.cuda.synchronize()
        results.append(buffer @ weight)
        torch.cuda.synchronize()
    return results


def largest_products(batches, weight):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    copies, results = [], []
    for batch in batches:
        with torch.cuda.stream(side):
            copies.append(batch.cuda(non_blocking=True))
        here.wait_stream(side)
        results.append((copies[-1] @ weight).amax(dim=1))
    side.wait_stream(here)
    return results


def offloaded(rows, weights):
    for weight in weights:
        copy = weight.cuda(non_blocking=True)
        rows = (rows @ copy).tanh()
    return rows


def trained(weights, batches):
    weights = [weight.clone().requires_grad_() for weight in weights]
    for batch in batches:
        rows = batch
        for weight in weights:
            rows = (rows @ weight).tanh()
        loss = F.mse_loss(rows, batch)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient
    return [weight.detach() for weight in weights]


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _on_host(generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    batches = _normal(generator, BATCHES, ROWS, WIDTH).pin_memory()
    return list(batches), _normal(generator, WIDTH, WIDTH).cuda()


def _large(generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    batches = _normal(generator, BATCHES, LARGE_ROWS, WIDTH).pin_memory()
    return list(batches), _normal(generator, WIDTH, COLUMNS).cuda()


def _layers(generator: torch.Generator) -> tuple[torch.Tensor, list[torch.Tensor]]:
    weights = (_normal(generator, LAYERS, WIDTH, WIDTH) / WIDTH**0.5).pin_memory()
    return _normal(generator, WIDTH, WIDTH).cuda(), list(weights)


def _steps(generator: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = _normal(generator, 3, UNITS, UNITS).cuda() / UNITS**0.5
    return list(weights), list(_normal(generator, STEPS, SAMPLES, UNITS).cuda())


HIDDEN_COPIES = Puzzle(
    name="hidden copies",
    task="Return the same products in less time.",
    lesson="02",
    function=copied_products,
    inputs=_on_host,
    score=TIME,
    budget=0.38 * MILLISECOND,
    par=0.335 * MILLISECOND,
)
EXACT_WAITS = Puzzle(
    name="exact waits",
    task="Return the same products in less time, and let the host never wait.",
    lesson="02",
    function=staged_products,
    inputs=_on_host,
    score=TIME,
    budget=0.36 * MILLISECOND,
    par=0.295 * MILLISECOND,
    limits={WAITS: 0, COPIES_TO_HOST: 0},
)
TWO_STREAMS = Puzzle(
    name="two streams, one allocator",
    task="Return the same results, let the allocator reserve less memory, and keep the copies "
    "hidden.",
    lesson="05",
    function=largest_products,
    inputs=_large,
    score=RESERVED,
    budget=95 * MIB,
    par=78 * MIB,
    limits={TIME: 1.65 * MILLISECOND, COPIES_TO_HOST: 0},
)
NEXT_LAYER = Puzzle(
    name="next layer",
    task="Return the same rows in less time, and let the allocator reserve at most 80 MiB.",
    lesson="09",
    function=offloaded,
    inputs=_layers,
    score=TIME,
    budget=0.8 * MILLISECOND,
    par=0.71 * MILLISECOND,
    limits={RESERVED: 80 * MIB, COPIES_TO_HOST: 0},
)
ONE_GRAPH = Puzzle(
    name="one graph",
    task="Return the same weights in less time.",
    lesson="02",
    function=trained,
    inputs=_steps,
    score=TIME,
    budget=3.6 * MILLISECOND,
    par=1.75 * MILLISECOND,
)
