"""A function in a process of its own: what comes back, and every way in which it can go wrong. Each test starts one process."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import labkit
from labkit.isolation import process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_virtual")]

MIB = 1 << 20


def failure(function, *args, **keywords) -> labkit.IsolatedError:
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(function, *args, **keywords)
    return caught.value


def last_line(error: labkit.IsolatedError) -> str:
    """The line of this file at which it happened, as the error's traceback shows it."""
    lines = error.original.traceback.splitlines()
    at = max(number for number, line in enumerate(lines) if f'File "{__file__}"' in line)
    return lines[at + 1].strip()


def test_a_result_comes_back_with_output_and_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    factor = torch.tensor([2.0])

    def double(size, *, device):
        from beside import word

        print("from Python", end="")
        subprocess.run(["echo", " and C"], check=True)
        print("and to stderr", file=sys.stderr)
        x = torch.ones(size, device=device)
        return {
            "sum": (x * factor.to(device)).sum().item(),
            "cpu": x[:2].cpu(),
            "word": word,
            "cwd": os.getcwd(),
            "stdin": sys.stdin.read(),
        }

    came = labkit.isolated(double, MIB, device="cuda:1")
    assert came.value.pop("cpu").tolist() == [1, 1]
    assert came.value == {"sum": 2 * MIB, "word": "found", "cwd": os.getcwd(), "stdin": ""}
    assert came.output == "from Python and C\nand to stderr\n"
    assert came.trace.device == 1 and came.trace.peak >= 8 * MIB and came.trace.badge == labkit.current().badge
    assert any("torch.ones(size" in line.line.text for line in came.trace.lines() if line.line)
    assert repr(came).startswith("<Isolated: returned {'sum': 2097152.0") and repr(came).endswith(", 2 lines of output>")


def test_what_is_left_running_is_ended(monkeypatch):
    monkeypatch.setitem(process.LIMITS, process.Stage.ENDING, 0.05)

    def leave_all():
        if os.fork() == 0:
            return "the copy"
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        threading.Thread(target=threading.Event().wait).start()
        return "the function"

    assert labkit.isolated(leave_all).value == "the function"


# What goes wrong


def test_out_of_memory():
    def fill():
        torch.ones(MIB, device="cuda")
        return torch.empty(1 << 40, dtype=torch.uint8, device="cuda:1")

    error = failure(fill)
    assert str(error).startswith("fill() ran out of memory: it asked for 1024.00 GiB, and GPU 1 has 14.")  # two contexts
    assert error.kind == "out of memory" and error.original.type == "torch.OutOfMemoryError"
    assert error.original.traceback.splitlines()[2].strip().startswith("return torch.empty(1 << 40")
    assert error.original.traceback.count("File ") == 1  # a real GPU's own lines are C++
    assert error.trace.error == error.original.text and error.trace.peaks[0] == 4 * MIB


def test_a_device_side_assert_that_nothing_waited_for():
    def outside():
        x = torch.arange(10, device="cuda:1")
        return x[torch.tensor([10], device="cuda:1")].shape

    error = failure(outside)
    assert error.kind == "device-side assert" and '"index out of bounds"' in str(error)
    assert str(error).startswith("outside() failed in a device-side assert: a kernel met a value")
    assert error.trace is not None and "failed" in error.output


@pytest.mark.parametrize("noticed", ["at once", "late"])
def test_illegal_access(noticed, monkeypatch):
    def read_nowhere():
        print("soon", end="")
        ctypes.string_at(0)

    if noticed == "late":  # a busy machine lets this process look only when all is over
        listen = process.IsolatedProcess._listen
        monkeypatch.setattr(process.IsolatedProcess, "_listen", lambda it, timeout: (it._process.wait(), listen(it, timeout))[1])
    error = failure(read_nowhere)
    assert str(error) == "read_nowhere() crashed with a segmentation fault (SIGSEGV)."
    assert (error.kind, error.output) == ("crash", "soon")
    assert last_line(error) == "ctypes.string_at(0)"
    assert (error.trace, error.why_no_trace) == (None, "the recording went with the process")


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        (lambda: os._exit(3), "exit", "f() ended with exit status 3 without returning."),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "signal",
            "f() was killed from outside (SIGKILL), perhaps by the system's out-of-memory",
        ),
    ],
)
def test_a_process_that_ends_without_a_report(end, kind, message):
    def f():
        print("soon", end="")
        end()

    error = failure(f)
    assert str(error).startswith(message)
    assert (error.kind, error.output, error.trace) == (kind, "soon", None)


def test_an_endless_loop():
    def forever():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        while True:
            pass

    error = failure(forever, timeout=1)
    assert str(error) == "forever() took longer than 1 s and was stopped."
    assert (error.kind, error.trace) == ("timeout", None)
    assert last_line(error) in ("while True:", "pass")


def test_a_loop_on_a_busy_machine_may_take_long_to_say_where_it_is():
    def pauses():
        pause = f"kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", pause], start_new_session=True)
        while True:
            pass

    error = failure(pauses, timeout=0.5)
    assert error.kind == "timeout" and last_line(error).startswith(("while True:", "pass", "subprocess.Popen("))


def test_much_output_and_a_full_pipe():
    def flood():
        os.write(1, b"first\n")
        line = b"x" * 99 + b"\n"
        for descriptor in (1, 2) * 50:
            os.write(descriptor, line * 10_000)
        os.write(1, b"last\n")

    came = labkit.isolated(flood)
    assert came.value is None and len(came.output) < 2 * MIB
    assert came.output.startswith("first\nxxx") and came.output.endswith("xxx\nlast\n")
    assert "\n[... 94.4 MiB of output left out ...]\n" in came.output
    assert repr(came).endswith("lines of output kept, the middle was cut out>")


def test_a_result_that_cannot_be_sent():
    def numbers():
        torch.ones(MIB, device="cuda")
        return {"all": (number for number in range(3))}

    error = failure(numbers)
    assert str(error) == (
        "numbers() returned a value of type dict that cannot be sent to this process "
        "(TypeError: cannot pickle 'generator' object): return plain data."
    )
    assert error.kind == "result" and error.trace.peak == 4 * MIB


def test_a_result_on_a_gpu():
    error = failure(lambda: [torch.ones(3, device="cuda")])
    assert str(error) == (
        "<lambda>() returned a list with a tensor on cuda:0 in it, whose memory ends with its process: return x.cpu(), or a number."
    )
    assert error.kind == "result"


def test_an_interrupt_ends_the_process():
    def interrupt():
        os.kill(os.getppid(), signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        labkit.isolated(interrupt)
