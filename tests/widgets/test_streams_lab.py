"""The lab of streams, on a virtual GPU."""

import re
from html import unescape

import pytest

import labkit
from labkit.experiments.stream_program import COPY_IN, COPY_OUT, HOST_WAIT, KERNEL, MOST_STEPS, WAIT
from labkit.widgets import StreamsLab


@pytest.fixture
def lab():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield StreamsLab()


def run(lab, predicted: str) -> str:
    lab.answer.value = predicted
    lab.run_button.click()
    return said(lab)


def said(lab) -> str:
    return re.sub("<[^>]*>", "", unescape(lab.message.value))


def insert(lab, at: int, verb: str, stream: str, other: str = "a") -> str:
    lab.program.index = at - 1
    lab.action.value, lab.stream.value, lab.other.value = verb, stream, other
    lab.add_button.click()
    return said(lab)


def test_a_race_is_repaired_wait_by_wait(lab):
    assert "Stale value: the host reads 0; line after line it would be 2. Nothing orders program" in run(lab, "ordered")
    assert "You predicted: ordered. 0 of 1 predictions came true." in said(lab)
    assert re.search(r"race", lab.picture.value) and "2 races" in lab.figure().alt
    lab.add_button.click()  # the new line that is offered: b waits for a, before the kernel
    assert lab.program.options[1] == " 2  b.wait_stream(a)"
    assert "Nothing orders" in run(lab, "stale value") and "As you predicted. 1 of 2" in said(lab)
    assert "Line 5 is new" in insert(lab, 5, HOST_WAIT, "b")
    assert run(lab, "ordered").startswith("Ordered: the host reads 2, and every two lines")
    assert "1 wait of a stream" in lab.figure().alt
    lab.program.index = 1
    lab.remove_button.click()
    assert "b.wait_stream(a)" not in " ".join(lab.program.options)
    assert "Stale value" in run(lab, "ordered")


def test_a_race_whose_values_are_right(lab):
    while len(lab.program.options) > 1:
        lab.program.index = 0
        lab.remove_button.click()
    for verb, stream in (
        (COPY_IN, "a"),
        (COPY_IN, "b"),
        (HOST_WAIT, "a"),
        (HOST_WAIT, "b"),
        (KERNEL, "c"),
        (COPY_OUT, "c"),
        (HOST_WAIT, "c"),
    ):
        insert(lab, len(lab.program.options), verb, stream)
    assert run(lab, "race").startswith("Race: the host reads 4, which is right this time. But nothing orders")
    assert "As you predicted. 1 of 1" in said(lab)


def test_every_change_asks_for_a_prediction_anew(lab):
    assert "First predict" in run(lab, "")
    lab.answer.value = "race"
    lab.add_button.click()
    assert lab.answer.value == ""
    lab.answer.value = "race"
    lab.remove_button.click()
    assert lab.answer.value == ""


def test_silly_input_is_answered(lab):
    assert "Stream a is in order with itself" in insert(lab, 1, WAIT, "a", "a")
    for _ in range(2):
        insert(lab, 1, COPY_IN, "a")
    assert 'at most 3 steps "copy in"' in insert(lab, 1, COPY_IN, "a")
    lab.program.index = len(lab.program.options) - 1
    lab.remove_button.click()
    assert "The last line, in which the host reads, stays" in said(lab)
    for _ in range(MOST_STEPS - 5):
        insert(lab, 1, KERNEL, "a")
    assert "a program has 1 to 12 steps, this one has 13" in insert(lab, 1, KERNEL, "a").lower()
    while len(lab.program.options) > 1:
        lab.program.index = 0
        lab.remove_button.click()
    assert "this one has 0" in run(lab, "ordered") and lab.picture.value == ""


def test_reset_goes_back_to_the_first_program(lab):
    first = lab.program.options
    run(lab, "ordered")
    lab.remove_button.click()
    lab.reset_button.click()
    assert lab.program.options == first and lab.picture.value == "" and "first program again" in said(lab)
    assert "0 of 1 predictions" in run(lab, "ordered")


def test_the_other_stream_is_asked_for_only_where_one_is_waited_for(lab):
    assert lab.other.layout.display is None
    lab.action.value = KERNEL
    assert lab.other.layout.display == "none"


def test_the_figure_before_the_first_run_is_that_of_the_program(lab):
    assert "2 races: nothing orders" in lab.figure().alt and lab.outcome is None


def test_without_a_virtual_gpu_the_message_says_so():
    assert "no GPU is in use" in run(StreamsLab(), "ordered")
    assert repr(StreamsLab()) == "StreamsLab()"


@pytest.mark.parametrize(("verb", "needed"), [(COPY_IN, False), (KERNEL, False), (COPY_OUT, False), (WAIT, True), (HOST_WAIT, False)])
def test_a_stream_can_be_chosen_for_every_kind_of_line_and_a_second_one_for_a_wait(lab, verb, needed):
    lab.action.value = verb
    assert lab.stream.layout.display is None
    assert (lab.other.layout.display is None) is needed
