"""A trace to look into as a notebook's output: one page in a frame, and the picture beside it."""

import html
import re
from html.parser import HTMLParser

import pytest

from gputrace.explorer import element


def test_the_output_has_the_page_and_the_picture(training):
    shown = training.explore()
    data, metadata = shown._repr_mimebundle_()
    picture, _ = shown.picture._repr_mimebundle_()
    assert {kind: data[kind] for kind in picture} == picture and metadata["image/png"][
        "alt"
    ] == shown.picture.alt
    parser, frames = HTMLParser(), []
    parser.handle_starttag = lambda tag, attributes: (
        frames.append(dict(attributes)) if tag == "iframe" else None
    )
    parser.feed(data["text/html"])
    assert [frame["srcdoc"] for frame in frames] == [shown.page]
    # nothing of the notebook can be reached from it
    assert "allow-same-origin" not in frames[0]["sandbox"]
    assert (
        f'<details open class="labkit-explored"><summary>The same as a '
        f"picture</summary>{shown.picture.html}" in data["text/html"]
    )


def test_without_a_timeline_the_picture_is_the_memory(training):
    assert training.explore().picture.title == training.plot_memory().title
    assert repr(training.explore()) == training.plot_memory().alt


def test_the_page_is_whole(training, tmp_path):
    training.explore().save(tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text("utf-8")
    assert page == training.explore().page and html.escape(element.policy()) in page
    assert not re.search(
        r'(src|href)="(?!https://(ui\.perfetto\.dev|pytorch\.org/memory_viz)")', page
    )


def test_another_suffix_is_refused(training, tmp_path):
    with pytest.raises(ValueError, match=r"expected a name that ends in .html"):
        training.explore().save(tmp_path / "trace.png")
