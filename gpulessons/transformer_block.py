"""A block of a GPT, whole or cut as Megatron cuts it: both layers of a pair, so that each pair sums its outputs once."""

import torch
import torch.distributed as dist
from torch import nn

HEAD = 128  # width of an attention head


class Block(nn.Module):
    """`width` wide, with 12 times its square as parameters, of which each rank of `group` has its part."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, ranks = group, dist.get_world_size(group)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.mix = nn.Linear(width, 3 * width // ranks), nn.Linear(width // ranks, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width // ranks), nn.Linear(4 * width // ranks, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attend(self.enter(self.norms[0](x))).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.mix(attended.transpose(1, 2).flatten(2)))
        return x + self.leave(self.narrow(nn.functional.gelu(self.widen(self.enter(self.norms[1](x))))))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return Enter.apply(x, self.group) if dist.get_world_size(self.group) > 1 else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return Leave.apply(x, self.group) if dist.get_world_size(self.group) > 1 else x


class Enter(torch.autograd.Function):
    """Into a cut pair of layers: the gradient is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.contiguous()
        dist.all_reduce(upstream, group=ctx.group)
        return upstream, None


class Leave(torch.autograd.Function):
    """Out of it: the output is summed."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None
