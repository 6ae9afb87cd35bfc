"""Ranks with virtual GPUs get gloo's values, and an H200's memory and times."""

import json
import re

import numpy as np
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import labkit
from gputrace.events import ALLOC, CATEGORIES
from labkit import cli
from labkit.ipython import TorchrunMagic

pytestmark = [pytest.mark.usefixtures("nothing_left", "on_cpus"), pytest.mark.slow]

START = """
    import os, time
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
"""

COLLECTIVES = """
    def mine(n=4):
        return torch.arange(float(n), device=device) + 10 * rank
    def given(n, parts=None):
        if parts is None:
            return torch.zeros(n, device=device)
        return [torch.zeros(n, device=device) for _ in range(parts)]
    result = []
    def check(x):
        result.append(x)
    for op in ("SUM", "MAX", "PRODUCT"):
        x = mine().long() if op == "PRODUCT" else mine().bfloat16()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op)); check(x.double())
    x = mine(); work = dist.all_reduce(x, async_op=True); work.wait(); check(x)
    y = given(4 * size); dist.all_gather_into_tensor(y, mine()); check(y)
    y = given(4, size); dist.all_gather(y, mine()); check(y)
    y = given(4); dist.reduce_scatter_tensor(y, mine(4 * size)); check(y)
    y = given(4); dist.reduce_scatter(y, list(mine(4 * size).chunk(size))); check(y)
    x = mine(); dist.broadcast(x, 1); check(x)
    x = mine(); dist.reduce(x, 1); check(x if rank == 1 else [])
    y = given(4); parts = [mine() + k for k in range(size)] if rank == 0 else None
    dist.scatter(y, parts, src=0); check(y)
    y = given(4, size) if rank == 0 else None; dist.gather(mine(), y, dst=0); check(y)
    y = given(4 * size); dist.all_to_all_single(y, mine(4 * size)); check(y)
    y, parts = given(2, size), list(mine(2 * size).chunk(size))
    if device == "cuda":
        dist.all_to_all(y, parts)
    else:  # gloo of torch 2.11 takes no lists
        y = given(2 * size); dist.all_to_all_single(y, torch.cat(parts)); y = list(y.chunk(size))
    check(y)
    sent, got = [rank + k + 1 for k in range(size)], sum(rank + k + 1 for k in range(size))
    y = given(got); dist.all_to_all_single(y, mine(got), sent, sent); check(y)
    x, y = mine(), given(4)
    for work in [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]: work.wait()
    check(y)
    y = given(4)
    sends, receives = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.isend, x, sends), dist.P2POp(dist.irecv, y, receives)]
    for work in dist.batch_isend_irecv(batch): work.wait()
    check(y)
    objects = [None] * size; dist.all_gather_object(objects, {"rank": rank}); check(objects)
    objects = [{"rank": rank}]; dist.broadcast_object_list(objects, 1); check(objects)
    groups = [dist.new_group(list(range(size))) for _ in range(2)]  # waited for in different orders
    x, y = mine(), mine()
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip((x, y), groups)]
    for work in (works if rank else reversed(works)): work.wait()
    check([x, y])
    import torch.distributed._functional_collectives as F
    ys = F.all_reduce(mine(), "sum", groups[0]), F.broadcast(mine(), 1, groups[0])
    check([F.wait_tensor(y) for y in ys])
    x = mine(40 * size).sin()  # its sums are rounded, in an order
    check(F.wait_tensor(F.reduce_scatter_tensor(x, "avg", 0, groups[0])))
    check([F.wait_tensor(y) for y in F.all_reduce_coalesced([x, x.cos()], "sum", groups[0])])
    def plain(x):
        if isinstance(x, torch.Tensor):
            return x.tolist()
        return [plain(y) for y in x] if isinstance(x, list) else x
    result = plain(result)
    if device == "cuda":
        xs = [mine(), mine()]
        with dist._coalescing_manager(device=xs[0].device, async_ops=True) as manager:
            for x in xs: dist.all_reduce(x)
        manager.wait()
        assert [x.tolist() for x in xs] == [result[3]] * 2
    dist.destroy_process_group()
"""

TRAINING = """
    result = {}
    for name, options in {
        "plain": {},
        "view": dict(gradient_as_bucket_view=True),
        "unused": dict(find_unused_parameters=True),
        "static": dict(static_graph=True),
        "small": dict(bucket_cap_mb=0.0001),
    }.items():
        torch.manual_seed(0)
        net = DDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device), **options)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((4, 8), rank + step + 1.0, device=device)).square().mean().backward()
            optimizer.step()
        result[name] = [p.tolist() for p in net.parameters()]
    dist.destroy_process_group()
"""


SHARDED = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module
    mesh, result = init_device_mesh(device, (2,)), {}
    def train(net, forward):
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad(); forward(step + 1.0); optimizer.step()
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        return [p.tolist() for p in whole]
    def filled(x):
        return torch.full((4, 8), x, device=device)
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    for keep in (True, False):
        model = net()
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh, reshard_after_forward=not keep)
        name = f"fsdp {keep}"
        result[name] = train(model, lambda x: model(filled(x + rank)).square().mean().backward())
    own = torch.device(device, rank if device == "cuda" else None)
    model = FullyShardedDataParallel(net(), device_id=own)
    train(model, lambda x: model(filled(x + rank)).square().mean().backward())
    state = model.state_dict()
    result["FullyShardedDataParallel"] = {name: state[name].tolist() for name in state}
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    result["tensor parallel"] = train(model, lambda x: model(filled(x)).square().mean().backward())
    for kind in (ScheduleGPipe, Schedule1F1B):
        part = net()[2 * rank]
        stage = PipelineStage(part, rank, 2, own)
        schedule = kind(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
        def forward(x):
            if rank:
                schedule.step(target=torch.zeros(8, 8, device=device))
            else:
                schedule.step(torch.full((8, 8), x, device=device))
        result[kind.__name__] = train(part, forward)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("program, ranks", [(COLLECTIVES, 3), (TRAINING, 2), (SHARDED, 2)])
def test_values_are_those_of_gloo(script, program, ranks):
    path = script(START + program)
    virtual = labkit.torchrun(path, ranks=ranks, like="H200", quiet=True)
    assert virtual.results == labkit.torchrun(path, ranks=ranks, devices="cpu", quiet=True).results


def test_gloo_sends_round_a_ring_before_anybody_receives(script):
    """Check the ring all-reduce of PyTorch's tutorial "Writing distributed applications"."""
    ring = """
    group = dist.new_group(backend="gloo")
    sent = torch.full((4,), rank, device=device)
    received = torch.zeros(4, dtype=torch.int64, device=device)
    works = [dist.isend(sent + tag, (rank + 1) % size, group, tag) for tag in (1, 2)]
    result = []
    for tag in (2, 1):  # gloo finds a message by its tag
        dist.recv(received, (rank - 1) % size, group, tag)
        result.append(received.tolist())
    for work in works: work.wait()
    """
    sums = labkit.torchrun(script(START + ring), ranks=3, like="H200", quiet=True).results
    assert sums == [[[(rank + 2) % 3 + tag] * 4 for tag in (2, 1)] for rank in range(3)]


def test_a_result_that_is_read_before_anybody_waits_is_a_race(script):
    early = """
    import warnings
    warnings.simplefilter("ignore")
    x = torch.full((2,), rank + 1.0, device=device)
    work = dist.all_reduce(x, async_op=True)
    read = x + 0
    work.wait()
    import labkit
    races = [(race.kind, race.first.name, race.second.name) for race in labkit.races()]
    result = [read.tolist(), (x + 0).tolist(), races]
    dist.destroy_process_group()
    """
    found = labkit.torchrun(script(START + early), like="H200", quiet=True).results
    assert found == [
        [[rank + 1.0] * 2, [3.0] * 2, [["stale read", "all_reduce", "add"]]] for rank in range(2)
    ]


MEASURED = """
    def figures():
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return [allocated, reserved, torch.cuda.max_memory_allocated()]
    dist.barrier()
    net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
    result = {"model": figures()}
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize(); dist.barrier(); begin = time.perf_counter()
    time.sleep(0.5 * rank)  # who comes first waits
    dist.all_reduce(x); torch.cuda.synchronize()
    result["seconds"] = time.perf_counter() - begin
    del x; torch.cuda.empty_cache()
    net = DDP(net)
    result["wrapped"] = figures()
    optimizer, x = torch.optim.AdamW(net.parameters(), 1e-4), torch.randn(512, 1024, device="cuda")
    for step in ("first", "second"):
        loss = net(x).square().mean(); result[step + " forward"] = figures()
        loss.backward(); result[step + " backward"] = figures()
        optimizer.step(); optimizer.zero_grad(); result[step + " step"] = figures()
    dist.destroy_process_group()
"""


WORKSPACES = 68157440  # bytes that cuBLAS and cuBLASLt take at the first product
EXPECTED = {
    "second forward": 254968832 - 135332352 + WORKSPACES,
    "second backward": 271778816 - 135332352 + WORKSPACES,
    "second step": 238191616 - 135332352 + WORKSPACES,
}


def test_memory_and_times_are_an_h200s(script):
    """Check the order that two H200s had in twelve runs. The sum of 64 MiB took them 249 µs."""
    runs = [
        labkit.torchrun(
            script(START + MEASURED), like="H200", values=False, virtual_time=True, quiet=True
        ).results
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    for found in runs[0]:
        assert found["seconds"] == pytest.approx(0.5 + 249e-6, abs=0.1e-3)
        growth = {point: found[point][0] - found["wrapped"][0] for point in EXPECTED}
        assert growth == EXPECTED


LAUNCHES = """
    import virtualgpu
    x = torch.ones(4, device="cuda")
    start = virtualgpu.host_time()
    for _ in range(10):
        x.add_(1)
    result = virtualgpu.host_time() - start
"""


def test_a_slower_host_takes_longer(script):
    path = script(START + LAUNCHES)
    usual, slow = (labkit.torchrun(path, like="T4", host=host, quiet=True) for host in (1, 2.5))
    assert slow.results == pytest.approx([2.5 * seconds for seconds in usual.results])
    with pytest.raises(ValueError, match="host="):
        labkit.torchrun(path, host=2)
    with pytest.raises(ValueError, match=r"from 0\.01 to 100"):
        labkit.torchrun(path, like="T4", host=0)


FULLY_SHARDED = """
    from torch.distributed.fsdp import fully_shard
    def allocated_and_peak():
        torch.cuda.synchronize()
        return [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    dist.barrier()
    net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(4096, 4096), nn.ReLU())]).cuda()
    for layer in net[::2]:
        fully_shard(layer)
    fully_shard(net)
    optimizer, x = torch.optim.AdamW(net.parameters(), 1e-4), torch.randn(512, 4096, device="cuda")
    result = []
    for step in range(2):
        loss = net(x).square().mean(); loss.backward()
        result.append(allocated_and_peak())
        optimizer.step(); optimizer.zero_grad()
        result.append(allocated_and_peak())
    dist.destroy_process_group()
"""


def test_memory_of_fsdp_is_an_h200s(script):
    """Check figures that two H200s had in twelve runs, after the backward pass and the step."""
    found = labkit.torchrun(
        script(START + FULLY_SHARDED), like="H200", values=False, quiet=True
    ).results
    first, second = (
        [[613549056, 840091136], [882050048, 1419052032]],
        [[1150551040, 1419052032], [882050048, 1419052032]],
    )
    assert found == [first + second] * 2


NORMALIZED = """
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    net = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda())
    result = []
    for step in range(2):
        net(torch.randn(4, 3, 16, 16, device="cuda")).square().mean().backward()
        result.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
"""


def test_sync_batch_norm_without_values_asks_for_the_same_memory(script):
    path = script(START + NORMALIZED)
    without = labkit.torchrun(path, like="H200", values=False, quiet=True).results
    assert without == labkit.torchrun(path, like="H200", quiet=True).results
    assert without[0][0][0] > 0


WRONG = {
    "another shape by gloo": (
        'group = dist.new_group(backend="gloo")\ndist.all_reduce(x[rank:], group=group)',
        r"rank 0 calls all_reduce\(4 x float32, SUM\) \(\S+:13\); rank 1 calls all_reduce\(3 x "
        r"float32, SUM\) \(\S+:13\)",
    ),
    "an endless loop": (
        "while rank:\n    pass\ndist.all_reduce(x)",
        r"rank 1 never entered it, .*\(line 14\)\. Rank 1 ran line 1[23], `(while rank:|pass)`\.",
    ),
    "never comes": (
        "if rank: time.sleep(100)\ndist.all_reduce(x)",
        r"all_reduce number 2 .* within 3 s: rank 1 never entered it, and was last in number 1, "
        r"barrier\(\) \(\S+:11\); "
        r"rank 0 waits in all_reduce\(4 x float32, SUM\) \(\S+:13\)",
    ),
    "not within its wait's timeout": (
        "if rank: time.sleep(100)\n"
        "dist.all_reduce(x, async_op=True).wait(__import__('datetime').timedelta(seconds=1))",
        r"all_reduce number 2 .* within 1 s: rank 1 never entered it",
    ),
    "another shape": (
        "dist.all_reduce(x[: 2 + 2 * rank])",
        r"do not agree on collective number 2 .*: rank 0 calls all_reduce\(2 x float32, SUM\) "
        r"\(\S+:12\); "
        r"rank 1 calls all_reduce\(4 x float32, SUM\) \(\S+:12\)",
    ),
    "both receive": (
        "dist.recv(x, 1 - rank); dist.send(x, 1 - rank)",
        # Both wait alike: which of them is told of first is left to the clock.
        r"rank (\d) never entered it, and was last in number 1, recv\(4 x float32\) from rank "
        r"(\d) \(\S+:12\); "
        r"rank \2 waits in recv\(4 x float32\) from rank \1 \(\S+:12\)",
    ),
    "two groups in two orders": (
        "groups = [dist.new_group([0, 1], timeout=__import__('datetime').timedelta(seconds=3)) "
        "for _ in range(2)]\n"
        "for group in groups[:: 1 - 2 * rank]: dist.all_reduce(x, group=group); "
        "torch.cuda.synchronize()",
        r"rank \d never entered it, and was last in number 1, all_reduce\(4 x float32, SUM\) "
        r"\(\S+:13\)",
    ),
    "a group that one rank makes alone": (
        "if rank == 0: dist.new_group([0, 1], "
        "timeout=__import__('datetime').timedelta(seconds=2))\ntime.sleep(100)",
        r"new_group\(\[0, 1\]\) did not start within 2 s: rank 1 never entered it, and was last "
        r"in number 1, barrier\(\) \(\S+:11\); "
        r"rank 0 waits in new_group\(\[0, 1\]\) \(\S+:12\)",
    ),
    "rank 0 ends early": (
        "for _ in range(2 + rank): dist.all_reduce(x)",
        r"all_reduce number 4 of its group will never start: rank 0 never entered it, and was "
        r"last in number 3, all_reduce.*; "
        r"rank 1 waits in all_reduce\(4 x float32, SUM\) \(\S+:12\)",
    ),
    "another call": (
        "if rank: dist.broadcast(x, 0)\nelse: dist.all_reduce(x)",
        r"rank 0 calls all_reduce\(.*:13\); rank 1 calls broadcast\(.*:12\)",
    ),
}


SHARED = """
    import sys
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(0)
    dist.init_process_group()
    x = torch.ones(2, device="cuda")
    first = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "barrier": dist.barrier,
        "send": lambda: (dist.recv if dist.get_rank() else dist.send)(x, 1 - dist.get_rank()),
        "DDP": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).cuda()),
    }
    first[sys.argv[1]]()
"""


@pytest.mark.parametrize("first", ["all_reduce", "barrier", "send", "DDP"])
def test_ranks_that_share_a_gpu_are_refused_in_nccls_words(script, first):
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(script(SHARED), first, like="H200", quiet=True)
    assert re.search(
        r"DistBackendError: Duplicate GPU detected : rank \d and rank \d both on CUDA device 1000 "
        r"\(line",
        str(caught.value),
    )
    assert "Call torch.cuda.set_device(local_rank)" in caught.value.__notes__[0]


def test_the_same_number_on_two_nodes_is_another_gpu(script):
    program = SHARED + "    x.tolist()"
    assert labkit.torchrun(
        script(program), "all_reduce", nodes=2, like="H200", quiet=True
    ).results == [None, None]


def explained(script, case):
    """Return the error message of the ranks.

    A busy machine may take long to start them, so the time in which they must meet begins later.
    """
    begin = "dist.barrier(); x = torch.ones(4, device=device)"
    short = "dist.distributed_c10d._set_pg_timeout(__import__('datetime').timedelta(seconds=3))"
    lines = "".join(f"    {line}\n" for line in [f"{begin}; {short}", *WRONG[case][0].split("\n")])
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(script(START + lines), like="H200", quiet=True)
    return "\n".join([str(caught.value), *caught.value.__notes__, *caught.value.outputs])


@pytest.mark.parametrize("case", WRONG)
def test_a_hang_and_a_mismatch_are_explained(script, case):
    assert re.search(WRONG[case][1], said := explained(script, case)), said


def test_where_a_missing_rank_was_is_told_however_late_it_is_asked(script, slow_caller):
    assert re.search(WRONG["an endless loop"][1], said := explained(script, "an endless loop")), (
        said
    )


def test_one_trace_of_all_ranks(script, tmp_path):
    page, chrome = tmp_path / "page.html", tmp_path / "ranks.json"
    train = script(
        START
        + """
    model = DDP(nn.Linear(1000, 1000).to(device))
    model(torch.ones(8 * (1 + rank), 1000, device=device)).sum().backward()
    """
    )
    files = ["--output", str(page), "--chrome", str(chrome)]
    assert cli.main(["trace", "--ranks", "2", "--like", "H200", *files, str(train)]) == 0
    text = page.read_text(encoding="utf-8")
    assert (
        "2 ranks: virtual GPU, modelled on NVIDIA H200" in text
        and "<h2>cuda:1</h2>" in text
        and "Alive at the end" not in text
    )
    events = json.loads(chrome.read_text())["traceEvents"]
    ends = [
        {
            round(e["ts"] + e["dur"], 3)
            for e in events
            if e["name"] == "nccl all_reduce" and e["pid"] == process
        }
        for process in (2, 3)
    ]
    assert ends[0] == ends[1] != set()  # a collective ends on all ranks at once
    assert "NCCL stream" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]


def test_a_cell_of_ranks_is_recorded():
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        shell.register_magics(TorchrunMagic)
        cell = (
            "import os, torch\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
            "torch.ones(4).cuda()"
        )
        shell.run_cell_magic("torchrun", "--like T4 --trace -o ranks", cell)
        assert shell.user_ns["ranks"].trace.devices == [0, 1]
        with pytest.raises(UsageError, match="trace=True records virtual GPUs"):
            shell.run_cell_magic("torchrun", "--trace", cell)
    finally:
        InteractiveShell.clear_instance()


def test_the_buckets_of_ddp_hold_gradients(script):
    steps = """
    net = DDP(nn.Linear(1000, 1000, bias=False).cuda())
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.ones(1, 1000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    """
    train = script(START + steps)
    trace = labkit.torchrun(train, ranks=2, like="H200", trace=True, quiet=True).trace
    sized = np.flatnonzero(
        (trace.events.action == ALLOC)
        & (trace.events.requested == 4_000_000)
        & (trace.events.device == 0)
    )
    kinds = [CATEGORIES[kind] for kind in trace.events.category[sized]]
    # The bucket of the first step, that of the others, and three steps' gradients.
    assert (
        kinds.count("parameters") == 1
        and kinds.count("gradients") == 5
        and "activations" not in kinds
    )


def test_ranks_that_failed_leave_the_traces_of_the_others(script):
    train = script(START + "    x = torch.zeros(1, device=device)\n    assert rank == 0")
    with pytest.raises(labkit.TorchrunError) as raised:
        labkit.torchrun(train, ranks=2, like="H200", trace=True, quiet=True)
    assert raised.value.rank == 1
    assert raised.value.trace.devices[-1] == 1
