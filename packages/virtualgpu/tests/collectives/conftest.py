import pytest
import torch.distributed as dist


@pytest.fixture
def world(machine):
    """Make a world of one rank on the virtual machine, and end it after the test."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
