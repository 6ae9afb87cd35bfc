"""Events of collectives in torch.profiler."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("machine", "world")


def test_a_collective_is_an_asynchronous_event_with_the_shapes_of_its_inputs():
    x = torch.ones(3, 4, device="cuda")
    z = torch.ones(2, dtype=torch.complex64, device="cuda")
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        dist.group.WORLD._allgather_base(torch.empty_like(x), x).wait()
        dist.all_reduce(z)
    events = [event for event in profile.function_events if event.name.startswith("nccl:")]
    assert [(event.name, event.input_shapes) for event in events] == [
        ("nccl:all_reduce", [[3, 4]]),
        ("nccl:_all_gather_base", [[3, 4]]),
        ("nccl:all_reduce", [[2, 2]]),
    ]
    assert all(event.is_async for event in events)


def test_a_collective_is_an_event_beside_the_work_of_the_gpu():
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4, device="cuda"))
    events = [event for event in profile.events() if event.name == "nccl:all_reduce"]
    assert [(event.is_async, event.input_shapes) for event in events] == [(True, [[3, 4]])]
