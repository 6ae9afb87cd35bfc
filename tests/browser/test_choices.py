"""Each choice of each lab, made with the mouse. The fields that it needs appear."""

import re

import pytest

from .labs import IMPORTS

pytestmark = pytest.mark.browser

# the panel asks nothing
LABS = [
    name
    for name in re.findall(r"import (\w+(?:Lab|Panel))$", IMPORTS, re.MULTILINE)
    if name != "MemoryPanel"
]
SET_UP = f"import labkit\n{IMPORTS}\nlabkit.use(gpus=4, virtual=True)"
# For each choice on which other fields depend, the fields that each option needs. All other fields
# are always there.
NEEDS = {
    ("StreamsLab", "New line:"): {
        "copy a batch to the GPU": {"stream:"},
        "kernel: y = 2 x": {"stream:"},
        "copy y to the host": {"stream:"},
        "stream waits for stream": {"stream:", "waits for:"},
        "host waits for stream": {"stream:"},
    },
    ("AllocatorLab", "Next step:"): {
        "allocate": {"MiB:", "on stream:"},
        "free": {"block:"},
        "empty the cache": set(),
    },
}
FIELDS = "select, input:not([type=file])"
# A checkbox's label is text beside it, and has no element of its own to ask for.
NAMES = (
    "fields => fields.map(field => (field.labels[0] ?? "
    "field.parentElement).textContent.replaceAll('\\u00a0', ' ').trim())"
)
TEXTS = "options => options.map(option => option.text.replaceAll('\\u00a0', ' ').trim())"


@pytest.fixture(scope="module")
def page(open_cells_once, front_end):
    page = open_cells_once("choices", (SET_UP, *(f"{name}()" for name in LABS)))
    front_end.show_whole(page)
    return page


def names(fields: object) -> list[str]:
    return fields.evaluate_all(NAMES)


@pytest.mark.parametrize("lab", LABS)
def test_what_a_choice_needs_can_be_chosen(page, lab):
    from playwright.sync_api import expect

    panel = page.locator(".labkit-panel").nth(LABS.index(lab))
    # All fields, except the one in which the page answers the kernel: nobody sees it.
    fields = panel.locator(f":is({FIELDS}):not(.labkit-answer *)")
    every = names(fields)
    assert every and all(every), "each field has a name"
    sometimes = set()
    for (of, _), needs in NEEDS.items():
        if of == lab:
            sometimes.update(*needs.values())
    # one with a size is a list of lines, not a choice
    selects = panel.locator("select:not([size])")
    for select in map(selects.nth, range(selects.count())):
        if not select.is_visible():
            continue
        [name] = names(select)
        for index, option in enumerate(select.locator("option").evaluate_all(TEXTS)):
            select.select_option(index=index)
            if (lab, name) in NEEDS:
                for field in sometimes:
                    shown = fields.nth(every.index(field))
                    (
                        expect(shown).to_be_visible
                        if field in NEEDS[lab, name][option]
                        else expect(shown).to_be_hidden
                    )()
            assert set(every) - set(names(panel.locator(f":is({FIELDS}):visible"))) <= sometimes, (
                name,
                option,
            )
