"""A function in a process of its own: the result, the output, and the errors."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import labkit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_virtual")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def machine():
    with labkit.use(2, like="H200", memory="16GiB", virtual=True, quiet=True) as used:
        yield used


@pytest.fixture
def on_virtual(machine, nothing_left):
    """Two virtual GPUs, which must still work after the test."""
    x = torch.ones(3, device="cuda:1")
    yield
    assert (x * 2).sum().item() == 6


def failure(function, *args, **keywords) -> labkit.IsolatedError:
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(function, *args, **keywords)
    return caught.value


def test_a_result_comes_back_with_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    factor = torch.tensor([2.0])
    offset = torch.ones(1, device="cuda:1")

    def double(size, *, device):
        from beside import word

        print("from Python", end="", flush=True)
        subprocess.run(["echo", " and C"], check=True)
        print("and to stderr", file=sys.stderr)
        x = torch.ones(size, device=device)
        return {
            "sum": (x * factor.to(device) + offset).sum().item(),
            "gpu": x[:2],
            "word": word,
            "cwd": os.getcwd(),
            "stdin": sys.stdin.read(),
        }

    came = labkit.isolated(double, MIB, device="cuda:1")
    on_gpu = came.value.pop("gpu")
    assert on_gpu.device == torch.device("cuda:1") and on_gpu.tolist() == [1, 1]
    assert came.value == {"sum": 3 * MIB, "word": "found", "cwd": os.getcwd(), "stdin": ""}
    assert came.output == "from Python and C\nand to stderr\n"


def test_everything_that_still_runs_is_killed():
    def leave_all():
        if os.fork() == 0:
            return "the copy"
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        threading.Thread(target=threading.Event().wait).start()
        os.wait()
        return "the function"

    assert labkit.isolated(leave_all).value == "the function"


def test_a_copy_that_the_function_forks_leaves_no_result():
    def function():
        copy = os.fork()
        if copy:
            os.waitpid(copy, 0)
            os._exit(3)
        return "the copy's"

    with pytest.raises(labkit.IsolatedError):
        labkit.isolated(function)


def test_a_process_that_the_function_spawns_does_not_run_it_again():
    def function():
        context = torch.multiprocessing.get_context("spawn")
        child = context.Process(target=print, args=("once",))
        child.start()
        child.join()
        return child.exitcode

    done = labkit.isolated(function)
    assert (done.value, done.output) == (0, "once\n")


def test_an_error_shows_its_traceback():
    def fail():
        class OwnError(ValueError):
            def __reduce__(self):
                raise TypeError("cannot be sent")

        try:
            raise KeyError("first")
        except KeyError as error:
            raise OwnError("second.\nand more") from error

    error = failure(fail)
    assert str(error).endswith("OwnError: second.")
    (note,) = error.__notes__
    assert note.startswith("In the process of its own:\nTraceback")
    assert 'raise KeyError("first")' in note and 'raise OwnError("second.\\nand more")' in note
    assert "/labkit/isolation/" not in note


def test_out_of_memory():
    error = failure(lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda:1"))
    start = "<lambda>() raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024"
    assert str(error).startswith(start)
    assert error.__notes__[0].count("File ") == 1  # a real GPU's own lines are C++


def test_a_device_side_assert_that_nothing_waited_for():
    def outside():
        x = torch.arange(10, device="cuda:1")
        return x[torch.tensor([10], device="cuda:1")].shape

    error = failure(outside)
    assert "CUDA error: device-side assert triggered" in str(error) and "failed" in error.output


def test_a_crash():
    def read_nowhere():
        print("soon", end="", flush=True)
        ctypes.string_at(0)

    error = failure(read_nowhere)
    assert str(error) == "read_nowhere() crashed with a segmentation fault (SIGSEGV)."
    assert error.output == "soon"


def test_a_process_that_ends_by_itself():
    error = failure(os._exit, 3)
    assert str(error) == "_exit() ended with exit status 3 without returning."
    assert str(failure(sys.exit, 3)) == "exit() raised SystemExit: 3."
    assert str(failure(os.abort)) == "abort() crashed with an abort (SIGABRT)."


def test_an_endless_loop_is_stopped():
    def forever():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("begun", flush=True)
        while True:
            pass

    error = failure(forever, timeout=10)
    assert str(error) == "forever() took longer than 10 s and was stopped."
    assert error.output == "begun\n"


def test_a_result_that_cannot_be_copied():
    error = failure(lambda: {"all": (number for number in range(3))})
    assert str(error) == "<lambda>() raised TypeError: cannot pickle 'generator' object."


def test_an_argument_that_cannot_be_copied_is_refused():
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        labkit.isolated(list, (number for number in range(3)))


def test_an_interrupt_ends_the_process():
    caller = os.getpid()

    def interrupt():
        os.kill(caller, signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        labkit.isolated(interrupt)
