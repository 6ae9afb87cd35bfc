"""Two training steps of a transformer under DistributedDataParallel: a script for torchrun."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layer = nn.TransformerEncoderLayer(
    768, 12, dim_feedforward=3072, activation="gelu", batch_first=True, dropout=0.0, device="cuda"
)
model = DistributedDataParallel(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    x = torch.randn(8, 512, 768, pin_memory=True).to("cuda", non_blocking=True)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
