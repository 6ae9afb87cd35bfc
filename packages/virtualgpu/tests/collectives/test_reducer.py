"""DDP's reducer in a world of one rank."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
    param_to_acc_grad_map,
)
from torch.nn.parallel import DistributedDataParallel

from virtualgpu import hardware

pytestmark = pytest.mark.usefixtures("machine", "world")


def let_go_of_works() -> None:
    """Drop the works of collectives for which nobody has waited."""
    torch.cuda.synchronize()
    gc.collect()
    dist.all_reduce(torch.ones(1, device="cuda"))


def test_an_optimizer_in_the_backward_comes_after_the_gradients_on_its_stream():
    model = torch.nn.Linear(3, 3).cuda()
    inside = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1})
    parallel = DistributedDataParallel(inside, device_ids=[0])
    x = torch.ones(2, 3, device="cuda")
    for _ in range(2):  # the second step rebuilds the buckets
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        parallel(x).sum().backward()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), inside.parameters(), strict=True)
    )
    param_to_acc_grad_map.clear()  # torch keeps the parameters in this attribute


def test_with_uneven_inputs_the_mean_is_over_the_ranks_that_are_there():
    parallel = DistributedDataParallel(torch.nn.Linear(3, 3, bias=False).cuda(), device_ids=[0])
    with parallel.join(divide_by_initial_world_size=False):
        parallel(torch.ones(1, 3, device="cuda")).sum().backward()
    assert parallel.module.weight.grad.tolist() == [[1.0] * 3] * 3
    let_go_of_works()


def test_a_bucket_keeps_the_values_of_tensors_that_are_kept_one_by_one(monkeypatch):
    monkeypatch.setattr(hardware.machine(), "largest_kept", 4000)
    # its bucket has 4,004 bytes
    parallel = DistributedDataParallel(torch.nn.Linear(1000, 1).cuda(), device_ids=[0])
    parallel(torch.ones(1, 1000, device="cuda")).sum().backward()
    assert parallel.module.weight.grad.sum().item() == 1000
    let_go_of_works()


class Parts(torch.nn.Module):
    """Model with a layer on each of two GPUs, as in PyTorch's tutorial about DDP."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(300, 300).to("cuda:0"),
            torch.nn.Linear(300, 4).to("cuda:1"),
        )

    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).relu().to("cuda:1"))


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.1}],
)
@pytest.mark.parametrize("hook", [None, allreduce_hook])
def test_a_model_on_several_gpus_trains_as_it_does_alone(settings, hook):
    model = Parts()
    inside = copy.deepcopy(model)
    parallel = DistributedDataParallel(inside, **settings)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, parallel)]
    for x in torch.ones(3, 2, 300):
        for m, optimizer in zip((model, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), inside.parameters(), strict=True)
    )
    assert [p.grad.device.index for p in inside.parameters()] == [0, 0, 1, 1]
    let_go_of_works()


def test_buckets_of_a_model_on_several_gpus_lie_on_one_each():
    parameters = list(Parts().parameters())
    buckets, limits = dist._compute_bucket_assignment_by_size(
        tensors=parameters, bucket_size=[2**30], logger=None
    )
    assert (buckets, limits) == ([[0, 1], [2, 3]], [2**30] * 2)


@pytest.mark.parametrize("missing", ["find_unused_parameters=True", "join"])
def test_what_a_model_on_several_gpus_cannot_have_is_refused_by_name(missing):
    with pytest.raises(
        NotImplementedError, match=f"{missing}.* of a model on several GPUs is not supported"
    ):
        if missing == "join":
            parallel = DistributedDataParallel(Parts())
            with parallel.join():
                parallel(torch.ones(1, 300))
        else:
            DistributedDataParallel(Parts(), find_unused_parameters=True)
    let_go_of_works()
