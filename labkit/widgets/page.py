"""What a panel brings to the page that shows it, hidden: what ipywidgets leaves unseen is seen, and a list keeps its keys.

Seen are links, the arrows of lists in a dark theme, and which control has the keyboard's place: ipywidgets' own sign of it is a line of one
pixel that changes from grey to light blue.

JupyterLab takes the arrows and letters that are typed in a list for its own shortcuts, which go to another cell or delete this one
(https://github.com/jupyter-widgets/ipywidgets/issues/3912), unless the list's element says otherwise. No widget can set an element's
attribute from Python: an empty picture does when the browser has read it.
"""

from labkit.plots import BLUE

PANEL = "labkit-panel"  # the class of the panel's element

_ARROW = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='white'/%3E%3C/svg%3E"
_STYLE = (
    """<style>
.PANEL :is(button, input, select, [tabindex]):focus-visible { outline: 2px solid var(--jp-brand-color1, BLUE); outline-offset: -2px }
.PANEL input[type=checkbox]:focus-visible { outline-offset: 1px }
.PANEL .widget-checkbox { padding-left: 4px }
.PANEL a { color: var(--jp-content-link-color, BLUE); text-decoration: underline }
[data-jp-theme-light=false] .PANEL { --jp-widgets-dropdown-arrow: url("data:image/svg+xml,ARROW") }
</style>""".replace("PANEL", PANEL)
    .replace("BLUE", BLUE)
    .replace("ARROW", _ARROW)
)
_KEYS = (
    f"this.closest('.{PANEL}')?.addEventListener('focusin', event => {{"
    " if (event.target.matches('select')) event.target.dataset.lmSuppressShortcuts = 'true' })"
)
_EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

HIDDEN = f'{_STYLE}<img alt="" src="{_EMPTY}" onload="{_KEYS}">'
