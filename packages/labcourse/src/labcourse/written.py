"""Find written answers wherever a student put them.

A student may answer in the cell that was handed out, in a new cell below it, in the cell with the
question, or in a cell that replaced the handed-out one and has none of its metadata. All of these
are the answer. If they are empty, a person sees what the student wrote elsewhere in the notebook.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from labcourse.reading import PLACEHOLDER, Cell

__all__ = ["Answer", "answers"]

SHORTEST = 20  # characters. Shorter handed-out texts are not removed from longer cells.


@dataclass(frozen=True)
class Answer:
    """Written answer. If `text` is empty, `beside` is what the student wrote in other cells."""

    text: str = ""
    beside: str = ""


@dataclass
class _Region:
    """The cells from a question to the next cell that was handed out."""

    texts: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def answers(
    cells: Iterable[Cell],
    questions: Collection[str],
    handed_out: Collection[str],
) -> dict[str, Answer]:
    """Find the answer to each question, and return the answers by the questions' ids.

    Args:
        questions: the ids.
        handed_out: the sources of the cells that students were given.
    """
    regions = {name: _Region() for name in questions}
    loose: list[str] = []  # text cells without the metadata of a question
    given = sorted({text.strip() for text in handed_out} - {PLACEHOLDER, ""}, key=len, reverse=True)
    current = ""
    for cell in cells:
        own, was_given = _own_text(cell, given)
        if cell.written in regions:
            current = cell.written
            regions[current].texts.append(own or cell.source.replace(PLACEHOLDER, "").strip())
            continue
        start = cell.source.lstrip()
        asked = next((name for name in questions if start.startswith(f"**{name}**")), "")
        if asked or was_given:
            current = asked
        if cell.kind != "code":
            loose.append(own)
            if current:
                regions[current].texts.append(own)
        elif current and own:
            regions[current].code.append(own)
    return {name: _answer(region, loose) for name, region in regions.items()}


def _answer(region: _Region, loose: list[str]) -> Answer:
    """Return the text in a question's cells, or what the student wrote elsewhere."""
    text = "\n\n".join(_distinct(region.texts))
    if text:
        return Answer(text)
    return Answer(beside="\n\n".join(_distinct([*loose, *region.code])))


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that are not empty, each once."""
    yield from dict.fromkeys(text for text in texts if text)


def _own_text(cell: Cell, given: list[str]) -> tuple[str, bool]:
    """Return the text that the student wrote in a cell, and whether the rest was handed out.

    `given` has the handed-out texts, the longest first.
    """
    source = cell.source.strip()
    if source in given:
        return "", True
    was_given = False
    for text in given:
        if text in source and (len(text) >= SHORTEST or text.startswith("**")):
            source, was_given = source.replace(text, "\n\n"), True
    return source.replace(PLACEHOLDER, "").strip(), was_given
