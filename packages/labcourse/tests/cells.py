"""Cells of notebooks in a text file: each below a heading, which starts with ##."""

import re
from pathlib import Path


def cells(name: str) -> dict[str, str]:
    """Return the cells of a file in this folder by their headings."""
    text = Path(__file__).with_name(name).read_text()
    found = re.findall(r"^## (.*)\n((?:(?!##? ).*\n)*)", text, flags=re.MULTILINE)
    return {heading: cell.strip("\n") for heading, cell in found}
