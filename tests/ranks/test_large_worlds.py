"""`labkit torchrun --simulate` runs one rank of a large world, with the figures of real ranks."""

import json
import subprocess
import sys

import pytest

import labkit
from labkit import cli, processes
from virtualgpu import machines

pytestmark = [pytest.mark.usefixtures("nothing_left", "on_cpus"), pytest.mark.slow]

SHARDED = """
    import json, os, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
    def block():
        return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    net = nn.Sequential(*[block() for _ in range(3)]).cuda()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    for layer in net:
        parallel.parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(net.parameters())
    result = []
    for _ in range(3):
        begin = time.perf_counter()
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        result.append([allocated, reserved, torch.cuda.max_memory_allocated()])
        result.append(time.perf_counter() - begin)
    if len(sys.argv) > 1:
        json.dump(result, open(sys.argv[1], "w"))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def server():
    """Start the server before the tests, because it needs a folder that outlives a test."""
    processes.start_server()


@pytest.fixture
def simulate(script, tmp_path):
    def run(world, *options):
        told = tmp_path / "told.json"
        command = [
            "torchrun",
            "--simulate",
            world,
            "--like",
            "H100",
            *options,
            script(SHARDED),
            told,
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "labkit", *map(str, command)],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(told.read_text()), ended.stderr

    return run


def test_a_rank_alone_has_the_figures_of_ranks_that_are_there(simulate, script):
    there = labkit.torchrun(
        script(SHARDED), ranks=4, like="H100", values=False, virtual_time=True, quiet=True
    )
    alone, said = simulate(4)
    assert [alone] * 4 == there.results
    assert "rank 0 of 4 simulated, on 1 node of 4 virtual NVIDIA H100 80GB HBM3.\n" in said
    assert "assumed: all ranks alike, and none late" in said


def test_a_network_between_nodes_takes_its_time(simulate):
    (*_, first), _ = simulate(64, "--nodes", "8")
    (*_, last), said = simulate(64, "--nodes", "8", "--rank", "63", "--network", "0.4Gb/s")
    assert last > 2 * first
    assert "rank 63 of 64 simulated, on 8 nodes of 8 virtual NVIDIA H100 80GB HBM3." in said
    assert "assumed: 0.4Gb/s from each GPU to other nodes" in said
    assert "Collectives: " in said and " all_gather, " in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--simulate 0", "--simulate 0: choose a whole number from 1 to"),
        (
            "--simulate 64",
            "--nodes 1: 64 ranks do not divide into so many machines of 1 to 16 GPUs each",
        ),
        ("--simulate 8 --rank 8", "--rank 8: choose a whole number from 0 to 7"),
        ("--simulate 8 --network fast", "network='fast': give the rate of one GPU"),
        ("--simulate 8 --like H999", "H999"),
        (
            "--simulate 8 --devices cpu --timeout 3",
            "--simulate starts no other rank: leave out --timeout, --devices",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(script, capsys, options, message):
    assert cli.main(["torchrun", *options.split(), str(script(SHARDED))]) == 2
    assert message in capsys.readouterr().err
    assert machines._current is None


def test_a_notebook_has_the_same_rank_alone(simulate, script):
    told, _ = simulate(64, "--nodes", "8")
    found = labkit.torchrun(script(SHARDED), simulate=64, nodes=8, quiet=True, timeout=280)
    assert found.results == [told]
    alone = labkit.torchrun(
        script("import os\nresult = os.environ['WORLD_SIZE']"), simulate=1024, nodes=128
    )
    assert alone.results == ["1024"]


def test_a_notebook_is_told_which_rank_is_simulated(script, capsys):
    labkit.torchrun(script("print('here')"), simulate=16, nodes=2, like="H200")
    assert capsys.readouterr().out.splitlines() == [
        "labkit: rank 0 of 16 simulated, on 2 nodes of 8 virtual NVIDIA H200.",
        "[rank 0] here",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulate": 0}, "choose a whole number from 1 to"),
        ({"simulate": 64}, "64 ranks do not divide into so many machines"),
        ({"simulate": 8, "ranks": 4}, "simulate= starts no other rank: leave out ranks="),
        ({"simulate": 8, "devices": "cpu", "max_restarts": 1}, "leave out max_restarts=, devices="),
        ({"simulate": 8, "like": "H999"}, "H999"),
        ({"simulate": 8, "trace": True, "devices": "cpu"}, "leave out devices="),
    ],
)
def test_a_notebook_is_refused_what_does_not_fit(script, options, message):
    with pytest.raises(ValueError, match=message):
        labkit.torchrun(script("pass"), **options)
