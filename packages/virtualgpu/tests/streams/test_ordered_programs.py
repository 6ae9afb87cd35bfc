"""Typical ordered programs cause no race report, and the same programs without an order do."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import virtualgpu
from virtualgpu.streams.race_reports import OVERWRITTEN, STALE


@pytest.fixture(autouse=True)
def used():
    with virtualgpu.use(gpus=4, like="H200") as machine:
        torch.cuda.Stream()  # every operator is compared from here on
        torch.manual_seed(0)
        yield machine


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )


def batches(count: int = 64) -> DataLoader:
    return DataLoader(
        TensorDataset(torch.randn(count, 32), torch.randint(0, 10, (count,))),
        batch_size=16,
        pin_memory=True,
    )


def train_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_data_parallel_fed_from_the_host():
    """Check DataParallel, whose scatter copies on side streams."""
    net = classifier().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in batches():
        train_on(nn.DataParallel(net), optimizer, x, y.cuda(non_blocking=True))
    assert virtualgpu.races() == []


def prefetched(
    loader: DataLoader, waits: bool = True, records: bool = True
) -> Iterator[list[torch.Tensor]]:
    """Yield the batches. Each is copied on a side stream while the one before it is used."""
    stream = torch.cuda.Stream()

    def copied(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            return [x.cuda(non_blocking=True) for x in batch]

    source = iter(loader)
    following = copied(next(source))
    for batch in [*source, None]:
        here = torch.cuda.current_stream()
        if waits:
            here.wait_stream(stream)
        ready = following
        if records:
            for x in ready:
                x.record_stream(here)
        following = None if batch is None else copied(batch)
        yield ready
        del ready


def train_with(loader: Iterator[list[torch.Tensor]]) -> float:
    model = nn.Linear(32, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in loader:
        train_on(model, optimizer, x, y)
        del x, y
    return model.weight.sum().item()


def test_a_prefetcher():
    train_with(prefetched(batches()))
    assert virtualgpu.races() == []


@pytest.mark.filterwarnings("ignore::virtualgpu.streams.race_reports.RaceWarning")
def test_a_prefetcher_that_does_not_wait_reads_stale_batches():
    train_with(prefetched(batches(), waits=False))
    assert {race.kind for race in virtualgpu.races()} >= {STALE}


@pytest.mark.filterwarnings("ignore::virtualgpu.streams.race_reports.RaceWarning")
def test_a_prefetcher_that_records_no_stream_overwrites_what_is_read():
    train_with(prefetched(batches(128), records=False))
    assert {race.kind for race in virtualgpu.races()} == {OVERWRITTEN}


def test_a_pipeline_over_two_gpus():
    first, last = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).to(0), nn.Linear(32, 8).to(1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.1)
    for _ in range(2):
        outputs, previous = [], None
        for part in torch.randn(64, 32, device="cuda:0").chunk(8):
            hidden = first(part).to("cuda:1", non_blocking=True)
            if previous is not None:
                outputs.append(last(previous))
            previous = hidden
        outputs.append(last(previous))
        loss = torch.cat(outputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert virtualgpu.races() == []


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "with autocast and checkpoint"])
def test_training_on_a_stream_of_its_own(extras):
    model = classifier().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(enabled=extras)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x = torch.randn(16, 32, device="cuda")
            with torch.autocast("cuda", torch.float16, enabled=extras):
                loss = (
                    (checkpoint(model, x, use_reentrant=False) if extras else model(x))
                    .float()
                    .square()
                    .mean()
                )
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.cuda.current_stream().wait_stream(stream)
    assert loss.isfinite().item()
    assert virtualgpu.races() == []


def test_two_branches_on_two_streams():
    """Let both streams wait at the fork, and the first for the second at the join.

    The example is from PyTorch's notes on CUDA semantics.
    """
    left, right = nn.Linear(32, 8).cuda(), nn.Linear(32, 8).cuda()
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(2):
        x = torch.randn(16, 32, device="cuda")
        side.wait_stream(here)
        a = left(x)
        with torch.cuda.stream(side):
            b = right(x)
        here.wait_stream(side)
        (a + b).sum().backward()
        x.record_stream(side)
        b.record_stream(here)
    assert virtualgpu.races() == []


def test_results_brought_to_the_host_behind_the_work():
    events, arrived = [], []
    for step in range(4):
        loss = (torch.ones(10, device="cuda") * step).sum()
        arrived.append(loss.to("cpu", non_blocking=True))
        events.append(torch.cuda.current_stream().record_event())
        if step:
            events[step - 1].synchronize()
            assert arrived[step - 1].item() == 10 * (step - 1)
    assert virtualgpu.races() == []
