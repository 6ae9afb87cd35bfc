"""Tensors of subclasses between ranks, here a world of one: they say where they are."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def world(machine):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_is_on_the_gpu_of_its_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)])
    for each in (x, x + 1):  # made by Python, and by C++
        assert (each.device, each.is_cuda, each.is_cpu, each.get_device()) == (torch.device("cuda", 0), True, False, 0)
