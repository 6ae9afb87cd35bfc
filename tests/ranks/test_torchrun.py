"""`labkit.torchrun`: what is shown of the ranks, which failure is named, and what is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import labkit
from labkit.processes.supervision import processes_of
from labkit.ranks.job import TorchrunJob
from labkit.ranks.printing import RankPrinter
from labkit.ranks.rank_process import RankProcess

pytestmark = [pytest.mark.usefixtures("nothing_left", "on_cpus"), pytest.mark.slow]


SUM = """
    import os, sys
    import torch
    import torch.distributed as dist
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.full((2,), 2.0**rank)
    dist.all_reduce(total)
    gpu, threads = torch.cuda.is_available(), torch.get_num_threads()
    print("of", size, os.environ["LOCAL_RANK"], sys.argv[1:], gpu, os.environ["KEPT"], threads)
    print("a line on stderr", file=sys.stderr)
    result = {"rank": rank, "total": total}
    dist.destroy_process_group()
"""
WITHOUT_TORCH = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_end_well(script, capsys, monkeypatch, nodes):
    """Run ranks on one node, or on two nodes that are both on this computer."""
    monkeypatch.setenv("KEPT", "environment")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = script(SUM)
    ranks = labkit.torchrun(path, "--epochs", 2, ranks=4, nodes=nodes)
    assert ranks.results == [{"rank": rank, "total": [15.0, 15.0]} for rank in range(4)]
    local = [str(rank % (4 // nodes)) for rank in range(4)]
    assert ranks.outputs == [
        f"of 4 {at} ['--epochs', '2'] False environment 1\na line on stderr\n" for at in local
    ]
    assert ranks.restarts == [] and repr(ranks) == "<Ranks: 4 ended well>"
    shown = [
        f"[rank {rank}] {line}\n" for rank in range(4) for line in ranks.outputs[rank].splitlines()
    ]
    banner = (
        "labkit: 4 ranks: CPU tensors, gloo.\n"
        if nodes == 1
        else "labkit: 4 ranks on 2 nodes: CPU tensors, gloo.\n"
    )
    assert capsys.readouterr().out == banner + "".join(shown)


def test_threads_and_what_stands_for_the_end_are_not_cut_off(script):
    ends = (
        "import atexit, threading\n"
        + WITHOUT_TORCH
        + (
            "atexit.register(lambda: print('at the end'))\n"
            "threading.Thread(target=lambda: (threading.main_thread().join(), print('a thread', "
            "end=' '))).start()\n"
            "print('the script', end=' ')\n"
        )
    )
    ranks = labkit.torchrun(script(ends), ranks=1, quiet=True)
    assert ranks.outputs == ["the script a thread at the end\n"]


@pytest.mark.gpu(count=2)
def test_ranks_on_gpus(script, capsys, monkeypatch):
    monkeypatch.delenv("LABKIT_VIRTUAL", raising=False)
    path = script("""
        import os, torch, torch.distributed as dist
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        total = torch.ones(1 << 20, device=device) * (1 + dist.get_rank())
        dist.all_reduce(total)
        result = [total.sum().item() / total.numel(), dist.get_backend(), torch.cuda.device_count()]
        dist.destroy_process_group()
    """)
    for nodes, visible in ((1, torch.cuda.device_count()), (2, 1)):
        ranks = labkit.torchrun(path, ranks=2, nodes=nodes, timeout=280)
        assert ranks.results == [[3.0, "nccl", visible]] * 2
        assert "one GPU each, NCCL" in capsys.readouterr().out
    assert labkit.torchrun(
        script("import torch\nresult = torch.cuda.is_available()"), ranks=2, devices="cpu"
    ).results == [False, False]


@pytest.mark.parametrize(
    "line", ["torch.cuda.set_device(0)", "torch.distributed.init_process_group('nccl')"]
)
def test_a_script_for_gpus_where_no_rank_has_one_is_told_of_virtual_ones(script, line):
    with pytest.raises(
        labkit.TorchrunError,
        match=r"The ranks have no GPUs here\. "
        r"Give each one a virtual GPU with --like T4 or like='T4'\.\n",
    ):
        labkit.torchrun(script(f"import torch\n{line}"), ranks=2, devices="cpu", quiet=True)


def test_an_exception_is_the_first_ranks_alone(script, capsys):
    """Check that only the first rank's exception is shown, though the others fail, too."""
    path = script("""
        import torch.distributed as dist, torch
        dist.init_process_group()
        print("begun")
        def average(values):
            return sum(values) / len(values)
        if dist.get_rank() == 1:
            average([])
        dist.all_reduce(torch.ones(2))
    """)
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(path, ranks=3)
    error = caught.value
    assert str(error) == "rank 1 raised ZeroDivisionError: division by zero (line 5)."
    assert (error.kind, error.rank, error.exit_codes[1]) == (
        "exception",
        1,
        1,
    ) and 0 not in error.exit_codes
    note = "".join(error.__notes__)
    assert note.startswith(
        f'In rank 1:\nTraceback (most recent call last):\n  File "{path}", line 7, in <module>'
    )
    assert (
        note.count("Traceback") == 1
        and note.endswith("ZeroDivisionError: division by zero")
        and "labkit" not in note
    )
    assert (
        error.outputs[1].startswith("begun\nTraceback")
        and "Traceback" not in capsys.readouterr().out
    )


def test_a_rank_that_raised_is_not_stopped_for_what_its_end_does_to_the_others(script):
    code = """
        import time, torch, torch.distributed as dist
        dist.init_process_group()
        class Slow:
            def __del__(self):
                dist.destroy_process_group()
                time.sleep(3)
        if dist.get_rank() == 1:
            slow = Slow()
            1 / 0
        dist.all_reduce(torch.ones(2))
    """
    with pytest.raises(labkit.TorchrunError, match="^rank 1 raised ZeroDivisionError") as caught:
        labkit.torchrun(script(code), ranks=2, quiet=True)
    assert caught.value.exit_codes[1] == 1


def test_a_killed_rank(script):
    code = """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            print("the last words")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2))
    """
    with pytest.raises(
        labkit.TorchrunError, match=r"^rank 1 was killed from outside \(SIGKILL\)"
    ) as caught:
        labkit.torchrun(script(code), ranks=3, quiet=True)
    error = caught.value
    assert (error.kind, error.rank, error.exit_codes[1]) == ("signal", 1, -9)
    assert error.__notes__ == ["The last lines that rank 1 printed:\nthe last words"]


def test_a_rank_that_leaves_while_the_others_need_it(script):
    code = """
        import sys, torch, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 2:
            sys.exit()
        dist.all_reduce(torch.ones(2))
    """
    with pytest.raises(
        labkit.TorchrunError, match=r"^rank [01] raised RuntimeError: .*(closed|reset) by peer"
    ) as caught:
        labkit.torchrun(script(code), ranks=3, quiet=True)
    assert str(caught.value).endswith("(line 5). By then rank 2 had ended.")
    assert caught.value.exit_codes[2] == 0


@pytest.mark.parametrize(
    ("last", "message", "code"),
    [
        ("sys.exit(3)", "rank 1 called sys.exit(3).", 3),
        ("os._exit(7)", "rank 1 ended with exit status 7 without returning.", 7),
        (
            "result = [sys]",
            "rank 1's variable `result` cannot be sent (it holds a module). Store plain data in "
            "it (numbers",
            None,
        ),
    ],
)
def test_other_ends(script, last, message, code):
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(
            script(WITHOUT_TORCH + f"if rank == 1:\n    {last}\nelse:\n    time.sleep(0.5)"),
            ranks=2,
            quiet=True,
        )
    assert str(caught.value).startswith(message)
    if code is not None:
        assert caught.value.exit_codes[1] == code


def test_an_error_lists_also_a_rank_that_was_not_there_yet():
    job = TorchrunJob("", {"ranks_of_node": 2, "nodes": 1, "trace": False}, None)
    job._attempts = ["0"]
    job.processes = [RankProcess(rank=1, attempt=0, pid=1, exit_code=7)]
    error = labkit.TorchrunError("rank 1 ended", job=job)
    assert error.exit_codes == [None, 7] and error.outputs == ["", ""]


def test_a_time_limit_says_where_each_rank_was(script):
    code = (
        WITHOUT_TORCH
        + "def wait():\n    time.sleep(100)\n"
        + "if rank == 3:\n    sys.exit()\nif rank:\n    wait()\nelse:\n    signal.pause()"
    )
    with pytest.raises(labkit.TorchrunError) as caught:
        labkit.torchrun(script(code), ranks=4, timeout=20, quiet=True)
    assert str(caught.value) == (
        "the ranks took longer than 20 s and were stopped. At that time rank 0 ran line 10, "
        "`signal.pause()`; "
        "ranks 1 and 2 ran line 4, `time.sleep(100)`; rank 3 had ended."
    )
    assert caught.value.kind == "timeout" and caught.value.exit_codes == [None, None, None, 0]


def test_a_rank_that_takes_a_while_to_write_where_it_is_is_waited_for(tmp_path):
    code = """
import os, signal, sys, time
def write(*_):
    time.sleep(1)
    open(os.path.join(sys.argv[1], f"stacks-{os.getpid()}"), "w").write(sys.argv[2])
signal.signal(signal.SIGUSR1, write)
print("ready", flush=True)
signal.pause()
"""
    stack = '  File "train.py", line 3 in <module>\n'
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, stack], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        job = TorchrunJob(str(tmp_path), {"ranks_of_node": 1, "nodes": 1}, None)
        job.processes = [RankProcess(rank=0, attempt=0, pid=process.pid)]
        assert job._stacks() == {0: stack}
        process.kill()


def test_torchrun_starts_all_ranks_again(script, capsys, slow_caller):
    code = WITHOUT_TORCH + (
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('attempt', attempt)\n"
        "open(f'{__file__}.{attempt}.{rank}', 'w').close()\n"
        # Neither rank ends before both have printed.
        "while not os.path.exists(f'{__file__}.{attempt}.{1 - rank}'):\n"
        "    time.sleep(0.01)\n"
        "if rank == 1 and attempt == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 0 and attempt == 1:\n    raise ValueError('again')\n"
        "if attempt < 2:\n    time.sleep(100)\nresult = attempt"
    )
    ranks = labkit.torchrun(script(code), ranks=2, max_restarts=2)
    assert ranks.results == [2, 2] and repr(ranks) == "<Ranks: 2 ended well, after 2 restarts>"
    assert [why.split(" (")[0] for why in ranks.restarts] == [
        "rank 1 was killed from outside",
        "rank 0 raised ValueError: again",
    ]
    shown = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    again = (
        "[torchrun] rank 0 raised ValueError: again (line 11). All ranks start again: restart 2 "
        "of 2."
    )
    both = [f"[rank {rank}] attempt {attempt}" for attempt in range(3) for rank in range(2)]
    assert shown == [
        *both[:2],
        "[torchrun] rank 1 was killed from outside (SIGKILL)",
        *both[2:4],
        again,
        *both[4:],
    ]


def test_attempts_in_which_a_rank_is_ended_before_it_says_a_word():
    """Rank 1 fails, and torchrun ends rank 0 because of it. Another process reports too late."""
    job = TorchrunJob(
        "",
        {"ranks_of_node": 3, "nodes": 1, "max_restarts": 1, "trace": False},
        RankPrinter(3, live=False, quiet=True),
    )
    for pid, (rank, attempt) in enumerate([(1, "0"), (0, "1"), (2, "0"), (2, "1"), (1, "1")]):
        assert job._process(rank, pid, attempt) is job._process(rank, pid, attempt)
    assert [[process.rank for process in attempt] for attempt in job.attempts()] == [
        [1, 2],
        [0, 1, 2],
    ]


def test_a_notebook_shows_an_interrupt_without_the_kit_s_own_calls(script, monkeypatch):
    def interrupted(job, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchrunJob, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        labkit.torchrun(script("pass"))
    assert interrupt.value._render_traceback_() == ["KeyboardInterrupt: all ranks are stopped."]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_is_left_when_the_caller_ends(script, nothing_left, how):
    """The caller is a cell that is interrupted, or a kernel that is killed.

    Ranks ignore SIGTERM.
    """
    code = (
        WITHOUT_TORCH
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('begun')\ntime.sleep(100)"
    )
    caller = f"import labkit\nlabkit.torchrun({str(script(code))!r}, ranks=2, nodes=2, live=True)"
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert sorted(lines)[:2] == ["[rank 0] begun\n", "[rank 1] begun\n"] and processes_of(
            nothing_left
        )
        process.send_signal(how)
        error = process.stderr.read()
    assert process.returncode == -how and (
        how == signal.SIGKILL or error.rstrip().endswith("KeyboardInterrupt")
    ), error
    deadline = time.monotonic() + 60
    while (
        (processes_of(nothing_left) or os.listdir(nothing_left))
        and how == signal.SIGKILL
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)  # nobody waits for what ends by itself


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks=0: choose a whole number from 1 to 16"),
        ({"ranks": 17}, "ranks=17: choose a whole number from 1 to 16"),
        ({"ranks": True}, "ranks=True: choose a whole number"),
        ({"ranks": 3, "nodes": 2}, "ranks=3 cannot be divided among nodes=2: choose 2 or 4"),
        ({"nodes": 0}, "nodes=0: choose a whole number from 1 to 16"),
        ({"max_restarts": -1}, "max_restarts=-1: choose a whole number from 0 to 100"),
        ({"timeout": 0}, "timeout=0: choose a positive number of seconds"),
        ({"devices": "tpu"}, "devices='tpu': choose 'cpu', 'cuda' or None"),
    ],
)
def test_arguments_that_are_refused(script, options, message):
    with pytest.raises(ValueError, match=message):
        labkit.torchrun(script("pass"), **options)


def test_a_script_that_is_not_there_or_no_python(script, tmp_path):
    with pytest.raises(ValueError, match="^no such script: .*missing.py"):
        labkit.torchrun(tmp_path / "missing.py")
    with pytest.raises(ValueError, match="is a folder. Give the script in it that should run$"):
        labkit.torchrun(tmp_path)
    path = script("x = 1\nif x\n    pass\n")
    with pytest.raises(SyntaxError) as caught:
        labkit.torchrun(path)
    assert (caught.value.filename, caught.value.lineno) == (str(path), 2)


def test_the_command(script, nothing_left):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "labkit", "torchrun", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
        )

    path = script(
        WITHOUT_TORCH
        + "print(rank, sys.argv[1:])\nif rank == int(sys.argv[1]):\n    raise ValueError('no')\n"
        "if '1' in sys.argv:\n    time.sleep(100)"  # until torchrun ends it
    )
    theirs = ["-1", "--", "--r", "--s", "--help"]
    well = command("--ranks", 2, "--in-order", path, *theirs)
    assert (well.returncode, well.stderr) == (0, "")
    lines = [f"[rank {rank}] {rank} {theirs}" for rank in range(2)]
    assert well.stdout.splitlines() == ["labkit: 2 ranks: CPU tensors, gloo.", *lines]
    failed = command("--ranks", 2, path, "1")
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "labkit torchrun: rank 1 raised ValueError: no (line 5).\nIn rank 1:\n"
        "Traceback (most recent call last):\n"
    )
    assert (
        command("--ranks", 0, path).stderr
        == "labkit torchrun: ranks=0: choose a whole number from 1 to 16\n"
    )
    wrong = command(script("for\n"))
    assert wrong.returncode == 1 and wrong.stderr.startswith(f'  File "{path}", line 1\n    for\n')


def test_a_cell(monkeypatch):
    """A cell runs as a script. Lines count from the magic, and labels have colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.extension_manager.load_extension("labkit")
    try:
        with capture_output() as captured:
            assert shell.run_cell(
                "%%torchrun --ranks 2 -o found\nimport os\nresult = os.environ['RANK']\n"
                "print('%d' % 3)"
            ).success
        assert shell.user_ns["found"].results == ["0", "1"]
        assert captured.stdout.splitlines()[1:] == [
            "\x1b[38;5;231;48;5;25m[rank 0]\x1b[0m 3",
            "\x1b[38;5;231;48;5;130m[rank 1]\x1b[0m 3",
        ]
        with capture_output() as captured:
            raised = shell.run_cell("%%torchrun --ranks 1\n1 / 0").error_in_exec
            unread = shell.run_cell("%%torchrun\nx = 1\nif x").error_in_exec
            unknown = shell.run_cell(
                "%%torchrun --ranks 1 --like H200 --network fast\nx = 1"
            ).error_in_exec
            asked = "--ranks 1 --like H200 --memory 2GiB --no-values --virtual-time --timeout 90"
            cell = "import torch\nx = torch.randn(9, device='cuda').sum().item()\n"
            cell += "result = [torch.cuda.mem_get_info()[1], x != x]"
            shell.run_cell(f"%%torchrun {asked} -o virtual\n{cell}")
        assert shell.user_ns["virtual"].results == [[2 << 30, True]]
        assert (
            str(raised) == "rank 0 raised ZeroDivisionError: division by zero (line 2)."
            and '"cell.py", line 2' in raised.__notes__[0]
        )
        assert 'the cell cannot be read\n  File "cell.py", line 3\n    if x\n' in str(unread)
        assert "network='fast'" in str(unknown)
    finally:
        InteractiveShell.clear_instance()


def shown(live, *steps):
    """Return the text that a printer prints after each step, which is (rank, data).

    A rank ends when its data is None. `live` is that of `RankPrinter`.
    """

    class Kept(RankPrinter):
        def _print(self, text):
            printed[-1].append(text)

    printed = [[]]
    show = Kept(2, live, quiet=False)
    show.start(1)
    show.start(0)
    for rank, data in steps:
        printed.append([])
        if data is None:
            show.end(rank)
        else:
            show.add(rank, data)
    return printed[1:]


def test_lines_in_order_and_as_they_come():
    steps = [
        (1, b"one\ntw"),
        (0, b"zero\n"),
        (1, b"o\n"),
        (0, b"end"),
        (0, None),
        (1, b"three\n"),
        (1, None),
    ]
    in_order = [
        [],
        ["[rank 0] zero"],
        [],
        [],
        ["[rank 0] end", "[rank 1] one", "[rank 1] two"],
        ["[rank 1] three"],
        [],
    ]
    assert shown(False, *steps) == in_order
    as_they_come = [
        ["[rank 1] one"],
        ["[rank 0] zero"],
        ["[rank 1] two"],
        [],
        ["[rank 0] end"],
        ["[rank 1] three"],
        [],
    ]
    assert shown(True, *steps) == as_they_come


def test_progress_bars_and_floods():
    assert shown(False, (0, b"10%\r50%\r100%\r\n")) == [["[rank 0] 100%"]]
    flood = shown(False, (0, b"x" * (1 << 20)), (0, b"\nafter\n"), (0, None))
    assert flood[-1] == ["[rank 0] [... 0.5 MiB of output left out ...]"]
