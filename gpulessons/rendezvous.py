"""How the lessons' rank programs begin: its ranks meet, and each learns who it is and where its tensors go."""

import os

import torch
import torch.distributed as dist


def meet() -> tuple[int, int, torch.device]:
    """This rank's number, how many ranks there are, and its device: a GPU of its own, or the CPU where a machine has too few GPUs."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device
