"""What a notebook shows of a lab after the end of its kernel.

A widget is gone when its kernel has ended, and JupyterLab shows "model not found". Each lab
therefore has a second output of plain HTML, which the notebook's file keeps. It has the lab's last
figure and a sentence that says which cells to run. While the lab lives, a style hides this output.
"""

import hashlib
from html import escape

from IPython.display import HTML, DisplayHandle, display

from gputrace.figures.figure import IN_THE_DARK
from labkit.labs.round_trip import PANEL

# A panel whose kernel was restarted is disconnected. The third rule hides what JupyterLab writes in
# the place of a widget that it does not find, which is text without any element. The last rule
# inverts the figure in JupyterLab's dark theme.
_STYLE = """<style>
body:has(.LAB:not(.jupyter-widgets-disconnected))
  :is(.LAB-kept, .jp-OutputArea-child:has(.LAB-kept)) { display: none }
.PANEL.jupyter-widgets-disconnected { display: none }
.jp-OutputArea-child:has(.LAB-kept) + .jp-OutputArea-child > .jp-OutputArea-output:not(:has(*)) {
  display: none }
[data-jp-theme-light=false] .LAB-kept img DARK
</style>"""


class Kept:
    """The second output of one lab.

    Attributes:
        css_class: class that the lab's widget must have.
    """

    def __init__(self, lab: str, cells: str) -> None:
        """Prepare the output.

        `lab` identifies the lab, and `cells` says which cells to run again.
        """
        digest = hashlib.sha256(lab.encode()).hexdigest()[:12]
        self.css_class = f"{PANEL}-{digest}"
        self._cells = cells
        self._output: DisplayHandle | None = None

    def show(self, figure: str) -> None:
        """Add the output to the running cell. `figure` is the HTML of the last figure, or ""."""
        self._output = display(self._html(figure), display_id=True)

    def update(self, figure: str) -> None:
        """Replace the figure in the output, if the output was shown."""
        if self._output is not None:
            self._output.update(self._html(figure))

    def _html(self, figure: str) -> HTML:
        figure_before = "This is the lab's last figure. " if figure else ""
        sentence = (
            f"{figure_before}The lab ended with its kernel. To use it again, run {self._cells}."
        )
        style = _STYLE.replace("LAB", self.css_class).replace("PANEL", PANEL)
        style = style.replace("DARK", IN_THE_DARK)
        return HTML(
            f'<div class="{self.css_class}-kept">{style}<p>{escape(sentence)}</p>{figure}</div>'
        )
