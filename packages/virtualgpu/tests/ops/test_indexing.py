"""Indexing, embeddings and data-dependent shapes allocate the same sizes as on a real GPU."""

import pytest
import torch

from virtualgpu.ops import cub
from virtualgpu.ops.indexing import nonzero_plan
from virtualgpu.ops.nn.embeddings import sorted_gradient

from .recorded import check

NAMES = (
    "shared/embedding_bag", "shared/one_hot", "shared/gather", "shared/index_select",
    "shared/index_long", "shared/unique", "more/unique_inv", "more/unique_consec",
    "more/index_put_acc", "more/index_2", "more/index_cpu", "more/masked_scatter", "more/bincount",
    "more/histc", "more/take", "more/emb_pad", "more/emb_bag_sum", "more/setitem_mask",
)  # fmt: skip


@pytest.mark.parametrize("name", [n for n in NAMES if n != "more/masked_scatter"])
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


@pytest.mark.parametrize(
    "plan",
    [
        nonzero_plan(5000, 2, 7, 132),
        tuple(x for x in sorted_gradient(5000, 10, 4, 8, 4, True) if type(x) is int),
    ],
)
def test_a_plan_gives_back_what_it_takes_but_its_result(plan):
    left = list(plan)
    for step in plan:
        if step < 0:
            left.remove(step)
            left.remove(-step)
    assert left in ([], [7 * 2 * 8])


def test_index_on_another_gpu_is_refused(machine):
    x = torch.arange(3, device="cuda:0")
    with pytest.raises(
        RuntimeError,
        match=(
            r"indices should be either on cpu or on the same device as the indexed tensor "
            r"\(cuda:0\)"
        ),
    ):
        x[torch.tensor([1], device="cuda:1")]
    with pytest.raises(RuntimeError, match=r"indexed tensor \(cpu\)"):
        torch.arange(3)[torch.tensor([1], device="cuda:0")]


@pytest.mark.parametrize(
    "use",
    [
        lambda x, at: x[at],
        lambda x, at: x.__setitem__(at, 1.0),
        lambda x, at: x.index_put(at, x.sum()),
    ],
)
@pytest.mark.parametrize("sizes", [(3, 2), (0, 2)])
def test_positions_that_do_not_fit_together_are_an_index_error(machine, use, sizes):
    x, positions = (
        torch.ones(2, 3, 4, device="cuda"),
        tuple(torch.zeros(n, dtype=torch.long, device="cuda") for n in sizes),
    )
    with pytest.raises(
        IndexError,
        match=(
            rf"shape mismatch: indexing tensors could not be broadcast together with shapes "
            rf"\[{sizes[0]}\], \[2\]"
        ),
    ):
        use(x, positions)


def test_one_number_of_the_host_is_put_and_no_more(machine):
    x, at = torch.zeros(4, device="cuda"), torch.tensor([0, 2], device="cuda")
    x[at] = torch.tensor(1.0)
    x[at] += torch.tensor(1.0)
    x[at[:1]] = torch.tensor([3.0])
    assert x.tolist() == [3, 0, 2, 0]
    with pytest.raises(
        RuntimeError,
        match=(
            "Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu!"
        ),
    ):
        x[at] = torch.ones(2)
    with pytest.raises(
        RuntimeError, match="expected device cuda:0 but got device cpu for value tensor"
    ):
        x.index_put_((at,), torch.ones(2), accumulate=True)
    assert x.tolist() == [3, 0, 2, 0]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[[0, 1]],
        lambda x: x.T[:, [0, 1]],
        lambda x: x.index_put((torch.tensor(0),), x.sum()),
    ],
)
def test_an_index_of_nothing_is_an_error_of_the_hosts(machine, use):
    with pytest.raises(IndexError, match="index is out of bounds for dimension with size 0"):
        use(torch.empty(0, 3, device="cuda"))


def test_embedding_bag_agrees_with_the_cpu(machine):
    for mode in ("sum", "mean", "max"):
        bag = torch.nn.EmbeddingBag(20, 4, mode=mode)
        indices, offsets = torch.randint(0, 20, (11,)), torch.tensor([0, 3, 3, 8])
        expected = bag(indices, offsets)
        expected.sum().backward()
        wanted = bag.weight.grad.clone()
        bag.zero_grad()
        bag.cuda()
        got = bag(indices.cuda(), offsets.cuda())
        got.sum().backward()
        torch.testing.assert_close(got.cpu(), expected)
        torch.testing.assert_close(bag.weight.grad.cpu(), wanted)


def test_few_keys_are_sorted_by_one_block():
    assert cub.radix_sort(2304, 8, 8) == 1 < cub.radix_sort(2305, 8, 8)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_products_of_what_is_scattered_are_refused_as_on_cuda(dtype, machine):
    x, index = (
        torch.ones(2, 2, dtype=dtype, device="cuda"),
        torch.zeros(2, 2, dtype=torch.int64, device="cuda"),
    )
    for work in (
        lambda: x.scatter(0, index, x, reduce="multiply"),
        lambda: x.scatter_(0, index, x, reduce="multiply"),
    ):
        with pytest.raises(
            RuntimeError, match='"cuda_scatter_gather_base_kernel_func" not implemented for'
        ):
            work()
    with pytest.raises(
        RuntimeError, match='"cuda_scatter_fill_base_kernel_reduce_multiply" not implemented for'
    ):
        x.scatter_(0, index, 1, reduce="multiply")
    assert x.scatter(0, index, x, reduce="add").device == x.device


def test_one_value_on_another_device_is_copied():
    number, place = torch.tensor(3.0, device="cuda"), torch.tensor([0, 0])
    assert torch.zeros(2).index_put_((place,), number, accumulate=True).tolist() == [6, 0]
    target = torch.zeros(2)
    target[target == 0] = number
    assert target.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="^masked_fill_: Expected inputs to be on same device"):
        target.masked_fill_(torch.tensor([True, False]), number)
