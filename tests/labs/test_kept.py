"""What a notebook keeps of a lab: a second output, which follows the lab's last figure."""

import ipywidgets as widgets
import pytest

from labkit import progress_file
from labkit.labs import kept, panel


class Shown:
    """Replacement of a notebook. It has the HTML of the output that a notebook would show."""

    def __init__(self):
        self.html = None

    def display(self, html, display_id):
        assert display_id is True
        self.html = html.data
        return self

    def update(self, html):
        self.html = html.data


class Drawing(panel.Panel):
    question = "What is drawn?"

    def __init__(self):
        self.picture = widgets.HTML()
        super().__init__([self.picture])


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    shown = Shown()
    monkeypatch.setattr(kept, "display", shown.display)
    monkeypatch.setattr(panel, "display", lambda data, raw: None)
    monkeypatch.setattr(panel, "running_loop", object)
    monkeypatch.setattr(progress_file, "path", lambda: tmp_path / "progress.json")
    return shown


def test_it_says_which_cells_to_run_and_follows_the_figure(notebook):
    lab = Drawing()
    lab._ipython_display_()
    assert "To use it again, run the set-up cell" in notebook.html
    assert "last figure" not in notebook.html
    lab.picture.value = "<b>first</b>"
    lab.picture.value = ""
    assert "<b>first</b>" in notebook.html and "the lab&#x27;s last figure." in notebook.html
    lab.picture.value = "<b>second</b>"
    assert "<b>second</b>" in notebook.html and "first" not in notebook.html


def test_a_cell_that_runs_again_keeps_the_figure_that_it_brings_back(notebook):
    lab = Drawing()
    lab._ipython_display_()
    lab.picture.value = "<b>first</b>"
    notebook.html = None
    lab._ipython_display_()
    assert "<b>first</b>" in notebook.html


def test_the_style_hides_it_by_the_class_of_the_living_lab(notebook):
    lab = Drawing()
    lab._ipython_display_()
    [own] = [name for name in lab._dom_classes if name.startswith("labkit-panel-")]
    assert f"body:has(.{own}:not(" in notebook.html and f'class="{own}-kept"' in notebook.html


@pytest.mark.parametrize("nothing", ["progress", "loop"])
def test_nothing_is_kept_if_no_progress_is_stored_or_outside_a_notebook(
    notebook, monkeypatch, nothing
):
    if nothing == "progress":
        monkeypatch.setattr(progress_file, "path", lambda: None)
    else:
        monkeypatch.setattr(panel, "running_loop", lambda: None)
    Drawing()._ipython_display_()
    assert notebook.html is None
