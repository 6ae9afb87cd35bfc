"""The explorer as an element of a page, with its data, its script and its style.

The element has the whole trace and loads nothing from a network.
"""

import base64
import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gputrace.explorer import columns
from gputrace.files import chrome, snapshot

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

_FOLDER = Path(__file__).parent
_SCRIPTS = ("lanes.js", "pen.js", "tables.js", "links.js", "search.js", "flame.js", "explorer.js")


@cache
def script() -> str:
    """Return the script that draws all explorers of a page. The page has it after the explorers."""
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return f"(() => {{\n{''.join(parts)}}})();"


def policy() -> str:
    """Return a content security policy that allows only this script, and no network."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    allowed = f"img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}"


@cache
def style() -> str:
    """Return the style sheet of an explorer."""
    return (_FOLDER / "explorer.css").read_text(encoding="utf-8")


def element(trace: "TraceData", name: str = "trace") -> str:
    """Return the element for a trace. It is hidden until the script has drawn it.

    The trace's data is compressed, so that nothing in it can be read as HTML or as a script.

    Args:
        name: the beginning of the names of files to download.
    """
    content = json.dumps(columns.of(trace), separators=(",", ":")).encode()
    files = f'<div class="files">{"".join(_file(*file) for file in _files(trace, name))}</div>'
    return f'<div class="explorer" hidden>{_packed(content, "columns")}{files}</div>'


def _files(trace: "TraceData", name: str) -> list[tuple[str, str, bytes, str]]:
    """Return the files to download as (file name, tool, content, address of the tool).

    The file names begin with `name`.
    """
    files = []
    if not trace.no_timeline:
        content = b"".join(chrome.content(trace))
        files.append((f"{name}.json", "Perfetto", content, "https://ui.perfetto.dev"))
    if not trace.lost:
        viewer, address = "PyTorch's memory viewer", "https://pytorch.org/memory_viz"
        files.append((f"{name}.pickle", viewer, snapshot.content(trace), address))
    return files


def _file(filename: str, tool: str, content: bytes, address: str) -> str:
    """Return HTML with the file's content, a button to download it, and a link to the tool.

    `address` is the address of the tool that opens the file.
    """
    kind = filename.rpartition(".")[2]
    data = f'data-file="file-{kind}" data-name="{filename}"'
    button = f'<button type="button" hidden {data}>Download for {tool}</button>'
    link = f'<a href="{address}" rel="noopener noreferrer">Open {tool}</a>'
    return f"<span>{button} {link}</span>{_packed(content, f'file-{kind}')}"


def _packed(content: bytes, identity: str) -> str:
    """Return compressed data as an HTML element. The same content always gives the same text.

    `identity` is the id of the element.
    """
    packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    return f'<script type="application/gzip" id="{identity}">{packed}</script>'
