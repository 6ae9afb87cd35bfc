"""The allocator by hand, used with mouse and keyboard."""

import re

import pytest

from .labs import button, message, picture

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1, memory='2GiB')",
    "from gpulessons.lesson_05.labs import AllocatorLab\n\nlab = AllocatorLab()\nlab",
)


def test_a_learner_allocates_frees_and_starts_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("allocator", CELLS)
    step, size, stream, block, answer = (
        page.get_by_label(label)
        for label in (
            "Next step:",
            "MiB:",
            "on stream:",
            "block:",
            "Reserved afterwards, you predict:",
        )
    )
    size = size.first
    run, reset, said, drawn = (
        button(page, "Do it"),
        button(page, "Reset"),
        message(page),
        picture(page),
    )
    expect(block).to_be_hidden()

    for silly, told in (
        ("", "nothing is typed yet"),
        ("banana", "“banana” is none"),
        ("-3", "“-3” is none"),
    ):
        answer.fill(silly)
        run.click()
        # this click was heard, not only the first
        expect(said).to_contain_text(re.compile(f"Your prediction is a number of MiB .*{told}"))
    answer.fill("20")
    size.fill("0")
    run.click()
    expect(said).to_contain_text("The size is a number of MiB greater than 0")
    look(page, "allocator_silly", said)

    size.fill("5")
    run.click()
    expect(said).to_contain_text(
        "A new segment of 20 MiB: no free block of stream 0 was large enough. Now 20 MiB "
        "reserved, as you predicted."
    )
    expect(drawn).to_have_attribute("alt", re.compile("A 5 MiB, free 15 MiB"))
    stream.select_option("1")
    run.click()
    expect(said).to_contain_text(
        "Now 40 MiB reserved, you predicted 20 MiB. 1 of 2 predictions came true."
    )
    look(page, "allocator_two_streams", drawn)

    step.select_option("free")
    expect(size).to_be_hidden()
    block.select_option(label="A, 5 MiB")
    run.click()
    expect(said).to_contain_text("its segment stays")
    step.select_option("empty the cache")
    run.focus()
    page.keyboard.press("Space")
    expect(said).to_contain_text("20 MiB went back to the device")
    look(page, "allocator_emptied", drawn)

    reset.click()
    expect(said).to_contain_text("All blocks are freed")
    expect(drawn).to_be_hidden()
    step.select_option("allocate")
    run.click()
    expect(said).to_contain_text(
        "Now 20 MiB reserved, as you predicted. 1 of 1 predictions came true."
    )
