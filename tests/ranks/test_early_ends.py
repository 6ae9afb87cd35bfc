"""If a rank ends before the others, the others go on.

The way in which the ranks were started and the keeper of the program's store do not matter.
"""

import os
import socket
import subprocess
import sys

import pytest

import labkit

pytestmark = [pytest.mark.usefixtures("nothing_left", "on_cpus"), pytest.mark.slow]

# Pairs of ranks meet in an order that the seed draws. A rank ends after it has met all partners.
PAIRS = """
    import os, random, sys, time
    import torch
    import torch.distributed as dist

    def meet(rank, world, seed):
        together, alone = random.Random(seed), random.Random(f"{seed}/{rank}")
        pairs = [(a, b) for a in range(world) for b in range(a + 1, world)]
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        plan = [together.choice(pairs) for _ in range(12)]
        for pair in plan:
            if rank in pair:
                time.sleep(alone.random() / 10)
                if sum(pair) % 2:
                    dist.all_reduce(x, group=groups[pair])
                elif rank == pair[0]:
                    dist.send(x, pair[1])
                else:
                    dist.recv(x, pair[0])
                x.clamp_(max=world).sum().item()
        return x.tolist()
"""
BY_TORCHRUN = """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    result = meet(dist.get_rank(), dist.get_world_size(), sys.argv[1])
    if dist.get_rank() % 2:
        dist.destroy_process_group()
"""
BY_SPAWN = """
    def work(rank, method):
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", method, rank=rank, world_size=3)
        x = torch.ones(4, device="cuda")
        group = dist.new_group([1, 2])
        dist.all_reduce(x)
        if rank > 0:  # rank 0 keeps the store, unless it is a file
            time.sleep(1)
            dist.all_reduce(x, group=group)
            dist.barrier(group=group)
        assert x.tolist() == [6.0 if rank else 3.0] * 4

    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=3)
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_in_any_order(script, nodes, seed):
    ranks = labkit.torchrun(
        script(PAIRS + BY_TORCHRUN),
        seed,
        ranks=4,
        nodes=nodes,
        like="H200",
        quiet=True,
        timeout=200,
    )
    assert ranks.results == [[4.0] * 4] * 4


@pytest.mark.parametrize("method", ["env://", "tcp://", "file://"])
def test_in_processes_that_the_script_starts(script, method, tmp_path):
    with_address = {
        "env://": "env://",
        "tcp://": f"tcp://127.0.0.1:{free_port()}",
        "file://": f"file://{tmp_path}/store",
    }[method]
    run(
        [
            sys.executable,
            "-m",
            "labkit",
            "run",
            "--gpus",
            "3",
            "--like",
            "H200",
            script(PAIRS + BY_SPAWN),
            with_address,
        ]
    )


def test_under_pytorchs_own_torchrun(script, tmp_path):
    inner = script(PAIRS + BY_TORCHRUN)
    outer = inner.with_name("outer.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        f"--log-dir={tmp_path}",
        str(inner),
        "5",
    ]
    outer.write_text(f"import subprocess, sys\nsys.exit(subprocess.run({command!r}).returncode)")
    run([sys.executable, "-m", "labkit", "run", "--gpus", "3", "--like", "H200", outer])


ENDS = {
    "raises": (
        "raise ValueError('too early')",
        "exception",
        "rank {} raised ValueError: too early (line ",
    ),
    "exits": ("sys.exit(3)", "exit", "rank {} called sys.exit(3)."),
    "is killed": ("os.kill(os.getpid(), 9)", "signal", "rank {} was killed"),
    "leaves": ("os._exit(4)", "exit", "rank {} "),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("end", ENDS)
def test_the_rank_that_failed_is_blamed(script, nodes, who, end):
    line, kind, message = ENDS[end]
    code = f"""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    if dist.get_rank() == {who}:
        {line}
    dist.all_reduce(x)
    x.tolist()
    """
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(
            script(PAIRS + code), ranks=4, nodes=nodes, like="H200", quiet=True, timeout=200
        )
    assert (caught.value.rank, caught.value.kind) == (who, kind), str(caught.value)
    assert str(caught.value).startswith(message.format(who))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(command: list) -> None:
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
