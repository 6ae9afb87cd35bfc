"""One rank of a world whose other ranks are assumed to do the same."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from virtualgpu.allocator import CachingAllocator
from virtualgpu.collectives import simulated

pytestmark = pytest.mark.usefixtures("machine", "world")
RANK, WORLD = 1, 4


@pytest.fixture
def world(machine, monkeypatch):
    """Make this process rank 1 of 4 ranks, as the environment variables say."""
    for name, value in simulated.REPLACED.items():
        monkeypatch.setattr(distributed_c10d, name, value)
    monkeypatch.setenv("RANK", str(RANK))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


def numbers(*values):
    return torch.tensor(values, device="cuda")


def milliseconds_on_two_streams(groups):
    """Return the time of two all_reduces on different streams and groups, in milliseconds."""
    tensors = [torch.zeros(1 << 26, device="cuda") for _ in groups]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in groups]
    torch.cuda.synchronize()
    start.record()
    for tensor, stream, group in zip(tensors, streams, groups, strict=True):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            dist.all_reduce(tensor, group=group)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_a_communicator_runs_one_collective_at_a_time_on_whatever_streams():
    one, other = dist.group.WORLD, dist.new_group(range(WORLD))
    alone = milliseconds_on_two_streams([one])
    assert milliseconds_on_two_streams([one, one]) > 1.8 * alone
    assert milliseconds_on_two_streams([one, other]) < 1.2 * alone


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_rank_sends_what_this_one_has():
    x, y, parts = (
        numbers(1.0, 2.0),
        torch.zeros(8, device="cuda"),
        [torch.zeros(2, device="cuda") for _ in range(WORLD)],
    )
    dist.all_reduce(x)
    assert x.tolist() == [4, 8]
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.broadcast(x, 3)
    assert x.tolist() == [4, 8]
    dist.all_gather(parts, x)
    assert [part.tolist() for part in parts] == [[4, 8]] * WORLD
    dist.reduce_scatter(x, list(torch.arange(8.0, device="cuda").chunk(WORLD)))
    assert x.tolist() == [8, 12]  # the second part, once per rank
    dist.reduce_scatter_tensor(x, torch.arange(8.0, device="cuda"), op=dist.ReduceOp.AVG)
    assert x.tolist() == [2, 3]
    dist.all_to_all_single(y, torch.arange(8.0, device="cuda"))
    assert y.tolist() == [2, 3] * WORLD


def test_objects_are_gathered_from_all():
    said = [None] * WORLD
    dist.all_gather_object(said, {"rank": RANK})
    assert said == [{"rank": RANK}] * WORLD


def test_a_value_that_only_another_rank_has_is_refused():
    with pytest.raises(
        NotImplementedError,
        match=r"^send\(1 x float32\): its values are those of a rank that is only simulated",
    ):
        dist.recv(numbers(1.0), 0)
    with pytest.raises(
        NotImplementedError,
        match=(
            r"^scatter\(1 x float32, src=3\): its values are those of a rank that is only "
            r"simulated"
        ),
    ):
        dist.scatter(numbers(1.0), src=3)


def test_activations_of_another_rank_come_without_values(machine):
    with machine.without_values():
        x = torch.empty(8, device="cuda")
        dist.recv(x, 0)
    with pytest.raises(RuntimeError, match="the values of this tensor on cuda:0 were not kept"):
        x.tolist()


def test_groups_of_some_ranks_know_who_takes_part():
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    x = numbers(1.0)
    dist.all_reduce(x, group=odd)
    assert (x.item(), dist.get_rank(odd), dist.get_rank(even)) == (2, 0, -1)


def test_ddp_takes_the_mean_of_equal_gradients():
    torch.manual_seed(0)
    alone = nn.Linear(3, 2, device="cuda")
    parallel = DistributedDataParallel(nn.Linear(3, 2, device="cuda"))
    parallel.module.load_state_dict(alone.state_dict())
    x = torch.ones(5, 3, device="cuda")
    alone(x).sum().backward()
    parallel(x).sum().backward()
    assert torch.equal(alone.weight.grad, parallel.module.weight.grad)
    gc.collect()
    dist.all_reduce(torch.ones(1, device="cuda"))  # drops works that nobody has waited for


@pytest.mark.parametrize("rising", [False, True])
def test_a_collective_raises_addresses_where_the_profile_says_so(rising, monkeypatch):
    x = numbers(1.0)
    raised = []
    monkeypatch.setattr(CachingAllocator, "raise_addresses", lambda memory: raised.append(memory))
    monkeypatch.setattr(x._gpu, "profile", replace(x._gpu.profile, rising_addresses=rising))
    dist.all_reduce(x)
    assert raised == [x._gpu.allocator] * rising
