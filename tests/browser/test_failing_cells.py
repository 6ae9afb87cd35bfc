"""A cell that fails is found wherever it stands in the page, unless it is meant to."""

import pytest

pytestmark = pytest.mark.browser

FAR_DOWN = ["print('down\\n' * 60)"] * 20  # what is far out of sight is not in the page at all


def test_an_error_is_found_and_said(open_cells):
    with pytest.raises(pytest.fail.Exception, match=r"cell 3:\nspeed = 1 / 0\n(?s:.*)ZeroDivisionError: division by zero"):
        open_cells("error", ["1 + 1", "2", "3", "speed = 1 / 0", *FAR_DOWN])


def test_a_traceback_of_a_thread_is_found_too(open_cells):
    thread = "import threading\n\nthread = threading.Thread(target=lambda: [][0])\nthread.start()\nthread.join()"
    with pytest.raises(pytest.fail.Exception, match=r"cell 0:\nimport threading(?s:.*)IndexError: list index out of range"):
        open_cells("thread", [thread, *FAR_DOWN])


def test_an_error_that_a_tag_announces_may_come(open_cells):
    page = open_cells("announced", ["1 / 0", *FAR_DOWN], raising=[0])
    assert page.evaluate("document.readyState") == "complete"
