"""What the tests of figures share: the texts of a picture, and whether they can be read."""

import pytest
from matplotlib.text import Text

from gputrace.figures.figure import SIZE


def shown(canvas) -> list[Text]:
    canvas.draw_without_rendering()
    return [text for text in canvas.findobj(Text) if text.get_text() and text.get_visible()]


@pytest.fixture
def texts():
    return lambda canvas: [text.get_text() for text in shown(canvas)]


@pytest.fixture
def legible():
    """A function that checks that a figure fits a page, and that its texts are large enough."""

    def check(canvas):
        assert tuple(canvas.get_size_inches()) <= SIZE
        page = canvas.bbox
        for text in shown(canvas):
            box = text.get_window_extent()
            assert text.get_fontsize() >= 9
            assert (
                page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
            ), text.get_text()

    return check
