"""What an isolated function's end is called, and where it was when it crashed."""

import pickle

import pytest

from labkit import isolation
from labkit.isolation import IsolatedError, Original, exit_status
from labkit.isolation.process import EndedProcess, Stage

OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 14.56 GiB of which 13.10 GiB is free. "
    "Including non-PyTorch memory, this process has 1.46 GiB memory in use."
)


@pytest.mark.parametrize(
    ("kind", "type_", "text", "output", "message"),
    [
        ("exception", "ValueError", "bad\nsecond line", "", "f() raised ValueError: bad."),
        ("exception", "KeyError", "'name'", "", "f() raised KeyError: 'name'."),
        ("exception", "AssertionError", "", "", "f() raised AssertionError."),
        ("exit", "SystemExit", "3", "", "f() called sys.exit(3) instead of returning."),
        ("out of memory", "torch.OutOfMemoryError", OOM, "", "it asked for 20.00 GiB, and GPU 1 has 13.10 GiB free of 14.56 GiB."),
        ("out of memory", "torch.AcceleratorError", "CUDA error: out of memory\nCUDA kernel", "", "memory: CUDA error: out of memory."),
        ("out of memory", "MemoryError", "", "", "f() ran out of memory: this computer has no more for it."),
        ("device-side assert", "", "", "x.cu:1: Assertion `i < n` failed.\n", "f() failed in a device-side assert"),
        ("device-side assert", "", "", "x.cu:1: Assertion `i < n` failed.\n", "(i < n)."),
        ("device-side assert", "", "", "", "a value that it cannot work with."),
        ("illegal access", "", "", "", "f() made an illegal access"),
        (
            "CUDA error",
            "RuntimeError",
            "CUDA error: misaligned address\nmore",
            "",
            "f() raised RuntimeError: CUDA error: misaligned address.",
        ),
    ],
)
def test_what_was_raised_is_named(kind, type_, text, output, message):
    assert message in exit_status.raised("f()", kind, Original(type_, text, ""), output)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("CUDA error: device-side assert triggered"), "exception"),
        (RuntimeError("CUDA error: device-side assert triggered\nmore"), "device-side assert"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal access"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory"),
        (RuntimeError("CUDA error: misaligned address"), "CUDA error"),
        (RuntimeError("shapes differ"), "exception"),
        (MemoryError(), "out of memory"),
        (SystemExit(3), "exit"),
        (KeyboardInterrupt(), "exception"),
    ],
)
def test_kinds(error, kind):
    assert exit_status.kind_of(error) == kind


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (0, "exit", "f() ended with exit status 0 without returning."),
        (-11, "crash", "f() crashed with a segmentation fault (SIGSEGV)."),
        (-6, "crash", "f() crashed with an abort (SIGABRT)."),
        (-15, "signal", "f() was killed from outside (SIGTERM)."),
        (-9, "signal", "(SIGKILL), perhaps by the system's out-of-memory killer because this computer's memory ran out."),
        (-99, "signal", "by signal 99."),
    ],
)
def test_a_process_that_said_nothing(status, kind, message):
    found, said = exit_status.without_report("f()", status)
    assert found == kind and said.endswith(message)


def test_a_process_that_left_no_report_has_returned_nothing(tmp_path):
    died = EndedProcess(status=-11, output="the last words", stage=Stage.RUNNING, late=False, cut=False)
    with pytest.raises(IsolatedError, match="f\\(\\) crashed with a segmentation fault") as caught:
        isolation._result(tmp_path, "f()", died, timeout=60)
    assert (caught.value.kind, caught.value.output) == ("crash", "the last words")


WORKER = '  File "/x/labkit/isolation/worker.py", line 70 in _call\n  File "<string>", line 1 in <module>\n'


def test_where_a_crash_was():
    text = (
        'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/other.py", line 1 in wait\n\n'
        'Current thread 0x2 [main] (most recent call first):\n  File "/lib.py", line 3 in inner\n  File "/cell.py", line 2 in f\n'
        + WORKER
        + '\nCurrent thread\'s C stack trace (most recent call first):\n  Binary file "/python", at _Py_DumpStack+0x48 [0x1]\n'
    )
    assert exit_status.stack(text) == (
        'Traceback (most recent call last):\n  File "/cell.py", line 2, in f\n  File "/lib.py", line 3, in inner\n'
    )


def test_where_a_function_that_took_too_long_was():
    text = (
        'Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "/other.py", line 1 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "/cell.py", line 2 in f\n' + WORKER
    )
    assert exit_status.stack(text) == 'Traceback (most recent call last):\n  File "/cell.py", line 2, in f\n'


@pytest.mark.parametrize("text", ["", "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n"])
def test_nothing_is_known(text):
    assert exit_status.stack(text) == ""


def test_the_error_survives_pickling_with_what_it_knows():
    error = IsolatedError("f() raised.", kind="exception", original=Original("ValueError", "bad", "Traceback"), output="words")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.original, again.output) == ("f() raised.", "exception", error.original, "words")
    assert again.__notes__ == ["In the process of its own:\nTraceback"]
