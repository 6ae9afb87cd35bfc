"""The explorer in a notebook: a page in a frame, and a picture where scripts cannot run."""

from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrace.explorer import element

if TYPE_CHECKING:
    from gputrace.figures.figure import Figure
    from gputrace.trace_data import TraceData

# A page that only shows a notebook, such as GitHub's, drops the frame and the scripts. The picture
# then stays visible, because only the script folds it.
_AROUND = """<style>
iframe.labkit-explorer {{ width: 100%; height: 38rem; border: 0; resize: vertical; }}
[data-jp-theme-light=false] iframe.labkit-explorer {{ color-scheme: dark }}
[data-jp-theme-light=true] iframe.labkit-explorer {{ color-scheme: light }}
</style>
<iframe class="labkit-explorer" title="{title}" srcdoc="{page}"
sandbox="allow-scripts allow-downloads allow-popups"></iframe>
<details open class="labkit-explored"><summary>The same as a picture</summary>{picture}</details>
<script>
document.querySelectorAll(".labkit-explored").forEach(picture => {{ picture.open = false; }});
</script>"""
_TITLE = "Explorer: what ran when, and the blocks of memory"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>What ran when, and the blocks of memory</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<base target="_blank">
<style>
:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }}
body {{ margin: 0; }}
{style}</style>
</head>
<body>{element}<script>{script}</script></body>
</html>"""


class Exploration:
    """Explorer of a trace, for the pointer and the keyboard.

    A notebook shows it as the output of a cell. `save("trace.html")` writes it to a page.

    Attributes:
        picture: the figure that replaces the explorer where scripts cannot run.
    """

    def __init__(self, trace: "TraceData", picture: "Figure") -> None:
        self._trace = trace
        self.picture = picture

    @cached_property
    def page(self) -> str:
        """The explorer as an HTML page, which contains all its data."""
        return _PAGE.format(
            policy=escape(element.policy()),
            style=element.style(),
            script=element.script(),
            element=element.element(self._trace),
        )

    def save(self, path: str | Path) -> None:
        """Write the page to a file, whose name ends in .html or .htm.

        Raises:
            ValueError: the name has another suffix.
            OSError: the file cannot be written.
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(
                f"path={str(path)!r}: expected a name that ends in .html, such as 'trace.html', "
                "because the file is a page"
            )
        Path(path).write_text(self.page, encoding="utf-8")

    def __repr__(self) -> str:
        return self.picture.alt

    @property
    def html(self) -> str:
        """The frame with the page, and the picture, as an element of another page."""
        return _AROUND.format(page=escape(self.page), picture=self.picture.html, title=_TITLE)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data, metadata = self.picture._repr_mimebundle_()
        return data | {"text/html": self.html}, metadata
