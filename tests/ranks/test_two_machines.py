"""The same command on two machines, which two network namespaces play: each has a network of its own and one cable between them.

The namespaces have no name: they go when the last process in them has gone, whatever happens to the tests.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29400  # free, in a network that was made a moment ago

TRAIN = """
    import os, sys
    import psutil, torch
    import torch.distributed as dist
    dist.init_process_group()
    rank, on_node = dist.get_rank(), os.environ["LOCAL_RANK"]
    total = torch.tensor([2.0**rank])
    dist.all_reduce(total)
    cables = [entries[0].address for name, entries in psutil.net_if_addrs().items() if name.startswith("cable")]
    print(on_node, "of", os.environ["LOCAL_WORLD_SIZE"], f"here, {cables[0]}: {total.item()}")
    if "fail" in sys.argv and rank == 3:
        raise ValueError("on the second node")
    dist.barrier()
    dist.destroy_process_group()
"""


class Machine:
    """A network namespace, held by a process that sleeps."""

    def __init__(self, holder: subprocess.Popen, own_user: bool) -> None:
        self.holder = holder
        # Who may not make networks may do so in a namespace of users, as its root.
        self.enter = ["nsenter", "-t", str(holder.pid), *(["-U", "--preserve-credentials"] if own_user else []), "-n"]

    def run(self, *command: object) -> None:
        done = subprocess.run([*self.enter, *map(str, command)], capture_output=True, text=True, timeout=250)
        if done.returncode:
            raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")

    def start(self, *command: object) -> subprocess.Popen:
        return subprocess.Popen([*self.enter, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def machines(nothing_left: str) -> Iterator[list[Machine]]:
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        pytest.skip(f"network namespaces need Linux, with {', '.join(missing) or 'them'}")
    with contextlib.ExitStack() as stack:
        try:
            made = _two_machines(stack)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"this system lets nobody make network namespaces here: {error}")
        yield made


def _two_machines(stack: contextlib.ExitStack) -> list[Machine]:
    own_user = subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0
    first = _hold(stack, ["unshare", *(["-r"] if own_user else []), "-n"], own_user)
    second = _hold(stack, [*first.enter[:-1], "unshare", "-n"] if own_user else ["unshare", "-n"], own_user)
    first.run("ip", "link", "add", "cable1", "type", "veth", "peer", "name", "cable2", "netns", second.holder.pid)
    for number, machine in enumerate((first, second)):
        cable = f"cable{number + 1}"
        machine.run("ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", cable)
        for link in ("lo", cable):
            machine.run("ip", "link", "set", link, "up")
    return [first, second]


def _hold(stack: contextlib.ExitStack, unshare: list[str], own_user: bool) -> Machine:
    """A new network, alone with its loopback, as `ip` sees it."""
    holder = subprocess.Popen(
        [*unshare, "sh", "-c", "echo made; exec sleep 300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stack.callback(lambda: (holder.kill(), holder.communicate()))
    if holder.stdout.readline() != "made\n":
        raise OSError(holder.communicate(timeout=250)[1].strip())
    return Machine(holder, own_user)


def command(script: object, *arguments: object, port: int = PORT, join_timeout: float = 200, virtual: tuple = ()) -> list[object]:
    """What is typed on each machine."""
    options = ["--ranks", 4, "--nodes", 2, "--endpoint", f"{ADDRESSES[0]}:{port}", "--join-timeout", join_timeout, "--in-order", *virtual]
    return [sys.executable, "-m", "labkit", "torchrun", *options, script, *arguments]


def ends(*processes: subprocess.Popen) -> list[tuple[int, list[str], str]]:
    """Exit status, lines of output, and errors of each; without what PyTorch says of a network that has no name server."""
    done = [(process, process.communicate(timeout=250)) for process in processes]
    return [(process.returncode, [line for line in out.splitlines() if "socket.cpp" not in line], err) for process, (out, err) in done]


def test_an_all_reduce_over_both(machines, script):
    path = script(TRAIN)
    (status, first, error), (status_2, second, error_2) = ends(*[machine.start(*command(path)) for machine in machines])
    assert (status, error, status_2, error_2) == (0, "", 0, "")
    assert first.pop(0) == second.pop(0) == "labkit: 4 ranks on 2 nodes: CPU tensors, gloo."
    # torchrun gives each machine two ranks that follow each other; which machine comes first, it decides itself.
    ranks = [0, 1, 2, 3] if first[0].startswith("[rank 0]") else [2, 3, 0, 1]
    expected = [f"[rank {rank}] {rank % 2} of 2 here, {ADDRESSES[at // 2]}: 15.0" for at, rank in enumerate(ranks)]
    assert first + second == expected


def test_virtual_gpus_on_both_share_a_clock_and_a_network(machines, script):
    path = script("""
        import os, time, torch, torch.distributed as dist
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        x = torch.full((1 << 24,), 2.0 ** dist.get_rank(), device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        print(x[0].item(), torch.cuda.device_count(), f"{time.perf_counter() * 1e3:.1f} ms")
        dist.destroy_process_group()
    """)
    typed = command(path, virtual=("--like", "H200", "--virtual-time", "--network", "8Gb/s"))
    (status, first, error), (status_2, second, error_2) = ends(*[machine.start(*typed) for machine in machines])
    assert (status, error, status_2, error_2) == (0, "", 0, "")
    told = {line.partition("] ")[2] for line in first[1:] + second[1:]}
    assert len(told) == 1 and len(first) == len(second) == 3
    value, gpus, milliseconds, _ = told.pop().split()
    assert (value, gpus) == ("15.0", "2")
    assert 50 < float(milliseconds) < 70  # 96 MiB over two adapters of 1 GB/s


def test_each_machine_says_in_one_message_what_went_wrong(machines, script):
    """A rank fails; and at another port one machine waits for another that never comes, and one for a host that is not there."""
    path = script(TRAIN)
    both = [machine.start(*command(path, "fail")) for machine in machines]
    alone = [machine.start(*command(path, port=PORT + 1 + at, join_timeout=4)) for at, machine in enumerate(machines)]
    results = ends(*both)
    assert [status for status, *_ in results] == [1, 1]
    heads = sorted(error.splitlines()[0] for _, _, error in results)
    assert heads[1].startswith("labkit torchrun: rank 3 raised ValueError: on the second node (line 11).")
    assert heads[0].endswith("Perhaps a rank on another machine ended first: look there.") and "rank 3" not in heads[0]
    (status, lines, error), (status_2, lines_2, error_2) = ends(*alone)
    assert (status, lines) == (1, ["labkit: 4 ranks on 2 nodes: CPU tensors, gloo."]) and (status_2, lines_2) == (1, [])
    assert error == "labkit torchrun: not all of the 2 nodes came within 4 s: start the same command on the other machines.\n"
    nobody = f"nobody answered at {ADDRESSES[0]}:{PORT + 2} within 4 s: start the same command on the machine with that address."
    assert error_2 == f"labkit torchrun: {nobody}\n"
