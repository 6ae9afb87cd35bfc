"""Training steps of a GPT's blocks under FSDP, as one rank of a simulated world takes them.

Arguments: the blocks, their width, the tokens of a sequence, and how many sequences a rank has. `result` has the seconds of the second
step, and the bytes that the rank holds after it, without its batch, and at its peak.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

blocks, width, tokens, sequences = map(int, sys.argv[1:])

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with torch.device("cuda"):
    layers = [
        nn.TransformerEncoderLayer(width, width // 128, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(blocks)
    ]
model = nn.Sequential(*layers)
for layer in model:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(sequences, tokens, width, device="cuda")
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    start.record()
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
held = torch.cuda.memory_allocated() - x.nbytes
result = {"seconds": start.elapsed_time(end) / 1e3, "held": held, "peak": torch.cuda.max_memory_allocated()}
dist.destroy_process_group()
