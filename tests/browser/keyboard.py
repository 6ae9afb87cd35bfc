"""A learner without a mouse: what Tab reaches, in which order, and whether focus is visible."""

from typing import Any

MOST_STEPS = 60  # presses of a key until something has the keyboard's place
CONTROLS = "button, input, select, textarea, summary, a[href], [tabindex], [contenteditable='true']"
REACHABLE = f"""panel => [...panel.querySelectorAll("{CONTROLS}")]
    .filter(control => control.tabIndex >= 0 && !control.disabled && control.checkVisibility())"""
# Remembers the element with the keyboard focus, and how it looks.
VISIT = """panel => {
    const control = document.activeElement;
    if (!panel.contains(control)) return false;
    window.visits.push({control, style: window.styleOf(control)});
    return true;
}"""
FORGET_VISITS = """() => {
    window.visits = [];
    window.styleOf = control => {
        const style = getComputedStyle(control);
        return [style.outline, style.border, style.boxShadow, style.background].join(" | ");
    };
}"""
# Returns the faults of a walk, after the focus has left the panel.
FAULTS = f"""panel => {{
    const reachable = ({REACHABLE})(panel);
    const reached = control => visits.some(visit => visit.control === control);
    const name = control => control.outerHTML.slice(0, 120);
    const places = visits.map(visit => visit.control.getBoundingClientRect());
    return [
        ...reachable.filter(control => !reached(control))
            .map(control => `never reached: ${{name(control)}}`),
        ...visits.filter(visit => styleOf(visit.control) === visit.style)
            .map(visit => `cannot be seen there: ${{name(visit.control)}}`),
        ...places.slice(1).flatMap((place, index) => {{
            const before = places[index];
            const after = place.top >= before.bottom - 4 || place.left >= before.right - 4;
            return after ? [] : [`reached too late: ${{name(visits[index + 1].control)}}`];
        }}),
    ];
}}"""


def walk(page: Any, panel: Any) -> list[str]:
    """Press Tab from the element before the panel until the focus leaves the panel. Return faults.

    Each control must be reached, in the order of reading, and look different while it has the
    keyboard focus.
    """
    page.evaluate(FORGET_VISITS)
    inside = False
    for _ in range(MOST_STEPS):
        page.keyboard.press("Tab")
        if panel.evaluate(VISIT):
            inside = True
        elif inside:
            return panel.evaluate(FAULTS)
    return [f"after {MOST_STEPS} presses of Tab the panel's end was not passed"]


def reach(page: Any, element: Any, key: str = "Tab") -> None:
    """Press the key until the element has the keyboard focus."""
    from playwright.sync_api import expect

    for _ in range(MOST_STEPS):
        if element.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press(key)
    expect(element).to_be_focused()


def press(page: Any, element: Any, key: str = "Space", way: str = "Tab") -> None:
    """Go to the element, by pressing the key `way`, and press a key there."""
    reach(page, element, way)
    page.keyboard.press(key)


def overwrite(page: Any, character: str) -> None:
    """Type one character in place of a field's text.

    ipywidgets sends the first character at once. More may arrive after the next click.
    """
    assert len(character) == 1
    page.keyboard.press("Control+A")
    page.keyboard.type(character)
