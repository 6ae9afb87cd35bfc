"""The leaking scripts of lesson 06. They return the right results and keep too much memory."""

# mypy: disable-error-code="assignment, attr-defined"
# As a learner writes: a name is a number first, and a tensor then.

from typing import Any

import torch
from torch import nn


def train_and_validate(model: Any, optimizer: Any, batches: Any) -> Any:
    """Train. Return the model's error after each step, averaged over the steps."""
    error, steps = 0, 0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error += nn.functional.l1_loss(model(x), y)
        steps += 1
    return (error / steps).item()


def train_and_collect(model: Any, optimizer: Any, batches: Any) -> Any:
    """Train. Return the model's outputs for all rows, concatenated, on the CPU."""
    outputs = []
    for x, y in batches:
        output = model(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(output, y).backward()
        optimizer.step()
        outputs.append(output.detach())
    return torch.cat(outputs).cpu()


def train_smoothed(model: Any, optimizer: Any, batches: Any) -> Any:
    """Train. Return the smoothed loss of each step: 0.9 of the value before and 0.1 of the loss."""
    average, curve = 0, []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        average = 0.9 * average + 0.1 * loss
        curve.append(average)
    return [value.item() for value in curve]


def train_watched(model: Any, optimizer: Any, batches: Any) -> Any:
    """Train. Return the mean activation of the hidden layer, `model[1]`, at each step."""
    seen, means = [], []
    for x, y in batches:
        model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(seen[-1].mean().item())
    return means


def train_robustly(model: Any, optimizer: Any, batches: Any) -> Any:
    """Train. Return the losses, the mean activations of `model[1]`, and the texts of errors."""

    def step(number, x, y):
        loss = nn.functional.mse_loss(model(x), y)
        if loss.isnan():
            raise ValueError(f"batch {number} has no loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses, seen, errors = [], [], []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    for number, (x, y) in enumerate(batches):
        try:
            losses.append(step(number, x, y))
        except ValueError as error:
            errors.append(error)
    means = [output.mean().item() for output in seen]
    return [loss.item() for loss in losses], means, [str(error) for error in errors]
