"""Copies and sums over several virtual GPUs, as in torch.nn.parallel."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm


@pytest.fixture(autouse=True)
def used(machine):
    return machine


def table() -> torch.Tensor:
    return torch.arange(10.0, device="cuda").reshape(5, 2)


def places(tensors) -> list[int]:
    return [x.get_device() for x in tensors]


def test_broadcast_leaves_the_first_where_it_is():
    x = table()
    copies = comm.broadcast(x, [0, 1, 2])
    assert places(copies) == [0, 1, 2] and copies[0].data_ptr() == x.data_ptr()
    assert all(torch.equal(copy.cpu(), x.cpu()) for copy in copies)
    out = [torch.empty(5, 2, device=f"cuda:{k}") for k in (1, 3)]
    assert torch.equal(comm.broadcast(x, out=out)[1].cpu(), x.cpu())


def test_broadcast_coalesced_keeps_order_and_dtypes():
    tensors = [
        table(),
        table().half(),
        table() + 1,
        torch.empty(0, device="cuda"),
        torch.tensor(3, device="cuda"),
    ]
    rows = comm.broadcast_coalesced(tensors, [0, 3])
    assert [places(row) for row in rows] == [[0] * 5, [3] * 5]
    for got, sent in zip(rows[1], tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got.cpu(), sent.cpu())


def test_sparse_tensors_are_broadcast_among_dense_ones():
    tensors = [table(), *(torch.eye(3, device="cuda").mul(k).to_sparse() for k in (1, 2))]
    (_, there) = comm.broadcast_coalesced(tensors, [0, 1])
    assert places(there) == [1, 1, 1] and there[2].to_dense().sum().item() == 6


@pytest.mark.parametrize(("sizes", "rows"), [(None, [2, 2, 1]), ([1, 3, 1], [1, 3, 1])])
@pytest.mark.parametrize("source", ["cpu", "cuda:0", "cuda:3"])
def test_scatter(sizes, rows, source):
    x = table().to(source)
    parts = comm.scatter(x, [0, 1, 2], sizes)
    assert places(parts) == [0, 1, 2] and [len(part) for part in parts] == rows
    assert torch.equal(torch.cat([part.cpu() for part in parts]), x.cpu())


def test_scatter_and_gather_into_tensors_that_are_given():
    out = [torch.empty(2, 2, device="cuda:1"), torch.empty(3, 2, device="cuda:2")]
    assert comm.scatter(table(), out=out)[1] is out[1] and out[1].tolist() == table()[2:].tolist()
    whole = torch.empty(5, 2, device="cuda:3")
    assert comm.gather(out, out=whole) is whole and whole.tolist() == table().tolist()


def test_gathered_channels_stay_last_and_copies_have_versions_of_their_own():
    images = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert comm.gather(comm.scatter(images, [0, 1])).is_contiguous(
        memory_format=torch.channels_last
    )
    _, (first, second) = comm.broadcast_coalesced([table(), table()], [0, 1])
    first.zero_()
    assert (first._version, second._version) == (1, 0)


def test_scatter_of_fewer_rows_than_devices_and_along_columns():
    assert places(comm.scatter(table()[:1], [0, 1])) == [0]
    assert [part.shape for part in comm.scatter(table(), [0, 1], dim=1)] == [(5, 1), (5, 1)]


@pytest.mark.parametrize(
    ("destination", "place"),
    [("cpu", "cpu"), (None, "cuda:0"), (2, "cuda:2"), (torch.device("cuda:1"), "cuda:1")],
)
def test_gather(destination, place):
    gathered = comm.gather([table(), table().cuda(1) + 1], 0, destination)
    assert (gathered.device, gathered.shape) == (torch.device(place), (10, 2))
    assert torch.equal(gathered.cpu(), torch.cat([table().cpu(), table().cpu() + 1]))


def test_reduce_add():
    parts = [table(), table().cuda(1), table().cuda(2)]
    total = comm.reduce_add(parts, 1)
    assert total.device == torch.device("cuda:1") and torch.equal(total.cpu(), 3 * table().cpu())
    assert torch.equal(parts[1].cpu(), table().cpu())
    rows = [[table(), table()[:2]], [table().cuda(1), table()[:2].cuda(1)]]
    assert [x.sum().item() for x in comm.reduce_add_coalesced(rows)] == [90, 12]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda x: comm.scatter(x, [0, 1], [1, 1]), "(?i)siz"),
        (lambda x: comm.scatter(x, [0, 1], [1, 1, 3]), "(?i)siz|device"),
        (lambda x: comm.scatter(x, []), "at least one device to scatter to"),
        (lambda x: comm.scatter(x, out=[]), "at least one output tensor to scatter to"),
        (
            lambda x: comm.scatter(x, out=[x[:2].cpu(), x[2:]]),
            "but output tensor at index 0 has device 'cpu'",
        ),
        (
            lambda x: comm.scatter(x, out=[x[:2], x[2:, :1]]),
            "Output tensor at index 1 has incorrect shape",
        ),
        (
            lambda x: comm.scatter(x, out=[x[:2], x[3:]]),
            r"Total size for output tensors along scatter dim 0 does not match",
        ),
        (
            lambda x: comm.broadcast(x, out=[x.cuda(1), x.cpu()]),
            "but output tensor at index 1 has device 'cpu'",
        ),
        (
            lambda x: comm.broadcast(x, out=[x.cuda(1), x[:1]]),
            r"same shape as the source tensor \[5, 2\], but output tensor at index 1",
        ),
        (lambda x: comm.gather([x, x[None]]), "the same number of dimensions"),
        (
            lambda x: comm.gather([x, x], out=x),
            r"Expected out tensor to have shape \[10, 2\], but got \[5, 2\]",
        ),
        (lambda x: comm.broadcast(x, [0, 9]), "(?i)device"),
        (lambda x: comm.broadcast_coalesced([x.cpu()], [0, 1]), "must be on devices"),
        (lambda x: comm.gather([x, torch.ones(3, 3, device="cuda:1")]), "(?i)siz|shape"),
        (lambda x: comm.gather([x.cpu(), x]), "(?i)gpu|cuda|device"),
    ],
)
def test_mistakes(mistake, text):
    with pytest.raises(RuntimeError, match=text):
        mistake(table())


def test_gradients_through_scatter_and_gather():
    x = torch.ones(4, 2, device="cuda", requires_grad=True)
    parts = nn.parallel.scatter(x, [0, 1])
    nn.parallel.gather([part * (k + 2) for k, part in enumerate(parts)], 1).sum().backward()
    assert x.grad.cpu()[:, 0].tolist() == [2, 2, 3, 3]


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU tensor is deprecated")
def test_parts_without_a_gradient_count_as_zeros():
    x = torch.ones(4, 2, device="cuda", requires_grad=True)
    nn.parallel.scatter(x, [0, 1])[1].sum().backward()
    assert x.grad[:, 0].tolist() == [0, 0, 1, 1]
    x = torch.ones(4, 2, requires_grad=True)
    nn.parallel.scatter(x, [0, 1])[1].sum().backward()
    assert x.grad.is_cpu and x.grad[:, 0].tolist() == [0, 0, 1, 1]
    layer = nn.Linear(2, 2).cuda()
    replicas = nn.parallel.replicate(layer, [0, 1, 2])
    replicas[2](torch.ones(3, 2, device="cuda:2")).sum().backward()
    assert layer.weight.grad.tolist() == [
        [3, 3],
        [3, 3],
    ] and layer.weight.grad.device == torch.device("cuda:0")


class Pair(nn.Module):
    def forward(self, batch: dict, scale: float = 1.0) -> dict:
        return {
            "y": batch["x"] * scale,
            "device": torch.full((1,), float(batch["x"].get_device()), device=batch["x"].device),
        }


def test_data_parallel_takes_dicts_and_keywords_and_uses_all_devices():
    out = nn.DataParallel(Pair())({"x": torch.ones(8, 2)}, scale=3.0)
    assert out["y"].sum().item() == 48 and out["device"].tolist() == [0, 1, 2, 3]


def test_data_parallel_on_chosen_devices():
    model = nn.DataParallel(nn.Linear(2, 2).cuda(2), device_ids=[2, 3], output_device=1)
    assert model(torch.ones(4, 2)).device == torch.device("cuda:1")


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")


def test_data_parallel_says_what_went_wrong_and_where():
    with pytest.raises(ValueError, match="Caught ValueError in replica 0 on device 0"):
        nn.DataParallel(Broken(2, 2).cuda())(torch.ones(8, 2))
    with pytest.raises(
        RuntimeError,
        match=(
            r"module must have its parameters and buffers on device cuda:0 \(device_ids\[0\]\) "
            r"but found one"
        ),
    ):
        nn.DataParallel(nn.Linear(2, 2))(torch.ones(4, 2))


def test_data_parallel_refuses_a_module_without_shapes():
    parallel = nn.DataParallel(nn.LazyLinear(3).cuda(), [0, 1])
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        parallel(torch.ones(2, 4, device="cuda"))
