"""Ranks that save the shards of a model under FSDP, or load what other ranks have saved, perhaps more of them or fewer.

Leaves as its result how many rows of the weight this rank holds, and the sum of the whole weight.
"""

import logging
import os
import sys
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
logging.disable()  # of collectives that could be one
folder = sys.argv[1]
dist.init_process_group()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(dist.get_world_size())  # other weights in a run with another number of ranks
model = fully_shard(nn.Linear(4, 8).cuda())
state = {"model": model.state_dict()}
if os.path.exists(f"{folder}/.metadata"):
    checkpoint.load(state, checkpoint_id=folder)
else:
    checkpoint.save(state, checkpoint_id=folder)
result = {"rows": len(model.weight.to_local()), "sum": model.weight.full_tensor().sum().item()}
dist.destroy_process_group()
