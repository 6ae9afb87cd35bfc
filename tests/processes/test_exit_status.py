"""The words for how a process ended."""

import pytest

from labkit.processes import exit_status


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (0, "exit", "f() ended with exit status 0 without returning."),
        (-11, "crash", "f() crashed with a segmentation fault (SIGSEGV)."),
        (-6, "crash", "f() crashed with an abort (SIGABRT)."),
        (-15, "signal", "f() was killed from outside (SIGTERM)."),
        (
            -9,
            "signal",
            "(SIGKILL), perhaps by the system's out-of-memory killer because this computer's "
            "memory ran out.",
        ),
        (-99, "signal", "by signal 99."),
    ],
)
def test_a_process_that_reported_nothing(status, kind, message):
    found, said = exit_status.without_report("f()", status)
    assert found == kind and said.endswith(message)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('Thread 0x1:\n  File "a.py", line 1 in f\n  File "a.py", line 2 in <module>\n', True),
        ('Thread 0x1:\n  File "a.py", line 1 in f\n  ...\n', True),
        ('Thread 0x1:\n  File "a.py", line 1 in f\n', False),
        ("", False),
    ],
)
def test_a_whole_stack_ends_with_its_module_or_with_dots(text, whole):
    assert exit_status.is_whole_stack(text) is whole
