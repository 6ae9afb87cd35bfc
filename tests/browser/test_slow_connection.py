"""Every lab over a slow connection uses what is on the page at a click or at Enter."""

import re

import pytest

from gpulessons.lesson_13 import articles

from .labs import IMPORTS, LABS, Lab, button, message, picture
from .pages import FRONT_END, make_notebook, opened

pytestmark = pytest.mark.browser

ROUND_TRIP = 240  # milliseconds between the page and the kernel, there and back
BETWEEN_KEYS = 30  # milliseconds
DELAYED = """(() => {
    const Direct = window.WebSocket;
    window.WebSocket = class extends Direct {
        send(data) { setTimeout(() => this.readyState === Direct.OPEN && super.send(data), DELAY); }
        set onmessage(handler) {
            super.onmessage = event => setTimeout(() => handler.call(this, event), DELAY);
        }
    };
})()""".replace("DELAY", str(ROUND_TRIP // 2))
PANELS = ("AllocatorLab", "StreamsLab", "ClaimsPanel")
SET_UP = (f"import labkit\n{IMPORTS}\nlabkit.use(gpus=4)",)
CELLS = (
    *SET_UP,
    *LABS.values(),
    *(f"{name}()" for name in PANELS),
)


@pytest.fixture(scope="module")
def page(folder, server, browser):
    with opened(server, browser, DELAYED) as open_and_run:
        page = open_and_run(make_notebook(folder, "slow_connection", CELLS))
        FRONT_END.show_whole(page)
        yield page


def cell(page, name):
    return page.locator(FRONT_END.cell).nth(len(SET_UP) + [*LABS, *PANELS].index(name))


def write(page, box, text):
    """Replace what is in the box, key by key."""
    box.click()
    box.press("Control+A")
    page.keyboard.type(text, delay=BETWEEN_KEYS)


def click(button):
    """Click a button at once. Playwright's own click waits until the button no longer moves."""
    button.evaluate("button => button.click()")


@pytest.mark.parametrize("name", LABS)
def test_enter_and_predict_take_the_number_in_the_box(page, name):
    lab = Lab(cell(page, name))
    write(page, lab.answer, "12.5")
    page.keyboard.press("Enter")
    lab.says("You predict: 12.5 ")
    write(page, lab.answer, "16.75")
    click(lab.predict)
    lab.says("You predict: 16.75 ")


@pytest.mark.parametrize("name", ["FormatLab", "CopySpeedLab"])
def test_run_takes_the_number_in_the_box(page, name):
    lab = Lab(cell(page, name))
    write(page, lab.answer, "3")
    page.keyboard.press("Enter")
    lab.says("You predict: 3 ")
    write(page, lab.answer, "17.75")
    click(lab.run)
    lab.says("you predicted 17.75")


def test_a_computation_that_is_changed_needs_another_prediction(page):
    place = cell(page, "FormatLab")
    lab = Lab(place)
    write(page, lab.answer, "3")
    page.keyboard.press("Enter")
    lab.says("You predict: 3 ")
    write(page, place.get_by_label("Computation:"), "1 + 2.5")
    click(lab.run)
    lab.says("First predict, then run.")


def test_the_allocator_takes_the_prediction_and_the_size_in_the_boxes(page):
    from playwright.sync_api import expect

    place = cell(page, "AllocatorLab")
    answer = place.get_by_label("Reserved afterwards, you predict:")
    write(page, answer, "40")
    page.keyboard.press("Enter")
    expect(message(place)).to_contain_text("you predicted 40 MiB")
    write(page, place.get_by_label("MiB:", exact=True), "36.5")
    click(button(place, "Do it"))
    expect(picture(place)).to_have_attribute("alt", re.compile(r"B 36\.5 MiB"))


def test_streams_take_the_verdict_that_is_chosen(page):
    from playwright.sync_api import expect

    place = cell(page, "StreamsLab")
    place.get_by_label("You predict:").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown", delay=BETWEEN_KEYS)
    click(button(place, "Run"))
    expect(message(place)).to_contain_text("Stale value")
    expect(message(place)).to_contain_text("As you predicted.")


def test_the_line_goes_out_that_is_selected(page):
    from playwright.sync_api import expect

    place = cell(page, "StreamsLab")
    program = place.get_by_label("Program:")
    program.select_option(index=0)
    program.focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown", delay=BETWEEN_KEYS)
    click(button(place, "Remove"))
    expect(message(place)).to_contain_text("Line 3 is out")


def test_a_guess_is_about_the_claim_that_is_selected(page):
    from playwright.sync_api import expect

    place = cell(page, "ClaimsPanel")
    names = [claim.name for claim in articles.claims()]
    wanted = names[names.index("_get_shared_mem") + 3]
    place.get_by_label("Claim:").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown", delay=BETWEEN_KEYS)
    click(button(place, "It holds"))
    expect(message(place)).to_contain_text(f"{articles.VERDICTS[articles.find(wanted).verdict]}.")
    expect(message(place)).to_contain_text(re.sub("`", "", articles.find(wanted).why))
