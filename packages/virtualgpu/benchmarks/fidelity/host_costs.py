"""What an operator costs the host on a real machine, by kind: in a plain loop, recorded by autograd, in a backward, in an optimizer.

usage: host_costs.py OUT.json     microseconds, medians of 5; "cuda" counts the launch alone (no synchronisation inside a loop)
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


def micros(work, device, repeats=200):
    for _ in range(20):
        work()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - start) / repeats * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[2]


def measure(device):
    x, w = torch.randn(16, 16, device=device), torch.randn(16, 16, device=device)
    p, b = torch.randn(16, 16, device=device, requires_grad=True), torch.randn(16, device=device, requires_grad=True)
    linear, relu = nn.Linear(16, 16).to(device), nn.ReLU()
    many = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(16)]
    for q in many:
        q.grad = torch.ones_like(q)
    sgd, adam = torch.optim.SGD(many, 0.1), torch.optim.Adam(many)
    two = torch.optim.SGD(many[:2], 0.1)

    def forward_only(depth):
        y = x
        for _ in range(depth):
            y = F.relu(F.linear(y, p, b))
        return y.sum()

    def step(depth):
        forward_only(depth).backward()
        p.grad = b.grad = None

    def without_grad(work):
        def run():
            with torch.no_grad():
                work()

        return run

    works = {
        "add_": lambda: x.add_(0),
        "add": lambda: x + w,
        "add recorded": lambda: p + w,
        "mm": lambda: x @ w,
        "mm recorded": lambda: p @ w,
        "addmm": lambda: torch.addmm(x[0], x, w),
        "linear recorded": lambda: F.linear(x, p, b),
        "nn.Linear recorded": lambda: linear(x),
        "nn.Linear no_grad": without_grad(lambda: linear(x)),
        "nn.ReLU": lambda: relu(x),
        "relu recorded": lambda: F.relu(p),
        "sum": lambda: x.sum(),
        "view": lambda: x.view(-1),
        "zeros": lambda: torch.zeros(16, device=device),
        "randn": lambda: torch.randn(16, device=device),
        "mse": lambda: F.mse_loss(x, w),
        "forward 1": lambda: forward_only(1),
        "forward 8": lambda: forward_only(8),
        "forward and backward 1": lambda: step(1),
        "forward and backward 8": lambda: step(8),
        "sgd 2": two.step,
        "sgd 16": sgd.step,
        "adam 16": adam.step,
        "zero_grad 16": lambda: sgd.zero_grad(set_to_none=False),
    }
    return {name: micros(work, device) for name, work in works.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "cuda": measure("cuda"), "cpu": measure("cpu")}
    json.dump(result, open(sys.argv[1], "w"), indent=1)
    for name in result["cuda"]:
        print(f"{name:26s} cuda {result['cuda'][name]:8.1f}   cpu {result['cpu'][name]:8.1f}")
