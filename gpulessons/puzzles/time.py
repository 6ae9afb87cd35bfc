"""Puzzles about the time of the host and of the GPU."""

import torch

from labkit.puzzles.definitions import LAUNCHES, TIME, WAITS, Puzzle

BATCHES = 8


def softmax_of_rows(scores):
    rows = []
    for row in scores:
        shifted = row - row.max()
        powers = shifted.exp()
        rows.append(powers / powers.sum())
    return torch.stack(rows)


def clipped(gradients):
    results = []
    for gradient in gradients:
        norm = gradient.norm()
        if norm > 1:
            gradient = gradient / norm
        results.append(gradient)
    return results


def doubled(batches):
    results = []
    for batch in batches:
        x = batch.cuda(non_blocking=True)
        y = 2 * x
        results.append(y.cpu())
    return results


def products(batches, matrix):
    side, results = torch.cuda.Stream(), []
    for batch in batches:
        with torch.cuda.stream(side):
            x = batch.cuda(non_blocking=True)
        side.synchronize()
        results.append(x @ matrix)
        torch.cuda.synchronize()
    return results


def summed_gradients(rows, weights):
    losses = []
    for index, weight in enumerate(weights):
        rows = (rows @ weight).tanh()
        losses.append(rows.square().mean() * (index + 1))
    totals = [torch.zeros_like(weight) for weight in weights]
    for index, loss in enumerate(losses):
        gradients = torch.autograd.grad(loss, weights[: index + 1], retain_graph=True)
        for total, gradient in zip(totals, gradients, strict=False):
            total += gradient
    return totals


def _scores(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(40, 1000, generator=generator).cuda(),)


def _gradients(generator: torch.Generator) -> tuple[list[torch.Tensor]]:
    # Half of the gradients are too long, in an order that nobody knows.
    scales = torch.tensor([0.01, 0.1]).repeat(10)[torch.randperm(20, generator=generator)]
    gradients = torch.randn(20, 1000, generator=generator) * scales[:, None]
    return (list(gradients.cuda()),)


def _pinned(generator: torch.Generator) -> tuple[list[torch.Tensor]]:
    batches = torch.randn(BATCHES, 1 << 20, generator=generator)
    return ([batch.pin_memory() for batch in batches],)


def _pinned_and_matrix(generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    batches = torch.randn(BATCHES, 1024, 1024, generator=generator)
    matrix = torch.randn(1024, 1024, generator=generator).cuda()
    return [batch.pin_memory() for batch in batches], matrix


def _layers(generator: torch.Generator) -> tuple[torch.Tensor, list[torch.Tensor]]:
    rows = torch.randn(32, 64, generator=generator).cuda()
    weights = torch.randn(10, 64, 64, generator=generator).cuda() / 8
    return rows, [weight.clone().requires_grad_() for weight in weights]


ONE_LAUNCH = Puzzle(
    name="one launch",
    task="Return the same probabilities with fewer launches.",
    lesson="01",
    function=softmax_of_rows,
    inputs=_scores,
    score=LAUNCHES,
    budget=5,
    par=1,
)
HIDDEN_WAIT = Puzzle(
    name="hidden wait",
    task="Return the same gradients, none longer than 1, and let the host never wait.",
    lesson="02",
    function=clipped,
    inputs=_gradients,
    score=WAITS,
    budget=0,
    par=0,
    limits={},
)
BOTH_WAYS = Puzzle(
    name="both ways",
    task="Return the same batches on the host in less time.",
    lesson="02",
    function=doubled,
    inputs=_pinned,
    score=TIME,
    budget=1e-3,
    par=1e-3,
    limits={},
)
WAIT_ON_THE_GPU = Puzzle(
    name="wait on the GPU",
    task="Return the same products in less time, and without a race.",
    lesson="02",
    function=products,
    inputs=_pinned_and_matrix,
    score=TIME,
    budget=0.85e-3,
    par=0.76e-3,
)
ONE_BACKWARD = Puzzle(
    name="one backward pass",
    task="Return the same sums of gradients with fewer launches.",
    lesson="03",
    function=summed_gradients,
    inputs=_layers,
    score=LAUNCHES,
    budget=200,
    par=150,
)
