"""The site's build adds links to its pages: where a lesson can be opened."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def conf():
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def read(conf, name: str) -> str:
    source = [(ROOT / name).read_text(encoding="utf-8")]
    conf["_know_address"](None, name.rpartition(".")[0], source)
    return source[0]


def test_a_lesson_leads_to_the_places_where_it_opens(conf, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/kit")
    first = json.loads(read(conf, "notebooks/02_streams.ipynb"))["cells"][0]["source"]
    assert first.startswith(
        "# 2 Streams and synchronization\n\n"
        "Open this lesson [on Binder](https://mybinder.org/v2/gh/someone/kit/main?"
    )
    assert (
        first.count("02_streams.ipynb") == len(conf["PLACES"])
        and "LESSON" not in first
        and "The lesson has two sittings." in first
    )
    assert "git+https://github.com/someone/kit\n" in read(conf, "docs/platforms.md")


def test_without_an_address_nothing_is_linked(conf, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    for name in ("notebooks/02_streams.ipynb", "docs/platforms.md"):
        assert read(conf, name) == (ROOT / name).read_text(encoding="utf-8")


def test_the_places_are_those_of_the_guide(conf):
    guide = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    assert all(f"`{link}`" in guide for link in conf["PLACES"].values())
