"""Check that everybody can read a page: axe-core in each theme, and texts for pictures."""

from typing import Any

GRAVE = ("serious", "critical")  # of axe-core's impacts: minor, moderate, serious, critical
LEAST_WORDS = 8  # a text that says what a figure shows is longer
# JupyterLab colours a link in the text of a lesson and removes its underline. Links of the kit keep
# theirs.
THEIRS = {"link-in-text-block": ".jp-RenderedMarkdown"}
WITHIN = "([target, place]) => document.querySelector(target)?.closest(place) != null"
PICTURES = """selectors => {
    const pictures = selectors.map(([selector]) => `${selector} img`).join(", ");
    return [...document.querySelectorAll(pictures)]
        .filter(picture => picture.checkVisibility()).map(picture => picture.alt);
}"""


def violations(page: Any, drawn: dict[str, list[list[str]]]) -> list[str]:
    """Return the faults that axe-core finds in parts of a page, as (rule, element, reason).

    `drawn` has the selectors of the parts.
    """
    # `make test` collects this folder too, without the packages that a browser needs.
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, drawn, {"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:200]}\n{node['failureSummary']}"
        for rule in found
        if rule["impact"] in GRAVE
        for node in rule["nodes"]
        if rule["id"] not in THEIRS
        or not page.evaluate(WITHIN, [node["target"][0], THEIRS[rule["id"]]])
    ]


def wordless_pictures(page: Any, drawn: dict[str, list[list[str]]]) -> list[str]:
    """Return the alternative texts that are too short to describe a picture with its numbers.

    `drawn` has the selectors of the parts of the page.
    """
    texts = page.evaluate(PICTURES, drawn["include"])
    return [
        f"a picture whose words are “{text}”"
        for text in texts
        if len(text.split()) < LEAST_WORDS or not any(map(str.isdigit, text))
    ]
