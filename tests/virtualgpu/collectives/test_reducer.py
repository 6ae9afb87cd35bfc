"""DDP's reducer in a world of one rank."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward, param_to_acc_grad_map
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("machine", "world")


def test_an_optimizer_in_the_backward_comes_after_the_gradients_on_its_stream():
    model = torch.nn.Linear(3, 3).cuda()
    inside = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1})
    parallel = DistributedDataParallel(inside, device_ids=[0])
    x = torch.ones(2, 3, device="cuda")
    for _ in range(2):  # the second step builds the buckets anew
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        parallel(x).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), inside.parameters(), strict=True))
    param_to_acc_grad_map.clear()  # torch keeps the parameters there


def test_with_uneven_inputs_the_mean_is_over_the_ranks_that_are_there():
    parallel = DistributedDataParallel(torch.nn.Linear(3, 3, bias=False).cuda(), device_ids=[0])
    with parallel.join(divide_by_initial_world_size=False):
        parallel(torch.ones(1, 3, device="cuda")).sum().backward()
    assert parallel.module.weight.grad.tolist() == [[1.0] * 3] * 3
    gc.collect()
    dist.all_reduce(torch.ones(1, device="cuda"))  # lets go of works that nobody waited for


def test_a_model_on_several_gpus_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).to("cuda:0"), torch.nn.Linear(3, 3).to("cuda:1"))
    with pytest.raises(NotImplementedError, match="DistributedDataParallel of a model whose parameters lie on several GPUs is not served"):
        DistributedDataParallel(model)
