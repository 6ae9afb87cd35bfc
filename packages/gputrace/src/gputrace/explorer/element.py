"""The explorer as part of a page: its element, with all of a trace in it, its script and its style. It fetches nothing."""

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


@cache
def script() -> str:
    """The program, which fills every explorer of the page that it stands in, after them."""
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in ("lanes.js", "pen.js", "tables.js", "explorer.js")]
    return f"(() => {{\n{''.join(parts)}}})();"


def policy() -> str:
    """What a page with an explorer may do: run this one script, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@cache
def style() -> str:
    """The rules for everything within an explorer."""
    return (_FOLDER / "explorer.css").read_text(encoding="utf-8")


def element(trace: "TraceData", name: str = "trace") -> str:
    """The element, hidden until its script has drawn it. The names of its files to download begin with `name`.

    What comes from the trace is packed, so that none of it is read as HTML or as a program, and shown as text alone.
    """
    content = json.dumps(columns.of(trace), separators=(",", ":")).encode()
    files = "".join(_file(*file) for file in _files(trace, name))
    return f'<div class="explorer" hidden>{_packed(content, "columns")}<div class="files">{files}</div></div>'


def _files(trace: "TraceData", name: str) -> list[tuple[str, str, bytes, str]]:
    """What other tools open: the file's name, the tool's, the content and the tool's address."""
    files = []
    if not trace.no_timeline:
        files.append((f"{name}.json", "Perfetto", b"".join(chrome.content(trace)), "https://ui.perfetto.dev"))
    if not trace.lost:
        files.append((f"{name}.pickle", "PyTorch's memory viewer", snapshot.content(trace), "https://pytorch.org/memory_viz"))
    return files


def _file(filename: str, tool: str, content: bytes, address: str) -> str:
    kind = filename.rpartition(".")[2]
    button = f'<button type="button" hidden data-file="file-{kind}" data-name="{filename}">Download for {tool}</button>'
    return f'<span>{button} <a href="{address}" rel="noopener noreferrer">Open {tool}</a></span>{_packed(content, f"file-{kind}")}'


def _packed(content: bytes, identity: str) -> str:
    """Data in a page; the same bytes give the same text at any time."""
    packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    return f'<script type="application/gzip" id="{identity}">{packed}</script>'
