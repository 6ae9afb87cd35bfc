"""Tracebacks of a script's errors show only the script."""

import sys
import traceback

import pytest

from virtualgpu import front_end, script


def test_a_traceback_leaves_out_the_calls_inside_the_kit():
    names: dict = {}
    exec(compile("def through(function): function()", f"{front_end.HERE}ops.py", "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        names["through"](lambda: 1 / 0)
    script._leave_out_the_kit(raised.value.__traceback__)
    left = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert sys.flags.dev_mode or left == [
        "test_a_traceback_leaves_out_the_calls_inside_the_kit",
        "<lambda>",
    ]
