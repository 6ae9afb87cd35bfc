"""Start the process group of a lesson's rank program and choose each rank's device."""

import os

import torch
import torch.distributed as dist


def meet() -> tuple[int, int, torch.device]:
    """Start the default process group. Return this rank, the number of ranks and the device.

    Each rank gets its own GPU. All ranks use the CPU if the machine has too few GPUs.
    """
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device
