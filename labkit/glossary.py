"""The glossary that lies beside a learner's copies of the lessons.

It is a notebook, because JupyterLab shows the source of Markdown files. It is made from
`docs/glossary.md`, which has a table with an anchor for each word. JupyterLab follows only links to
headings. So each word becomes a heading, and links to its anchor become links to this heading.
"""

import re
from pathlib import Path
from typing import Any

NAME = "glossary.ipynb"
_ROW = re.compile(
    r'^\| <a id="(?P<anchor>[^"]+)"></a>(?P<word>.+?) \| (?P<meaning>.+) '
    r"\| (?P<lesson>\[.+\]\(.+\)) \|$"
)
_TABLE = ("| word |", "| --- |")
_LINK = re.compile(r"\.\./docs/glossary\.md(?:#(?P<anchor>[\w-]+))?")


class Glossary:
    """The words of a glossary file and their meanings."""

    def __init__(self, file: Path) -> None:
        """Read the file. Raises ValueError with the row if a row of the table is not a word."""
        self._intro: list[str] = []
        self._words: dict[str, re.Match[str]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            row = _ROW.match(line)
            if row is not None:
                self._words[row["anchor"]] = row
            elif not line.startswith("|"):
                self._intro.append(line)
            elif not line.startswith(_TABLE):
                raise ValueError(
                    f"{file}: expected a row with an anchor, a word, its meaning and a lesson, "
                    f"got {line!r}"
                )

    def notebook(self) -> dict[str, Any]:
        """Return a notebook with one cell, which has the words as headings."""
        parts = ["\n".join(self._intro).strip()]
        for row in self._words.values():
            parts.append(f"#### {row['word']}\n\n{row['meaning']} (lesson {row['lesson']})")
        text = "\n\n".join(parts).replace("](../notebooks/", "](")
        cell = {"cell_type": "markdown", "id": "glossary", "metadata": {}, "source": text}
        return {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}

    def relink(self, text: str) -> str:
        """Return the text with links to the notebook instead of links to the file.

        Raises ValueError for a link to a word that the glossary does not have.
        """
        return _LINK.sub(self._heading, text)

    def _heading(self, link: re.Match[str]) -> str:
        """Return the address of the heading for a link to the file."""
        anchor = link["anchor"]
        if anchor is None:
            return NAME
        if anchor not in self._words:
            raise ValueError(f"A lesson links to {anchor!r}, which the glossary does not explain.")
        return f"{NAME}#{self._words[anchor]['word'].replace(' ', '-')}"
