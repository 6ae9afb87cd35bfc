"""The look of the widgets: each has its own `Layout` and `Style`, for what hides one must not hide another."""

from collections import Counter
from collections.abc import Iterator

import ipywidgets
import pytest

import labkit
from labkit import widgets

LABS = [name for name in vars(widgets) if name.endswith(("Lab", "Panel")) and name != "Lab"]


def parts(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """The widget and all that it shows."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


@pytest.mark.parametrize("name", LABS)
def test_no_two_widgets_share_a_layout_or_a_style(name):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        shown = [part for _ in range(2) for part in parts(getattr(widgets, name)())]
    for trait in ("layout", "style"):
        owners = Counter(look.model_id for part in shown if (look := getattr(part, trait, None)) is not None)
        assert owners and max(owners.values()) == 1, trait
