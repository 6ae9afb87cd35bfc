"""Links of notebooks and Markdown files that lead to nothing."""

import html
import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINKS = re.compile(
    r"""\]\(\s*<?([^)\s>]+)|\b(?:href|src)=["']([^"']+)|^\s*\[[^\]]+\]:\s*(\S+)""", re.MULTILINE
)
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def dead_links(folder: Path, name: str = "*.ipynb") -> list[str]:
    """Return links whose target is missing or outside `folder`, which a server would not show.

    `name` is a pattern for the names of the files that are read.
    """
    return [
        f"{file.name}: {link}"
        for file in sorted(folder.glob(name))
        for link in links(file)
        if not _arrives(file, link, folder)
    ]


def links(file: Path) -> list[str]:
    """Return the links of a file that do not leave this computer."""
    found = [
        "".join(parts) for text in _texts(file) for parts in _LINKS.findall(_CODE.sub("", text))
    ]
    return [
        html.unescape(link)
        for link in found
        if not urlsplit(link).scheme and not link.startswith("//")
    ]


def _texts(file: Path) -> list[str]:
    """Return a file's Markdown, and the HTML that a notebook shows."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return [text]
    cells = json.loads(text)["cells"]
    shown = [
        output.get("data", {}).get("text/html", "")
        for cell in cells
        for output in cell.get("outputs", [])
    ]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"] + [
        "".join(some) for some in shown
    ]


def _arrives(file: Path, link: str, folder: Path) -> bool:
    parts = urlsplit(link)
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file.resolve()
    if not target.is_relative_to(folder.resolve()) or not target.is_file():
        return False
    return not parts.fragment or unquote(parts.fragment) in _places(target)


def _places(file: Path) -> set[str]:
    """Return the anchors of a file: names of anchors, and headings as JupyterLab names them."""
    text = "\n\n".join(_texts(file))
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", text, re.MULTILINE)
    anchors = (
        set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)) if file.suffix == ".md" else set()
    )
    return anchors | {heading.replace(" ", "-") for heading in headings}
