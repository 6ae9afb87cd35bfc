"""Tables of text: in a terminal, in a notebook and on a page."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_FIGURE = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?(%| ?[A-Za-zµ/]+)?|")  # 12, +4.5 MiB, or nothing
_LONG = 24  # characters: a longer text may be broken, even within a word


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return each row of text as a line, with the columns below each other."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return ["  ".join(line).rstrip() for line in padded]


@dataclass(frozen=True)
class Table:
    """Rows of text with a header; prints as plain text and as HTML."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def __repr__(self) -> str:
        return "\n".join([self.caption, *aligned([self.header, *self.rows])])

    def _repr_html_(self) -> str:
        styles = [_style([row[i] for row in self.rows]) for i in range(len(self.header))]
        head = "".join(f'<th scope="col" style="{style}">{escape(cell)}</th>' for cell, style in zip(self.header, styles, strict=True))
        body = "".join(
            "<tr>" + "".join(f'<td style="{style}">{escape(cell)}</td>' for cell, style in zip(row, styles, strict=True)) + "</tr>"
            for row in self.rows
        )
        caption = f'<caption style="color: inherit">{escape(self.caption)}</caption>'  # the classic notebook would make it too pale to read
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        # It may be wider than the page: the keyboard reaches it, to scroll.
        return f'<div role="group" tabindex="0" aria-label="{escape(self.caption)}" style="overflow-x: auto">{table}</div>'


class Tabulated:
    """What prints as the table that its `table()` makes."""

    def table(self) -> Table:
        """The rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return repr(self.table()).rstrip("\n")

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _style(cells: list[str]) -> str:
    """How a column is laid out, in the cells themselves: a notebook's own style would put text to the right and let it run off the page."""
    if all(_FIGURE.fullmatch(cell) for cell in cells):
        return "text-align: right; white-space: nowrap"
    if max(map(len, cells)) <= _LONG:
        return "text-align: left; white-space: nowrap"
    return "text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 16em"
