"""What a panel brings to the page that shows it, hidden, for who works without a mouse.

It is seen which control has the keyboard's place: ipywidgets' own sign is a line of one pixel that changes from grey to light blue.

A list keeps its keys. JupyterLab takes the arrows and letters that are typed in one for its own shortcuts, which go to another cell or
delete this one (https://github.com/jupyter-widgets/ipywidgets/issues/3912), unless the list's element says otherwise. No widget can set
an element's attribute from Python: an empty picture does when the browser has read it.
"""

from labkit.plots import BLUE

PANEL = "labkit-panel"  # the class of the panel's element

_FOCUS = """<style>
.PANEL :is(button, input, select, [tabindex]):focus-visible { outline: 2px solid var(--jp-brand-color1, BLUE); outline-offset: -2px }
.PANEL input[type=checkbox]:focus-visible { outline-offset: 1px }
.PANEL .widget-checkbox { padding-left: 4px }
</style>""".replace("PANEL", PANEL).replace("BLUE", BLUE)
_KEYS = (
    f"this.closest('.{PANEL}')?.addEventListener('focusin', event => {{"
    " if (event.target.matches('select')) event.target.dataset.lmSuppressShortcuts = 'true' })"
)
_EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

KEYBOARD = f'{_FOCUS}<img alt="" src="{_EMPTY}" onload="{_KEYS}">'
