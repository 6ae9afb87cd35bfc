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


def test_a_dtensor_moves_with_its_parts_and_its_gradient_back():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    x = distribute_tensor(torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)]).requires_grad_()
    assert x.to("cuda") is x
    assert x.to("cuda", torch.float16).dtype is torch.float16
    moved = x.cpu()
    assert type(moved) is DTensor and moved.device.type == moved.to_local().device.type == "cpu"
    moved.to("cuda").sum().backward()
    assert x.grad.device == torch.device("cuda", 0)
    assert x.grad.to_local().tolist() == torch.ones(4, 4).tolist()


def test_gradients_of_dtensors_are_clipped_together():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(2, 2, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)]).requires_grad_()
    (x * x).sum().backward()
    assert torch.nn.utils.clip_grad_norm_([x], 1.0).full_tensor().item() == pytest.approx(4.0)


def test_the_loss_of_logits_in_parts():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    logits = torch.arange(12.0).view(3, 4)
    given = distribute_tensor(logits.cuda(), init_device_mesh("cuda", (1,)), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(given, torch.tensor([0, 1, 2], device="cuda"))
        loss.backward()
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2])).item())
    assert given.grad.to_local().sum().item() == pytest.approx(0.0, abs=1e-6)
