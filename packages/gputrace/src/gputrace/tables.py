"""Tables of text for terminals, notebooks and pages."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_FIGURE = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?(%| ?[A-Za-zµ/]+)?|")  # 12, +4.5 MiB, or nothing
_LONG = 24  # characters. Longer texts may be broken, even inside a word.


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return each row of cells as a line of text with aligned columns."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return ["  ".join(line).rstrip() for line in padded]


@dataclass(frozen=True)
class Table:
    """Rows of text with a header and a caption, which print as plain text and as HTML.

    Attributes:
        header: the title of each column.
        rows: the texts of each row, one per column.
        caption: a sentence about the table.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def __repr__(self) -> str:
        return "\n".join([self.caption, *aligned([self.header, *self.rows])])

    def _repr_html_(self) -> str:
        styles = [_style([row[i] for row in self.rows]) for i in range(len(self.header))]
        head = "".join(map(_head_cell, self.header, styles))
        body = ""
        for row in self.rows:
            body += f"<tr>{''.join(map(_body_cell, row, styles))}</tr>"
        # Without `inherit`, the classic notebook shows a caption in a very pale colour.
        caption = f'<caption style="color: inherit">{escape(self.caption)}</caption>'
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        # A wide table scrolls. With `tabindex`, the keyboard can scroll it.
        role = f'role="group" tabindex="0" aria-label="{escape(self.caption)}"'
        return f'<div {role} style="overflow-x: auto">{table}</div>'


class Tabulated:
    """Base class of objects that print as the table from their method `table`."""

    def table(self) -> Table:
        """Return the table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return repr(self.table()).rstrip("\n")

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _head_cell(text: str, style: str) -> str:
    """Return a cell of a table's header in HTML. `style` is its CSS style."""
    return f'<th scope="col" style="{style}">{escape(text)}</th>'


def _body_cell(text: str, style: str) -> str:
    """Return a cell of a table's row in HTML. `style` is its CSS style."""
    return f'<td style="{style}">{escape(text)}</td>'


def _style(cells: list[str]) -> str:
    """Return the CSS style of the cells in a column.

    It is written into each cell, because a notebook's own style would align text to the right and
    let it exceed the page.
    """
    if all(_FIGURE.fullmatch(cell) for cell in cells):
        return "text-align: right; white-space: nowrap"
    if max(map(len, cells)) <= _LONG:
        return "text-align: left; white-space: nowrap"
    return "text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 16em"
