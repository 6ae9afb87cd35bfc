"""Tensors, reductions and groups that NCCL refuses are refused in its words."""

import warnings

import pytest
import torch
import torch.distributed as dist

from virtualgpu.collectives.group import ProcessGroupNCCL
from virtualgpu.collectives.nccl_errors import check_own_gpus

pytestmark = [
    pytest.mark.usefixtures("world"),
    # newer versions of torch warn about old names of collectives
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def ones(*shape, **options):
    return torch.ones(*shape, device="cuda", **options)


STRIDED = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([ones(4, 4)], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(ones(4, 4), x),
    "all_gather_into_tensor, output": lambda x: dist.all_gather_into_tensor(x, ones(4, 4)),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [ones(4, 4)]),
    "all_to_all_single": lambda x: dist.all_to_all_single(ones(4, 4), x),
    "all_to_all": lambda x: dist.all_to_all([ones(4, 4)], [x]),
}


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize(
    "strided", [lambda: ones(4, 4).t(), lambda: ones(4, 8)[:, ::2], lambda: ones(1, 4).expand(4, 4)]
)
def test_tensors_that_are_not_contiguous(kind, strided):
    with pytest.raises(ValueError, match=r"^Tensors must be contiguous$"):
        STRIDED[kind](strided())


def test_channels_last_is_contiguous_for_nccl():
    x = ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(x)
    assert x.sum().item() == 120
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(x[:, :2])


@pytest.mark.parametrize(("dtype", "name"), [(torch.int16, "Short"), (torch.uint16, "UInt16")])
def test_dtypes_that_nccl_does_not_have(dtype, name):
    with pytest.raises(
        TypeError, match=f"^Input tensor data type is not supported for NCCL process group: {name}$"
    ):
        dist.broadcast(ones(2, dtype=dtype), 0)
    with pytest.raises(RuntimeError, match=f"^Unconvertible NCCL type {name}$"):
        dist.all_to_all_single(ones(2, dtype=dtype), ones(2, dtype=dtype))


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_reductions_that_nccl_does_not_have(op):
    with pytest.raises(ValueError, match=f"^Cannot use ReduceOp.{op} with NCCL$"):
        dist.all_reduce(ones(2, dtype=torch.int64), op=getattr(dist.ReduceOp, op))


def test_a_mean_of_booleans():
    with pytest.raises(TypeError, match=r"^Cannot use ReduceOp.AVG with boolean inputs$"):
        dist.all_reduce(ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)


def test_tensors_of_the_cpu():
    with pytest.raises(RuntimeError, match="^No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


def test_a_transposed_tensor_is_sent_with_a_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones(3, 4).t(), 0), dist.P2POp(dist.irecv, x := ones(4, 3), 0)]
        )
        works[0].wait()
    assert [str(each.message).split(".")[0] for each in caught] == [
        "Detected non-contiguous tensor in P2P operations"
    ]
    assert x.sum().item() == 12


def test_a_tensor_with_gaps_is_not_sent():
    with pytest.raises(ValueError, match=r"^Tensors for P2P must be non-overlapping and dense$"):
        dist.isend(ones(4, 8)[:, ::2], 0)


def gpu(number, machine="a", count=4):
    return ["host", machine, number, count]


@pytest.mark.parametrize(
    ("rank", "gpus", "said"),
    [
        (
            0,
            [gpu(0), gpu(0)],
            r"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n"
            r"Each .*Call torch.cuda.set_device\(local_rank\)",
        ),
        (
            2,
            [gpu(0), gpu(3), gpu(3)],
            "Duplicate GPU detected : rank 2 and rank 1 both on CUDA device 4000",
        ),
        (0, [gpu(0), gpu(3), gpu(3)], "ncclRemoteError: .*remote process exiting prematurely"),
        (1, [gpu(0, count=1), gpu(0, count=1)], "this machine has 1 for 2 ranks"),
    ],
)
def test_ranks_that_share_a_gpu(rank, gpus, said):
    with pytest.raises(dist.DistBackendError, match="^NCCL error in: ") as caught:
        check_own_gpus(rank, gpus)
    assert caught.match(said)


@pytest.mark.parametrize("gpus", [[gpu(0), gpu(1)], [gpu(0), gpu(0, "b")], [None, None], [gpu(0)]])
def test_ranks_with_gpus_of_their_own(gpus):
    check_own_gpus(0, gpus)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_added_and_moved(dtype):
    x = torch.tensor([1.5, -2.0], device="cuda").to(dtype)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    dist.reduce_scatter_tensor(y := torch.empty_like(x), parts[0])
    assert y.dtype == dtype and y.float().tolist() == [1.5, -2.0]


def test_float8_dtypes_that_nccl_does_not_add():
    with pytest.raises(RuntimeError, match=r"^Unsupported Float8 type for NCCL reduction$"):
        dist.all_reduce(ones(2).to(torch.float8_e4m3fnuz))


def test_a_list_of_another_length_than_the_group():
    with pytest.raises(
        ValueError,
        match=(
            r"^ProcessGroupNCCL::scatter: Incorrect input list size 2. Input list size should be "
            r"1, same as"
        ),
    ):
        dist.scatter(ones(2), [ones(2), ones(2)], 0)
    with pytest.raises(
        ValueError,
        match=(
            r"^ProcessGroupNCCL::gather: Incorrect output list size 2. Output list size should be "
            r"1, same as"
        ),
    ):
        dist.gather(ones(2), [ones(2), ones(2)], 0)


def test_all_gather_needs_a_fitting_tensor_for_each_rank():
    with pytest.raises(RuntimeError, match="needs a list of 1 tensors, one for each rank, but got"):
        dist.all_gather([ones(2), ones(2)], ones(2))
    with pytest.raises(RuntimeError, match="got tensors of 3 elements for a source of 2"):
        dist.all_gather([ones(3)], ones(2))


def test_splits_of_all_to_all_single_that_do_not_fit():
    with pytest.raises(RuntimeError, match="Split sizes doesn't match total dim 0 size"):
        dist.all_to_all_single(ones(4), ones(4), [4], [3])
    with pytest.raises(RuntimeError, match="Number of tensor splits not equal to group size"):
        dist.all_to_all_single(ones(4), ones(4), [2, 2], [4])


def test_sparse_tensors():
    x = torch.eye(3).to_sparse().cuda()
    with pytest.raises(RuntimeError, match="^NCCL does not support all_reduce with sparse"):
        dist.all_reduce(x)
    with pytest.raises(NotImplementedError, match=r"^Could not run 'c10d::broadcast_' with"):
        dist.broadcast(x, 0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True).cuda())
    with pytest.raises(RuntimeError, match=r"NCCL does not support all_reduce with sparse tensors"):
        model(torch.tensor([1], device="cuda")).square().sum().backward()


@pytest.mark.parametrize("rank", [5, -1])
def test_ranks_that_the_group_does_not_have(rank):
    for name, call in (
        ("Broadcast", lambda: dist.broadcast(ones(1), src=rank)),
        ("Reduce", lambda: dist.reduce(ones(1), dst=rank)),
    ):
        with pytest.raises(dist.DistBackendError) as raised:
            call()
        said = str(raised.value)
        assert "invalid argument (run with NCCL_DEBUG=WARN for details), NCCL version" in said
        assert f"Last error:\n{name} : invalid root {rank} (root should be in the 0..1" in said
    with pytest.raises(ValueError, match=f"^ProcessGroupNCCL::gather: invalid root rank: {rank}$"):
        dist.gather(ones(1), dst=rank)
    with pytest.raises(ValueError, match=f"^ProcessGroupNCCL::scatter: invalid root rank: {rank}$"):
        dist.scatter(ones(1), src=rank)
    with pytest.raises(dist.DistBackendError, match=f"send with rank {rank} in a group of 1 ranks"):
        dist.send(ones(1), dst=rank)
    with pytest.raises(dist.DistBackendError, match=f"recv with rank {rank} in a group of 1 ranks"):
        dist.recv(ones(1), src=rank)


def test_a_collective_that_fails_at_its_start_does_not_block_the_next_one(monkeypatch):
    def fail(*args):
        raise RuntimeError("no start")

    monkeypatch.setattr(ProcessGroupNCCL, "broadcast", fail, raising=False)
    with pytest.raises(RuntimeError, match="no start"):
        dist.broadcast(ones(1), src=0)
        torch.cuda.synchronize()
    x = ones(2)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert x.tolist() == [1, 1]
