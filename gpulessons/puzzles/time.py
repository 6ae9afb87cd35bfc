"""Puzzles about the time of the host and of the GPU."""

import torch

from labkit.puzzles.definitions import LAUNCHES, WAITS, Puzzle


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
    # Half of the gradients are too long, in an order that nobody knows. The first one is always
    # too long and the last one never, so that the host's time does not depend on the order.
    between = torch.tensor([0.01, 0.1]).repeat(9)[torch.randperm(18, generator=generator)]
    scales = torch.cat([torch.tensor([0.1]), between, torch.tensor([0.01])])
    gradients = torch.randn(20, 1000, generator=generator) * scales[:, None]
    return (list(gradients.cuda()),)


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
