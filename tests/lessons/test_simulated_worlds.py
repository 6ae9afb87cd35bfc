"""Results of rank 0 of several simulated worlds, each in a process of its own."""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from gpulessons.simulated_worlds import results
from labkit.processes.supervision import processes_of
from virtualgpu import machines

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.slow]


@pytest.fixture
def script(tmp_path):
    """A function that writes a script."""

    def write(code: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return path

    return write


WORLD = """
    import os, sys
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    if sys.argv[1:] == ["fail"]:
        raise ValueError("no such model")
    if sys.argv[1:] == ["end"]:
        os._exit(3)
    result = {"rank": dist.get_rank(), "world": dist.get_world_size(), "local": os.environ["LOCAL_WORLD_SIZE"], "told": sys.argv[1:]}
    result["memory"] = torch.cuda.get_device_properties(0).total_memory
    dist.destroy_process_group()
"""


def test_each_world_has_its_own_result_in_the_order_asked(script):
    worlds = [{"world": world, "nodes": world // 8, "like": "H100", "arguments": [world, "x"]} for world in (1024, 8, 64)]
    found = list(results(script(WORLD), worlds))
    assert [(each["rank"], each["world"], each["local"], each["told"]) for each in found] == [
        (0, world, "8", [str(world), "x"]) for world in (1024, 8, 64)
    ]
    [small] = results(script(WORLD), [{"world": 8, "memory": "2GiB", "arguments": []}])
    assert small["memory"] == 2 << 30 < found[0]["memory"]
    assert machines._current is None


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"world": 16, "nodes": 2, "arguments": ["fail"]}, "rank 0 of 16 simulated ranks: ValueError: no such model"),
        ({"world": 1024, "nodes": 128, "arguments": ["end"]}, "rank 0 of 1,024 simulated ranks: its process ended without a word"),
        ({"world": 64, "arguments": []}, "rank 0 of 64 simulated ranks: ValueError: --nodes 1: 64 ranks need a number of nodes"),
    ],
)
def test_a_world_that_fails_says_which_and_what_it_raised(script, world, said):
    with pytest.raises(RuntimeError, match=re.escape(said)):
        list(results(script(WORLD), [{"world": 8, "arguments": []}, world]))


FOR_EVER = """
    import signal, sys
    result = None
    if sys.argv[1] == "for ever":
        signal.pause()  # time.sleep would take virtual time
"""


def test_results_come_one_by_one_and_who_stops_asking_ends_the_rest(script):
    before = set(folders())
    coming = results(script(FOR_EVER), [{"world": 8, "arguments": [long]} for long in ("not", "for ever", "for ever")])
    assert next(coming) is None
    [folder] = set(folders()) - before
    assert len(processes_of(str(folder))) == 1
    coming.close()
    assert not processes_of(str(folder)) and not folder.exists()


def folders():
    return Path(tempfile.gettempdir()).glob("labkit-*")


IN_A_NOTEBOOK = """
import labkit
from gpulessons.simulated_worlds import results
labkit.use(gpus=2)
print(list(results({script!r}, [{{"world": 64, "nodes": 8, "arguments": []}}])))
"""


def test_a_process_with_virtual_gpus_simulates_worlds_and_leaves_nothing(script):
    program = IN_A_NOTEBOOK.format(script=str(script(WORLD)))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert "'world': 64" in ended.stdout, ended.stderr
