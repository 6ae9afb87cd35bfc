"""The fork server: its copies share nothing else, it ends with its process, and it is optional."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch

import labkit
from labkit.processes import forkserver
from labkit.processes.supervision import kill_job, processes_of, rank_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_left", "on_cpus"),
    pytest.mark.skipif(not forkserver.POSSIBLE, reason="this system has no fork server"),
]

RANK = "import json, os, sys\nrank = os.environ['RANK']\n"


def results(path, **options):
    return labkit.torchrun(path, ranks=2, quiet=True, **options).results


def test_two_ranks_of_a_server_that_is_there_already(script):
    """Run the quickest test of ranks. Both are copies of one server, which the next job reuses."""
    path = script(RANK + "result = [int(rank), os.getppid()]")
    assert results(path) == results(path) == [[0, forkserver.pid()], [1, forkserver.pid()]]


def test_a_process_can_be_found_by_its_job_as_soon_as_it_is_started(script, tmp_path):
    """Ending a job right after its start would otherwise miss the process."""
    started = []
    for number in range(20):
        folder = str(tmp_path / f"job{number}")
        started.append(
            forkserver.popen(
                [str(script("import time\ntime.sleep(100)"))], rank_environment(folder)
            )
        )
        assert [process.pid for process in processes_of(folder)] == [started[-1].pid]
        kill_job(folder)
    assert [process.wait() for process in started] == [-signal.SIGKILL] * 20


def test_isolated_functions_share_the_server_and_have_the_threads_of_their_caller(
    script, monkeypatch
):
    def look():
        return os.getppid(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results(script("pass"))
    torch.ones(1)
    found = labkit.isolated(look).value
    threads = torch.get_num_threads()
    assert found == (forkserver.pid(), threads, str(threads))


def test_nothing_goes_from_one_job_to_the_next(script, monkeypatch, tmp_path):
    """Check that a rank's changes affect only itself, and that it has its caller's changes."""
    (tmp_path / "mine.py").write_text("told = []")
    changes = """
        import mine, signal
        mine.told.append(1)
        os.environ["CHANGED"] = "1"
        os.chdir("/")
        os.umask(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kept = os.open(__file__, os.O_RDONLY)
        os.set_inheritable(kept, True)
        json.changed = True
    """
    looks = """
        import multiprocessing, re, signal, threading
        import mine
        files = []
        for number in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{number}"
            if int(number) > 2 and os.path.exists(path):
                files.append(os.readlink(path))
        result = {
            "mine": mine.told,
            "changed": "CHANGED" in os.environ,
            "cwd": os.getcwd(),
            "umask": os.umask(0),
            "json": hasattr(json, "changed"),
            "handlers": [
                signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                signal.getsignal(signal.SIGINT) == signal.default_int_handler,
                signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            ],
            "files": sorted(re.split(r":|-\\d", os.path.basename(file))[0] for file in files),
            "threads": threading.active_count(),
            "name": multiprocessing.current_process().name,
            "parent": multiprocessing.parent_process(),
            "argv": sys.argv[1:],
            "file": __file__,
            "path": sys.path,
            "main": sys.modules["__main__"].__file__,
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("OMP", "PYTHON", "TMPDIR"))
            },
        }
    """
    monkeypatch.chdir(tmp_path)
    results(script(RANK + textwrap.dedent(changes)))
    path = script(RANK + textwrap.dedent(looks))
    warm = results(path)
    monkeypatch.setattr(forkserver, "POSSIBLE", False)
    forkserver.end()
    assert results(path) == warm  # of processes started afresh
    assert warm[0]["mine"] == [] and warm[0]["cwd"] == str(tmp_path)


def test_each_rank_has_random_numbers_of_its_own_and_torch_those_of_a_fresh_process(script):
    path = script(
        RANK
        + "import random, numpy, torch\n"
        + "result = [random.random(), numpy.random.rand(), torch.rand(1).item()]"
    )
    drawn = results(path) + results(path)
    assert [len({rank[kind] for rank in drawn}) for kind in range(3)] == [4, 4, 1]


def test_a_variable_that_imports_may_read_makes_a_new_server(script, monkeypatch):
    path = script(RANK + "result = [os.getppid(), os.environ.get('SET_LATER')]")
    before = results(path)[0]
    monkeypatch.setenv("SET_LATER", "1")
    after = results(path)[0]
    assert before[1] is None and after[1] == "1" and before[0] != after[0] == forkserver.pid()


def test_the_cache_that_torch_names_with_an_optimizer_makes_no_new_server(script, monkeypatch):
    path = script(RANK + "result = [os.getppid(), os.environ['TORCHINDUCTOR_CACHE_DIR']]")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/before")
    before = results(path)[0]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/after")
    assert results(path)[0] == [before[0], "/tmp/after"]


@pytest.mark.parametrize("who", ["rank", "server"])
def test_the_job_after_one_that_crashed(script, who):
    crash = {"rank": "os.kill(os.getpid(), 11)", "server": "os.kill(os.getppid(), 9)"}[who]
    results(script(RANK + "result = 1"))
    with pytest.raises(
        labkit.TorchrunError, match={"rank": "SIGSEGV", "server": "SIGKILL|It was killed"}[who]
    ):
        results(script(RANK + crash + "\nimport time; time.sleep(100)"))
    assert results(script(RANK + "result = rank")) == ["0", "1"]


def test_processes_of_a_rank(script):
    """Multiprocessing works in a rank, and the processes that remain are ended."""
    path = script("""
        import multiprocessing, os, subprocess, sys
        def square(x):
            return x * x
        if __name__ == "__main__":
            result = []
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    result.append(pool.map(square, [3]))
            result.append(subprocess.check_output([sys.executable, "-c", "print(1)"], text=True))
            subprocess.Popen(["sleep", "100"], start_new_session=True)
    """)
    assert results(path) == [[[9], [9], [9], "1\n"]] * 2


def test_where_no_server_can_be(script, monkeypatch):
    """There is no server on macOS, and a server may end while it starts.

    Processes are then started afresh.
    """
    path = script(RANK + "result = os.getppid()")
    forkserver.end()
    monkeypatch.setattr(forkserver, "POSSIBLE", False)
    assert len(set(results(path))) == 1 and forkserver.pid() is None  # torchrun's agent
    monkeypatch.setattr(forkserver, "POSSIBLE", True)
    monkeypatch.setattr(forkserver, "_START", "pass")
    for _ in range(2):
        assert len(set(results(path))) == 1
    forkserver.end()


CALLER = """
import labkit, os, sys
from labkit.processes import forkserver
from labkit.processes.supervision import kill_job, processes_of, rank_environment
labkit.torchrun({path!r}, ranks=1, quiet=True)
print(forkserver.pid(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_the_server_ends_with_its_process(script, how):
    caller = CALLER.format(path=str(script("pass")))
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        server = psutil.Process(int(process.stdout.readline()))
        if how == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.write("\n")
    assert process.returncode == (-signal.SIGKILL if how == "killed" else 0)
    psutil.wait_procs([server], timeout=280)  # it may be importing
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


WITH_CALLER = """
import os
from labkit.processes import forkserver
from labkit.processes.supervision import rank_environment
folder = os.getcwd()
print(forkserver.popen([{path!r}], rank_environment(folder)).pid, flush=True)
sys.stdin.readline()
"""


def test_a_process_ends_with_its_killed_caller(script):
    code = "import sys" + WITH_CALLER.format(path=str(script("import time\ntime.sleep(1000)")))
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as caller:
        started = psutil.Process(int(caller.stdout.readline()))
        caller.kill()
    psutil.wait_procs([started], timeout=60)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_was_forked_has_a_server_of_its_own(script):
    path = script(RANK + "result = os.getppid()")
    results(path)
    code = f"""
import json, labkit, os, warnings
from labkit.processes import forkserver
from labkit.processes.supervision import kill_job, processes_of, rank_environment
run = lambda: labkit.torchrun({str(path)!r}, ranks=1, quiet=True).results
first = run()
child = os.fork()
if child == 0:
    print(json.dumps([first, run(), os.getppid()]), flush=True)
    forkserver.end()
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps(run() == first))
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    ).stdout.splitlines()
    first, second, _ = json.loads(told[0])
    assert first != second and told[1] == "true"


def test_an_interrupt_while_the_server_starts(script):
    forkserver.end()
    code = f"import labkit\nprint(1, flush=True)\nlabkit.torchrun({str(script('pass'))!r}, ranks=1)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
