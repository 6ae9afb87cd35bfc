"""Actions of a panel wait for the values on the page. A page without a browser sends them late."""

import asyncio
import re

import pytest

import labkit
from gpulessons.lesson_00.labs import MemoryPanel
from gpulessons.lesson_02.labs import StreamsLab
from gpulessons.lesson_05.labs import AllocatorLab
from gpulessons.lesson_08.labs import SharingLab
from gpulessons.lesson_13.labs import ClaimsPanel
from labkit.labs.round_trip import RoundTrip

from .test_panel import FakeLab, buttons, text


class Page:
    """Page that shows a panel. It sends what the learner does, and answers when it is told to."""

    def __init__(self, panel):
        self.question, self.answer = panel._round_trip.widgets
        self.answers = 0
        self.reply()

    @property
    def asked(self):
        return int(re.search(r"box\.value = '(\d+) '", self.question.value)[1])

    def answer_once(self, number=None):
        self.answers += 1
        self.answer.value = f"{self.asked if number is None else number} 0.{self.answers}"

    def reply(self):
        """Answer the kernel's requests until there are none."""
        answered = None
        while answered != self.asked:
            answered = self.asked
            self.answer_once()


def press_enter(field):
    field._handle_custom_msg({"event": "submit"}, [])


def test_a_number_that_arrives_after_the_enter_key_is_the_prediction():
    lab = FakeLab()
    page = Page(lab)
    lab.answer.value = "1"
    press_enter(lab.answer)
    assert "First predict" in text(lab)
    lab.answer.value = "16"
    page.reply()
    assert "You predict: 16 times." in text(lab)


def test_clicks_keep_their_order_and_one_answer_serves_several():
    lab = FakeLab()
    page = Page(lab)
    lab.predict_button.click()
    lab.run_button.click()
    lab.answer.value = "3"
    assert lab.closed == 0
    page.reply()
    assert lab.drawn == [(6, 3)]


def test_each_action_waits_for_the_answers_to_its_own_two_questions():
    lab = FakeLab()
    page = Page(lab)
    lab.answer.value = "3"
    lab.predict_button.click()
    lab.run_button.click()
    seen = []
    for number in (1, 2, 3, 4):
        page.answer_once(number)
        seen.append(("You predict: 3" in text(lab), bool(lab.drawn)))
    assert seen == [(False, False), (False, False), (True, False), (False, True)]


def test_what_is_no_answer_is_ignored():
    done = []
    trip = RoundTrip(lambda action: action())
    _, answer = trip.widgets
    for junk in ("", "x", "-1 0.5"):
        answer.value = junk
    trip.then(lambda: done.append("at once"))
    assert done == ["at once"]


def test_stop_waits_for_nothing():
    async def learner():
        lab = FakeLab()
        Page(lab)
        await asyncio.sleep(0)
        lab.prediction, lab.answer.value = 2.0, "2"
        lab._start()
        await asyncio.sleep(0)
        lab.stop_button.click()
        await lab.task
        return lab

    assert "Stopped after" in text(asyncio.run(learner()))
    panel = MemoryPanel()
    Page(panel)
    panel.stop_button.click()
    assert not panel.recorder.running


def test_run_takes_the_number_in_the_box_and_refuses_one_that_is_no_prediction():
    lab = FakeLab()
    lab.answer.value = "2"
    lab.predict_button.click()
    lab.answer.value = "5"
    lab.run_button.click()
    assert lab.drawn == [(6, 5)]
    lab.answer.value = "banana"
    lab.run_button.click()
    assert len(lab.drawn) == 1 and "“banana” is not a prediction" in text(lab)
    assert buttons(lab) == (True, False, False)


def test_the_box_shows_what_is_judged_after_an_edit_that_crossed_the_start():
    lab = FakeLab()
    page = Page(lab)
    lab.answer.value = "2"
    lab.predict_button.click()
    page.reply()
    lab.run_button.click()
    for _ in range(2):
        page.answer_once()
    lab.answer.value = "7"  # typed before the page heard that the box is disabled
    page.reply()
    assert lab.drawn == [(6, 2)] and lab.answer.value == "2"


def test_a_choice_that_crosses_the_start_needs_another_prediction():
    lab = FakeLab()
    lab.before[2] = lab._chosen
    lab.answer.value = "2"
    lab.predict_button.click()
    lab.run_button.click()
    assert lab.drawn == [(6, 2)] and lab.prediction is None
    assert buttons(lab) == (True, False, False)


def test_the_allocator_takes_all_boxes_as_they_are_on_the_page():
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        lab = AllocatorLab()
        page = Page(lab)
        lab.answer.value = "4"
        press_enter(lab.answer)
        assert lab.hand is None
        lab.answer.value, lab.size.value = "40", "30"
        page.reply()
        assert "you predicted 40 MiB" in text(lab) and lab.hand.requests == {"A": 30 << 20}


@pytest.mark.parametrize("late", [False, True])
def test_a_verdict_chosen_before_the_line_is_out_counts_for_nothing(late):
    with labkit.use(virtual=True, quiet=True):
        lab = StreamsLab()
        lines = len(lab.program.options)
        page = Page(lab)
        lab.remove_button.click()
        for _ in range(2):
            page.answer_once()
        assert len(lab.program.options) == lines - 1
        if late:
            page.reply()
        assert ("Line 2 is out" in text(lab)) == late
        lab.answer.value = "race"
        page.reply()
        assert lab.answer.value == ("race" if late else "")


def test_a_guess_is_about_the_claim_that_is_selected_on_the_page():
    panel = ClaimsPanel("_get_shared_mem")
    page = Page(panel)
    with labkit.use(virtual=True, quiet=True):
        panel.guesses["holds"].click()
        panel.choice.value = "empy_cache"
        page.reply()
    assert "it has a typo" in text(panel)


def test_a_choice_made_after_enter_asks_for_another_prediction():
    lab = SharingLab()
    page = Page(lab)
    lab.answer.value = "2"
    lab.predict_button.click()
    next(choice for choice in lab._choices if choice.description == "processes").value = 6
    page.reply()
    assert lab.prediction is None and "First predict" in text(lab)


def test_a_choice_made_once_the_page_shows_the_new_ones_stays():
    panel = ClaimsPanel("_get_shared_mem")
    page = Page(panel)
    panel.verdict.value = "holds"
    page.answer_once()
    panel.choice.value = chosen = panel.choice.options[-1]
    page.reply()
    assert panel.choice.value == chosen != panel.choice.options[0]
