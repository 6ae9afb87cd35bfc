"""`labkit top` shows what runs on virtual and real GPUs, and what to do if nothing does."""

import fcntl
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import types
from pathlib import Path

import pytest
import torch

import labkit
from labkit import cli, nvidia, top
from virtualgpu import front_end
from virtualgpu.driver import running, smi

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch):
    """A folder for this test's sockets only, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_real_gpus(monkeypatch):
    monkeypatch.setattr(nvidia, "readings", list)


@pytest.fixture
def served():
    """A function that makes servers which answer with a report."""
    servers = []

    def serve(report: dict) -> smi.Server:
        servers.append(smi.Server(lambda: report))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def report(pid: int, **more) -> dict:
    process = {"pid": pid, "program": "train.py --epochs 2", "rank": None, "line": None}
    gpu = {"index": 0, "name": "Tesla T4", "total": 16 * GIB, "used": 4 * GIB}
    gpu["processes"] = [[pid, "python", 4 * GIB]]
    gpu |= {"allocated": 2 * GIB, "reserved": 3 * GIB, "streams": ["default stream", "stream 1"]}
    return {"process": process | more, "virtual": True, "gpus": [gpu]}


def test_a_process_shows_its_memory_its_streams_and_its_line(capsys):
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        kept = torch.ones(1 << 28, device="cuda:1")
        assert cli.main(["top", "--once"]) == 0
        shown = capsys.readouterr().out.splitlines()
    assert f"(process {os.getpid()})" in shown[0]
    assert shown[1].startswith("  runs test_top.py:") and "cli.main" in shown[1]
    assert shown[2].startswith("  cuda:0 ") and shown[2].endswith("(virtual)")
    assert shown[4:6] == ["    tensors 0 B, reserved 0 B", "    busy streams: none"]
    assert shown[6].startswith("  cuda:1 ")
    assert shown[8:10] == ["    tensors 1 GiB, reserved 1 GiB", "    busy streams: default stream"]
    assert kept.shape == (1 << 28,)


def test_a_stream_is_busy_until_the_model_s_clock_has_passed_its_work():
    with labkit.use(gpus=1, virtual=True, quiet=True) as used:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.ones(1 << 26, device="cuda")
        assert running.report(used.machine)["gpus"][0]["streams"] == ["stream 1"]
        torch.cuda.synchronize()
        assert running.report(used.machine)["gpus"][0]["streams"] == []


def test_nothing_runs(capsys):
    assert cli.main(["top", "--once"]) == 0
    assert capsys.readouterr().out == f"{top.NOTHING}\n"


def test_without_a_terminal_the_state_is_printed_once(capsys):
    assert cli.main(["top"]) == 0
    assert "labkit run train.py" in capsys.readouterr().out


def test_a_process_that_cannot_be_shown(capsys, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert cli.main(["top", "--once", str(ended.pid)]) == 1
    assert f"there is no process {ended.pid}." in capsys.readouterr().err
    assert cli.main(["top", "--once", str(os.getpid())]) == 1
    assert "shows no GPUs of the kit" in capsys.readouterr().err

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert cli.main(["top", "--once", "1"]) == 1
    assert "belongs to another user" in capsys.readouterr().err


def test_one_process_of_several(served, capsys):
    served(report(4712, rank=("1", "4")))
    served(report(4711))
    assert cli.main(["top", "--once"]) == 0
    both = capsys.readouterr().out
    assert both.index("4711") < both.index("process 4712), rank 1 of 4")
    assert cli.main(["top", "--once", "4712"]) == 0
    assert "4711" not in capsys.readouterr().out


def test_folders_of_killed_processes_are_removed(own_temporary_folder, served):
    folder = own_temporary_folder / f"{smi.folder_prefix()}killed"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "socket"))
    assert top.picture(None) == [top.NOTHING]
    assert cli.main(["top", "--once"]) == 0
    assert not folder.exists()


def test_folders_of_other_users_are_not_asked(served, monkeypatch):
    served(report(4711))
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert top.ask_all() == ({}, [])


def test_a_process_that_does_not_answer_and_one_of_another_version(
    own_temporary_folder, served, monkeypatch
):
    monkeypatch.setattr(top, "PATIENCE", 0.01)
    served({"gpus": []})
    folder = own_temporary_folder / f"{smi.folder_prefix()}stopped"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(folder / "socket"))
        stopped.listen()
        lines = top.picture(None)
    assert lines[0] == top.NOTHING
    assert "do not answer" in lines[1] and "another version" in lines[2]


def test_a_busy_process_has_not_ended(capsys):
    """A process that does not answer now is reported as busy, and not as ended."""
    busy = {4711: report(4711)}, ["Processes that do not answer: 1."]
    assert top.missing(os.getpid(), busy) and not top._has_ended(os.getpid(), busy)
    assert (
        top.picture(os.getpid(), answers=busy)[0] == f"Process {os.getpid()} does not answer now."
    )
    assert top._has_ended(os.getpid(), ({}, []))
    assert not top._has_ended(None, busy) and not top._has_ended(4711, busy)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert top._has_ended(ended.pid, busy)


@pytest.mark.slow
def test_a_reader_that_ends_early_is_no_error(own_temporary_folder):
    command = f"{sys.executable} -m labkit top --once | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


def test_each_process_is_asked_once(served, capsys, monkeypatch):
    asked = []
    ask = smi.ask
    monkeypatch.setattr(smi, "ask", lambda *about: asked.append(about) or ask(*about))
    served(report(4711))
    assert cli.main(["top", "--once", "4711"]) == 0
    assert len(asked) == 1


def test_a_process_that_ends_while_it_answers(own_temporary_folder):
    folder = own_temporary_folder / f"{smi.folder_prefix()}ends"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()

        def answer_in_part() -> None:
            connection, _ = server.accept()
            connection.sendall(json.dumps(report(4711)).encode()[:-20])
            connection.close()

        thread = threading.Thread(target=answer_in_part)
        thread.start()
        assert top.ask_all() == ({}, [])
        thread.join()


def test_narrow_lines_and_no_characters_that_control_a_terminal(served):
    served(report(4711, line=("train.py:3", "print('\x1b[31mred \N{SNOWMAN}')")))
    wide = top.picture(None)
    assert "  runs train.py:3: print('?[31mred \N{SNOWMAN}')" in wide
    for width in (1, 5, 9, 30):
        narrow = top.picture(None, width)
        assert max(map(len, narrow)) <= width
        assert "".join("".join(narrow).split()) == "".join("".join(wide).split())


def test_memory_of_child_processes_is_shown():
    shown = report(4711)
    shown["gpus"][0]["processes"].append([4713, "python", GIB])
    assert top.described(shown)[-1] == "    process 4713 holds 1 GiB of it, too"


@pytest.mark.slow
def test_ranks_of_a_notebook_show_themselves_and_the_gpus_of_all_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import os, subprocess
import torch
from labkit import top

torch.ones(1, device=f"cuda:{os.environ['LOCAL_RANK']}")
listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
reports, _ = top.ask_all()
result = {"shown": os.getpid() in reports, "gpus": len(listed.splitlines())}
""")
    with labkit.use(gpus=1, virtual=True, quiet=True):
        ranks = labkit.torchrun(script, ranks=2, like="T4", quiet=True)
    assert ranks.results == [{"shown": True, "gpus": 2}] * 2


def test_gpus_of_other_ranks_are_left_out():
    shown = report(4711, rank=("0", "2"))
    others = shown["gpus"][0] | {"index": 1, "processes": [[4712, "python", GIB]]}
    free = others | {"index": 2, "processes": []}
    shown["gpus"] += [others, free]
    heads = [line.split()[0] for line in top.described(shown) if "cuda:" in line]
    assert heads == ["cuda:0", "cuda:2"]


def test_real_gpus_are_measured(monkeypatch):
    shown = report(4711)
    shown["virtual"] = False
    del shown["gpus"][0]["processes"]
    assert top.described(shown)[2:] == [
        "  cuda:0 Tesla T4 (measured)",
        "    tensors 2 GiB, reserved 3 GiB",
    ]
    found = [nvidia.Reading("H200", 16 * GIB, 4 * GIB, 37), nvidia.Reading("GB10", None, None, 5)]
    monkeypatch.setattr(nvidia, "readings", lambda: found)
    assert top.picture(None)[:3] == [
        "GPUs of this computer, measured by NVML",
        "  GPU 0 H200  [#####...............] 4 GiB of 16 GiB in use  37% busy",
        "  GPU 1 GB10  5% busy",
    ]


def test_a_process_without_memory_on_a_gpu():
    shown = report(4711) | {"gpus": []}
    assert top.described(shown)[1:] == [
        "  no line of yours runs at this moment",
        "  no memory on a GPU",
    ]


@pytest.mark.gpu
def test_a_real_gpu_of_this_process():
    with labkit.use(gpus=1, virtual=False, quiet=True):
        kept = torch.ones(1 << 28, device="cuda")
        shown = top.picture(os.getpid())
    assert any(line.endswith("(measured)") for line in shown)
    assert any(line.startswith("    tensors 1 GiB") for line in shown)
    assert len(kept) == 1 << 28


@pytest.mark.slow
@pytest.mark.parametrize("keys", [b"q", b"\x03"])
def test_the_view_in_a_terminal_ends_with_a_key(served, keys):
    """Run the program in a terminal of its own, 40 columns wide, without colour."""
    served(report(os.getpid()))
    terminal, programs = pty.openpty()
    fcntl.ioctl(programs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "labkit", "top", str(os.getpid())],
        stdin=programs,
        stdout=programs,
        stderr=programs,
        env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=own_terminal,
    ) as program:
        os.close(programs)
        shown = b""
        while b"quit" not in shown:
            ready, _, _ = select.select([terminal], [], [], 60)
            assert ready, shown
            shown += os.read(terminal, 1 << 16)
        os.write(terminal, keys)
        try:
            while more := os.read(terminal, 1 << 16):
                shown += more
        except OSError:
            pass  # Linux reports the end of a terminal in this way
    os.close(terminal)
    assert program.returncode == 0, shown
    assert b"default stream" in shown and b"Traceback" not in shown
    assert set(re.findall(rb"\x1b\[[\d;]*m", shown)) <= {b"\x1b[m", b"\x1b[39;49m"}


def own_terminal() -> None:
    """Make standard input the terminal that controls this process, so that Ctrl-C reaches it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_the_report_of_real_gpus_is_the_allocator_s(monkeypatch):
    assert running.report_of_real_gpus()["gpus"] == []  # CUDA has not started
    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 3 * GIB)
    server = running.answer()
    try:
        shown = top.picture(os.getpid())
    finally:
        server.close()
    assert shown[-2:] == [
        "  cuda:0 NVIDIA H200 (measured)",
        "    tensors 2 GiB, reserved 3 GiB",
    ]


def test_a_process_that_still_imports_torch_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.cuda", types.ModuleType("torch.cuda"))
    assert running.report_of_real_gpus()["gpus"] == []
    monkeypatch.delitem(sys.modules, "torch.cuda")
    assert running.report_of_real_gpus()["gpus"] == []


def test_a_notebook_is_named(monkeypatch):
    monkeypatch.setattr(front_end, "ipython_shell", lambda: object())
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/03_memory.ipynb")
    assert running._program() == "notebook 03_memory.ipynb"
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert running._program() == "IPython"
