"""The explorer in a notebook: a page of its own within the output, and the picture for where no script may run."""

from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrace.explorer import element

if TYPE_CHECKING:
    from gputrace.figures.figure import Figure
    from gputrace.trace_data import TraceData

# A notebook that is only read, as on GitHub, drops frame and script: then the picture below stays unfolded.
_AROUND = """<style>
iframe.labkit-explorer {{ width: 100%; height: 38rem; border: 0; resize: vertical; }}
[data-jp-theme-light=false] iframe.labkit-explorer {{ color-scheme: dark }}
[data-jp-theme-light=true] iframe.labkit-explorer {{ color-scheme: light }}
</style>
<iframe class="labkit-explorer" title="What ran when, and the blocks of memory, to look into" srcdoc="{page}"
sandbox="allow-scripts allow-downloads allow-popups"></iframe>
<details open class="labkit-explored"><summary>The same as a picture</summary>{picture}</details>
<script>document.querySelectorAll(".labkit-explored").forEach(picture => {{ picture.open = false; }});</script>"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>What ran when, and the blocks of memory</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<base target="_blank">
<style>:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }} body {{ margin: 0; }}
{style}</style>
</head>
<body>{element}<script>{script}</script></body>
</html>"""


class Exploration:
    """A trace to look into, by pointer and by keyboard: a notebook shows it as the output of a cell; `save("trace.html")` writes a page.

    `page` is that page, which holds all that it shows; `picture` the figure that stands in where no script runs.
    """

    def __init__(self, trace: "TraceData", picture: "Figure") -> None:
        self._trace = trace
        self.picture = picture

    @cached_property
    def page(self) -> str:
        """A self-contained HTML page."""
        parts = {"policy": escape(element.policy()), "style": element.style(), "script": element.script()}
        return _PAGE.format(element=element.element(self._trace), **parts)

    def save(self, path: str | Path) -> None:
        """Write the page to a file. Raises ValueError for a name with another suffix, OSError where it cannot be written."""
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"path={str(path)!r}: that is a page; give a name that ends in .html, such as 'trace.html'")
        Path(path).write_text(self.page, encoding="utf-8")

    def __repr__(self) -> str:
        return self.picture.alt

    @property
    def html(self) -> str:
        """An element that holds the page and the picture."""
        return _AROUND.format(page=escape(self.page), picture=self.picture.html)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data, metadata = self.picture._repr_mimebundle_()
        return data | {"text/html": self.html}, metadata
