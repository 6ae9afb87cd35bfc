"""An ensemble, one member a GPU: every rank trains a network of its own, and they meet once, for the vote."""

import os

import torch
import torch.distributed as dist
from rendezvous import meet
from torch import nn

rank, ranks, device = meet()
x = torch.linspace(-3, 3, 64, device=device).unsqueeze(1)
noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)).to(device)

torch.manual_seed(rank)  # members that differ
member = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
for _ in range(300):  # nothing is sent here
    loss = (member(x) - x.sin() - 0.3 * noise).square().mean()
    gradients = torch.autograd.grad(loss, list(member.parameters()))
    with torch.no_grad():  # plain gradient descent: an optimizer of torch would load much that this small program does without
        for parameter, gradient in zip(member.parameters(), gradients, strict=True):
            parameter.sub_(0.1 * gradient)

mine = member(x).detach()
votes = [torch.empty_like(mine) for _ in range(ranks)]
dist.all_gather(votes, mine)
error = (mine - x.sin()).square().mean().item()
together = (torch.stack(votes).mean(0) - x.sin()).square().mean().item()
print(f"machine {os.environ['GROUP_RANK']}, GPU {os.environ['LOCAL_RANK']}: member {rank} of {ranks} has an error of {error:.3f}")

result = {"error": error, "together": together}
dist.destroy_process_group()
