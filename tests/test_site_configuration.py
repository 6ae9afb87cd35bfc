"""The site's build adds links to its pages: where a lesson can be opened."""

import argparse
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gputrace
import labkit
import virtualgpu
from gputrace import commands as gputrace_commands
from gputrace.figures.figure import IN_THE_DARK
from labkit import cli
from virtualgpu import commands as virtualgpu_commands

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def conf():
    """Return what docs/conf.py defines. It lets Python find the extensions in docs/."""
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


def test_the_address_can_stand_in_pyproject(conf, monkeypatch, tmp_path):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert conf["repository"]() is None
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nurls = { Repository = "https://github.com/someone/kit" }\n'
    )
    monkeypatch.setitem(conf["repository"].__globals__, "ROOT", tmp_path)
    assert conf["repository"]() == "someone/kit"


def test_words_of_the_glossary_and_of_the_search_lead_to_their_page(conf):
    assert "out of memory" in conf["words_of"]("notebooks/05_caching_allocator")
    assert "activations" in conf["words_of"]("notebooks/04_model_parallelism")
    pages = [page for group in conf["CONTENTS"].values() for page in group]
    assert set(conf["SEARCHED"].values()) <= set(pages)
    source = [(ROOT / "notebooks/05_caching_allocator.ipynb").read_text(encoding="utf-8")]
    conf["_add_words"](None, "notebooks/05_caching_allocator", source)
    first = json.loads(source[0])["cells"][0]["source"]
    assert "```{index} ! single: out of memory\n```" in first


@pytest.mark.slow
def test_a_second_build_keeps_the_index_entries_of_pages_that_did_not_change(tmp_path):
    pytest.importorskip("sphinx")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "conf.py").write_text("")
    (source / "index.rst").write_text("Words\n=====\n\n.. toctree::\n\n   other\n")
    (source / "other.rst").write_text("Others\n======\n\n.. index:: race\n\nText.\n")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [options] = re.findall(r"-m sphinx (.*) -c docs ", makefile)
    for _ in range(2):
        command = [sys.executable, "-m", "sphinx", *options.split(), str(source), str(site)]
        subprocess.run(command, check=True)
        assert '"race"' in (site / "searchindex.js").read_text(encoding="utf-8")
        (source / "index.rst").write_text("Other words\n===========\n\n.. toctree::\n\n   other\n")


def test_figures_on_the_dark_site_are_as_in_dark_notebooks():
    style = (ROOT / "docs" / "static" / "dark.css").read_text(encoding="utf-8")
    assert style.count(f"article img {IN_THE_DARK.replace(' }', '; }')}") == 2


def commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of the commands that do something."""
    below = [
        choice
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action.choices.values()
    ]
    return [each for one in below for each in commands(one)] or [parser]


def reference(conf) -> str:
    """Return the page of the commands as Sphinx reads it."""
    page = "docs/reference/command-line"
    source = [(ROOT / f"{page}.md").read_text(encoding="utf-8")]
    sys.modules["command_reference"].write(None, page, source)
    return source[0]


@pytest.fixture(scope="module")
def page(conf):
    __import__("command_reference")
    return reference(conf)


@pytest.mark.parametrize(
    "parser",
    [
        parser
        for program in (cli._parser(), gputrace_commands.parser(), virtualgpu_commands.parser())
        for parser in commands(program)
    ],
    ids=lambda parser: parser.prog,
)
def test_the_reference_has_every_command_with_its_options_and_examples(page, parser):
    name = parser.prog.replace("python -m labkit", "labkit")
    section = page.partition(f"### `{name}`\n")[2].partition("\n##")[0]
    for action in parser._actions:
        if action.dest != "help":
            assert (
                f"```{{option}} {(action.option_strings or [action.metavar or action.dest])[0]}"
                in section
            )
    assert parser.examples and all(
        f"{name} {given}".strip() in section for given in parser.examples
    )
    assert all(example in parser.format_help() for example in parser.examples)


def test_examples_of_commands_can_be_parsed():
    for parser in commands(cli._parser()):
        for example in parser.examples:
            parser.parse_args(example.split())


def test_the_reference_has_the_magics_and_the_options_of_pytest(page):
    for name in ("%%gpu_memory", "%%gpu_timeline", "%%torchrun"):
        assert f"### `{name}`" in page
    for name in ("--virtual-gpus N", "--virtual-like MODEL", "--max-events N", "--simulate N"):
        assert f"```{{option}} {name}\n" in page
    assert "<!-- options of" not in page


@pytest.mark.parametrize("package", [labkit, gputrace, virtualgpu], ids=lambda one: one.__name__)
def test_the_reference_has_every_public_name(package):
    pages = [path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")]
    text = "\n".join(pages)
    names = [name for name in package.__all__ if name not in ("labs", "profiles", "report")]
    missing = [
        name
        for name in names
        if f":: {name}\n" not in text and f"{package.__name__}.{name}``" not in text
    ]
    assert missing == []
