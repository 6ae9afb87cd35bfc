"""The virtual NCCL in a world of one rank: what it computes, keeps and refuses."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import virtualgpu
from virtualgpu import hardware

pytestmark = pytest.mark.usefixtures("machine", "world")


def test_a_batch_that_was_waited_for_keeps_nothing():
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    before = torch.cuda.memory_allocated()
    with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    del x, y, manager
    assert torch.cuda.memory_allocated() == before - 2 * 4096


def test_what_nobody_waits_for_is_kept_until_the_watchdog_has_looked():
    x, y = torch.ones(1000, device="cuda"), torch.ones(1, device="cuda")
    before = torch.cuda.memory_allocated()
    dist.all_reduce(x, async_op=True)
    torch.cuda.synchronize()
    del x
    dist.all_reduce(y)
    assert torch.cuda.memory_allocated() == before
    gc.collect()  # a real process needs about a watchdog's period for this
    dist.all_reduce(y)
    assert torch.cuda.memory_allocated() == before - 4096


def test_a_functional_collective_is_there_for_each_of_its_tensors_however_late():
    x, y = torch.ones(1000, device="cuda"), torch.ones(1, device="cuda")
    before = torch.cuda.memory_allocated()
    results = functional.all_reduce_coalesced([x, y], "sum", dist.group.WORLD)
    torch.cuda.synchronize()
    gc.collect()
    dist.all_reduce(y)  # the watchdog has looked by now
    assert [functional.wait_tensor(result).sum().item() for result in results] == [1000, 1]
    del results
    assert torch.cuda.memory_allocated() == before


def test_a_rank_sends_to_itself_in_a_batch():
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, y, 0), dist.P2POp(dist.isend, x, 0)]
    ):
        work.wait()
    assert y.tolist() == [1, 1, 1]


def test_a_rank_that_receives_from_itself_what_it_never_sent_is_told():
    with pytest.raises(
        dist.DistBackendError,
        match="^Rank 0 waits in recv from itself, to which it has sent nothing",
    ):
        dist.recv(torch.zeros(3, device="cuda"), 0)
    hardware.machine().under_way.clear()


def test_a_destroyed_group_is_told():
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)
    dist.destroy_process_group(group)
    # these are PyTorch's own words
    with pytest.raises(ValueError, match="is not initialized in the world group map") as raised:
        dist.all_reduce(torch.ones(3, device="cuda"), group=group)
    assert (
        str(raised.value.__context__)
        == "all_reduce(3 x float32, SUM) in a group that this rank has destroyed"
    )
    del raised


def test_a_work_that_was_waited_for_still_has_its_result():
    work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    work.wait()
    assert [x.item() for x in work.get_future().value()] == [1]


def test_what_is_sent_may_be_freed_before_anybody_waits():
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    before = torch.cuda.memory_allocated()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)])
    del x
    assert torch.cuda.memory_allocated() == before - 4096
    for work in works:
        work.wait()
    assert y.sum() == 1000


def test_a_collective_does_not_wait_for_what_comes_after_it_in_the_program():
    """Let the stream wait for more work before anybody waits for the collective."""
    x, a = torch.ones(1000, device="cuda"), torch.ones(4096, 4096, device="cuda")
    sent, computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first = dist.all_reduce(x, async_op=True)
    torch.cuda._sleep(10**9)
    computed.record()
    second = dist.all_reduce(a, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        first.wait()
        sent.record()
    second.wait()
    torch.cuda.synchronize()
    assert sent.elapsed_time(computed) > 100  # milliseconds


def test_nccl_receives_from_a_rank_that_is_named():
    with pytest.raises(
        NotImplementedError, match="ProcessGroupNCCL does not support recvAnysource"
    ):
        dist.recv(torch.ones(1, device="cuda"))


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_parts_of_another_size_are_refused_in_nccls_words():
    x, y = torch.ones(2, device="cuda"), torch.ones(3, device="cuda")
    with pytest.raises(
        ValueError, match="^output tensor size must be equal to world_size times input tensor size$"
    ):
        dist.all_gather_into_tensor(y, x)
    with pytest.raises(
        ValueError, match="^input tensor must be the same size as output size times world size$"
    ):
        dist.reduce_scatter_tensor(y, x)


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor. is deprecated")
def test_parts_of_another_shape_and_the_same_size_are_scattered():
    x, y = torch.ones(1, 2, device="cuda"), torch.zeros(2, device="cuda")
    dist.reduce_scatter_tensor(y, x)
    assert y.tolist() == [1, 1]


def test_gloo_moves_tensors_on_gpus_through_the_host():
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    group = dist.new_group([0], backend="gloo")
    dist.all_gather([y], x, group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert y.tolist() == x.tolist() == [1, 1, 1]
    dist.barrier(group=group)


def test_gloo_moves_no_values_where_there_are_none(monkeypatch):
    group = dist.new_group([0], backend="gloo")
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    monkeypatch.setattr(hardware.machine(), "largest_kept", 4)
    unknown = torch.ones(3, device="cuda")
    dist.all_reduce(x, group=group)
    dist.all_gather([y], unknown, group=group)
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="the values of this tensor on cuda:0 were not kept"):
        y.tolist()


def test_a_group_made_by_hand_runs_collectives_of_nccl():
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    x, y = torch.full([2], 3.0, device="cuda"), torch.zeros(2, device="cuda")
    with torch.autograd.profiler.profile() as profile:
        group.allreduce([x], dist.AllreduceOptions()).wait()
        group._allgather_base(y, x).wait()
    assert y.tolist() == [3, 3]
    assert [event.name for event in profile.function_events if "nccl" in event.name] == [
        "nccl:all_reduce",
        "nccl:_all_gather_base",
    ]


def test_a_callback_of_a_future_runs_on_a_stream_of_its_own():
    """Check that the current stream waits only when somebody waits for the future."""
    x = torch.ones(1000, device="cuda")
    before, called, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    streams = []

    def callback(future):
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(10**9)
        return future.value()[0] + 1

    before.record()
    following = dist.all_reduce(x, async_op=True).get_future().then(callback)
    called.record()
    assert following.wait().sum().item() == 2000
    after.record()
    torch.cuda.synchronize()
    assert streams != [torch.cuda.current_stream()]
    assert before.elapsed_time(called) < before.elapsed_time(after) / 10
    assert not virtualgpu.races()


def test_an_error_in_a_callback_of_a_future_is_raised_to_who_waits():
    def callback(future):
        raise KeyError("name")

    work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    following = work.get_future().then(callback)
    with pytest.raises(RuntimeError, match="KeyError: 'name'"):
        following.wait()
    work.wait()
    del work, following
    gc.collect()  # the error's traceback keeps the future
