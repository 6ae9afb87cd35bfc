"""Tensors of subclasses between ranks, here a world of one: they say where they are."""

import pytest
import torch

from virtualgpu import hardware

pytestmark = pytest.mark.usefixtures("world")


def host_seconds(call):
    clock = hardware.machine().clock
    begin = clock.host
    call()
    return clock.host - begin


def test_an_operator_on_dtensors_takes_its_host_longer():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    plain, profile = torch.ones(4, 4, device="cuda"), hardware.machine().profile
    x = distribute_tensor(plain, init_device_mesh("cuda", (1,)), [Shard(0)])
    x.mul_(2)  # PyTorch works out once where the result lies
    longer = host_seconds(lambda: x.mul_(2)) - host_seconds(lambda: plain.mul_(2))
    assert longer == pytest.approx(profile.wrapper_seconds + profile.wrapped_seconds)


def test_a_dtensor_is_on_the_gpu_of_its_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)])
    for each in (x, x + 1):  # made by Python, and by C++
        assert (each.device, each.is_cuda, each.is_cpu, each.get_device()) == (torch.device("cuda", 0), True, False, 0)
