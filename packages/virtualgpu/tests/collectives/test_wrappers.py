"""Tensor subclasses that report their device, in a world of one rank."""

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
    x.mul_(2)  # PyTorch computes the placement of the result once
    longer = host_seconds(lambda: x.mul_(2)) - host_seconds(lambda: plain.mul_(2))
    assert longer == pytest.approx(profile.wrapper_seconds + profile.wrapped_seconds)


def test_a_dtensor_is_on_the_gpu_of_its_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(
        torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)]
    )
    for each in (x, x + 1):  # one made by Python and one by C++
        assert (each.device, each.is_cuda, each.is_cpu, each.get_device()) == (
            torch.device("cuda", 0),
            True,
            False,
            0,
        )


def test_a_dtensor_moves_with_its_parts_and_its_gradient_back():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    x = distribute_tensor(
        torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)]
    ).requires_grad_()
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

    x = distribute_tensor(
        torch.ones(2, 2, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)]
    ).requires_grad_()
    (x * x).sum().backward()
    assert torch.nn.utils.clip_grad_norm_([x], 1.0).full_tensor().item() == pytest.approx(4.0)


def test_the_loss_of_logits_in_parts():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    logits = torch.arange(12.0).view(3, 4)
    given = distribute_tensor(
        logits.cuda(), init_device_mesh("cuda", (1,)), [Shard(1)]
    ).requires_grad_()
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(given, torch.tensor([0, 1, 2], device="cuda"))
        loss.backward()
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2])).item()
    )
    assert given.grad.to_local().sum().item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_dtensors_is_that_of_their_parts(masked):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1,))
    torch.manual_seed(0)
    plain = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if masked else None
    q, k, v = (distribute_tensor(x.cuda(), mesh, [Shard(1)]).requires_grad_() for x in plain)
    given = None if mask is None else distribute_tensor(mask.cuda(), mesh, [Replicate()])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, given, is_causal=not masked)
    assert out.placements == (Shard(1),)
    expected = torch.nn.functional.scaled_dot_product_attention(*plain, mask, is_causal=not masked)
    assert torch.allclose(out.to_local().cpu(), expected, atol=1e-6)
    out.square().sum().backward()
    assert q.grad.placements == (Shard(1),) and v.grad.to_local().isfinite().all()


def test_attention_of_a_dtensor_and_a_tensor_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = torch.ones(1, 2, 4, 8, device="cuda")
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        torch.nn.functional.scaled_dot_product_attention(
            distribute_tensor(x, init_device_mesh("cuda", (1,)), [Shard(1)]), x, x
        )
