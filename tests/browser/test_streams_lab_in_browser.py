"""The lab of streams in a notebook, used with mouse and keyboard."""

import re

import pytest

from gpulessons.lesson_02.labs.stream_program import MEANS, ORDERED, RACE, STALE

from .labs import button, message, picture

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1, virtual=True)",
    "from gpulessons.lesson_02.labs import StreamsLab\n\nlab = StreamsLab()\nlab",
)


def test_a_learner_puts_waits_in_and_takes_them_out(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("streams_lab", CELLS)
    action, stream, other, program, answer = (
        page.get_by_label(label)
        for label in ("New line:", "stream:", "waits for:", "Program:", "You predict:")
    )
    insert, remove, reset, run = (
        button(page, name) for name in ("Insert", "Remove", "Reset", "Run")
    )
    said, drawn = message(page), picture(page)

    run.click()
    expect(said).to_contain_text("First predict: ordered, race, or stale value?")
    stream.select_option("a")
    insert.click()
    expect(said).to_contain_text("Stream a is always in order with itself")
    look(page, "streams_silly", said)

    answer.select_option(label=MEANS[RACE])
    run.click()
    expect(said).to_contain_text("Stale value: the host reads 0. Line by line, it would read 2.")
    expect(drawn).to_have_attribute("alt", re.compile("2 races: nothing orders"))
    look(page, "streams_race", drawn)

    stream.select_option("b")
    other.select_option("a")
    insert.click()
    expect(said).to_contain_text("Line 2 is new")
    expect(program.locator("option").nth(1)).to_have_text(re.compile(r"b\.wait_stream\(a\)"))
    expect(answer).to_have_value("choose …")
    action.select_option("host waits for stream")
    expect(other).to_be_hidden()
    program.select_option(index=4)
    insert.click()
    expect(said).to_contain_text("Line 5 is new")
    answer.select_option(label=MEANS[ORDERED])
    run.focus()
    page.keyboard.press("Space")
    expect(said).to_contain_text("Ordered: the host reads 2")
    expect(said).to_contain_text("As you predicted. 1 of 2 predictions came true.")
    look(page, "streams_ordered", drawn)

    program.select_option(index=1)
    remove.click()
    expect(said).to_contain_text("Line 2 is out")
    answer.select_option(label=MEANS[STALE])
    run.click()
    expect(said).to_contain_text("2 of 3 predictions came true")

    reset.click()
    expect(said).to_contain_text("This is the first program again")
    expect(drawn).to_be_hidden()
    expect(program.locator("option")).to_have_count(4)
