"""Processes that a script starts: they are measured, and what they find is put together."""

import socket
import textwrap

import pytest

from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import run
from gputrace.fit.script_processes import Ended, together

CONTEXT = 100
# `start` is the line that starts the processes.
SCRIPT = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(device, parallel=lambda model: model):
    model = parallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1000):
        x = torch.randn(64, 256, device=device)
        y = torch.randint(0, 10, (64,), device=device)
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        correct = (output.argmax(1) == y).sum().item()
        loss.backward()
        optimizer.step()
        print(step, loss.item(), correct)

def alone(rank, ranks):
    train("cuda")

def ddp(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    train(rank, nn.parallel.DistributedDataParallel)

def wrong(rank, ranks):
    x = torch.ones(8, device="cuda")
    raise ValueError("this rank is wrong")

def large(rank, ranks):
    torch.zeros(1 << 34, device="cuda")

def start_with_spawn(work, ranks):
    mp.spawn(work, (ranks,), ranks)

def start_each(work, ranks, method):
    context = mp.get_context(method)
    processes = [context.Process(target=work, args=(rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

if __name__ == "__main__":
    {start}
"""


@pytest.fixture
def started(tmp_path):
    """A function that measures a script that contains this line."""

    def of(start: str, gpus: int = 1, **others: object) -> Outcome:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = tmp_path / "train.py"
        source = SCRIPT.replace("{start}", start).replace("{port}", str(port))
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return run(Wish(str(path), [], False, "T4", 4, gpus=gpus, **others))

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    ["start_with_spawn(alone, 1)", "start_each(alone, 1, 'fork')", "start_each(alone, 1, 'spawn')"],
)
def test_a_process_takes_what_the_script_itself_would_take(started, start):
    child, script = started(start), started("train('cuda')")
    assert (child.failed, child.fits, child.processes, script.processes) == ("", True, 1, 0)
    assert (child.used, child.allocated, child.parts) == (
        script.used,
        script.allocated,
        script.parts,
    )
    assert child.step == pytest.approx(script.step, rel=0.05) and child.steps >= 4
    assert child.changes == script.changes
    assert [line.partition(" ")[2] for line in child.made_up] == [
        "correct = (output.argmax(1) == y).sum().item()"
    ]


@pytest.mark.slow
def test_processes_that_share_a_gpu_take_its_memory_together(started):
    one, two = started("start_with_spawn(alone, 1)"), started("start_with_spawn(alone, 2)")
    assert (two.failed, two.processes, two.allocated) == ("", 2, one.allocated)
    assert two.used == 2 * one.used == one.used + two.others


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, "half the batch", "optimizer with foreach=False"])
def test_ranks_have_a_gpu_each_and_make_the_same_steps(started, change):
    ranks = started("start_with_spawn(ddp, 2)", gpus=2, change=change)
    assert (ranks.failed, ranks.processes, len(ranks.by_device)) == ("", 2, 2)
    assert ranks.by_device[0] == ranks.by_device[1] == ranks.used and not ranks.others
    # DDP keeps the gradients in buckets, which are as large as the parameters.
    assert ranks.parts["gradients"] >= ranks.parts["parameters"] > 0
    assert ranks.changed == (change == "optimizer with foreach=False")


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_line(started):
    failed = started("start_with_spawn(wrong, 1)").failed
    assert failed.startswith('train.py:33 raise ValueError("this rank is wrong"): ValueError: this')
    assert started("start_each(wrong, 2, 'spawn')").failed == failed
    large = started("start_with_spawn(large, 1)")
    assert (large.failed, large.fits) == ("", False)


def of(device: int, used: list[int], **others: object) -> Outcome:
    reserved = used[device] - CONTEXT
    return Outcome(
        1000, used=used[device], reserved=reserved, device=device, by_device=used, **others
    )


def test_the_process_that_holds_most_of_the_fullest_gpu_is_shown():
    main = of(0, [0, 0])
    first = Ended(of(0, [600, 0], steps=4, step=1.0, allocated=1, made_up=["a"]), True, 1.0)
    second = Ended(of(1, [0, 700], steps=4, step=2.0, allocated=2, made_up=["a", "b"]), True, 2.0)
    whole = together(main, [second, first], CONTEXT)
    assert (whole.device, whole.used, whole.by_device, whole.others) == (1, 700, [600, 700], 0)
    assert (whole.step, whole.allocated, whole.made_up, whole.processes) == (2.0, 2, ["a", "b"], 2)
    assert together(main, [], CONTEXT) is main


def test_the_first_failure_counts_and_those_after_enough_steps_do_not():
    def ended(time: float, failed: str, has_enough: bool = False) -> Ended:
        return Ended(of(0, [500], failed=failed, steps=4), has_enough, time)

    main = of(0, [0], failed="a process has ended")
    both = together(main, [ended(2.0, "a peer is gone"), ended(1.0, "wrong")], CONTEXT)
    assert both.failed == "wrong"
    late = together(main, [ended(1.0, "", True), ended(2.0, "a peer is gone")], CONTEXT)
    assert late.failed == ""
    assert together(main, [ended(1.0, "")], CONTEXT).failed == "a process has ended"
    out_of_memory = Ended(of(0, [500], fits=False), False, 3.0)
    assert together(main, [ended(1.0, "wrong"), out_of_memory], CONTEXT).fits is False
