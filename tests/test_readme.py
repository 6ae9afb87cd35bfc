"""The lessons, links, pictures and commands of README.md exist."""

import argparse
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from labkit import cli, contents, lesson_copies

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("packages/*/README.md"),
    )
)
COMMANDS = next(
    action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)
).choices


def rows() -> dict[str, list[str]]:
    """Return the cells of each row of the table of lessons, by the notebook that it links to."""
    table = README.split("<!-- lessons -->\n")[1].split("<!-- /lessons -->")[0]
    found = {}
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        link = re.fullmatch(r"\[(.+)\]\(notebooks/(.+)\)", cells[0])
        assert link is not None, line
        found[link[2]] = [link[1], *cells[1:]]
    return found


def notebook(name: str) -> tuple[str, str]:
    """Return a lesson's title and its code."""
    read = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    title = next(cell.source.splitlines()[0] for cell in read.cells if cell.cell_type == "markdown")
    return title.removeprefix("# "), "\n".join(
        cell.source for cell in read.cells if cell.cell_type == "code"
    )


def test_table_has_every_lesson_in_order():
    assert list(rows()) == LESSONS


@pytest.mark.parametrize("name", LESSONS)
def test_row_is_as_the_lesson(name):
    title, code = notebook(name)
    learnt_in = {lesson.file: lesson.learnt for lesson in lesson_copies.lessons().lessons}
    told, learnt, gpus, lab = rows()[name][:4]
    assert told == title
    assert learnt == learnt_in[name]
    assert int(gpus) == max(map(int, re.findall(r"labkit\.use\(gpus=(\d+)", code)))
    assert lab.startswith("none") is (re.search(r"\b\w*(Lab|Panel)\(", code) is None)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_within_the_repository_are_there(page):
    place = ROOT / page
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", place.read_text(encoding="utf-8"))
    assert [link for link in links if not (place.parent / link).exists()] == []


def test_pictures_have_words_and_are_small():
    for words, file in re.findall(r"!\[(.*)\]\((docs/.+?)\)", README):
        assert len(words.split()) >= 10
        assert (ROOT / file).stat().st_size < 250_000


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"(?:-m labkit|`labkit) ([a-z]+)", text)) <= set(COMMANDS)
    named = re.findall(r"((?:packages/\w+/)?(?:benchmarks|tools)/[\w./]+\.py)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_lab_opens_the_contents_of_the_learner_s_folder():
    dry_run = ["make", "--dry-run", "--old-file=.venv/installed-lab", "lab"]
    told = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
    [start] = [line for line in told.stdout.splitlines() if "-m jupyterlab" in line]
    folder = re.search(r"--ServerApp\.root_dir=(\S+)", start)[1]
    assert (
        f"-m labkit lessons --to {folder}\n" in told.stdout
        and f"{folder}/\n" in (ROOT / ".gitignore").read_text()
    )
    assert re.search(r"--LabApp\.default_url=/lab/tree/(\S+)", start)[1] == contents.INDEX


def test_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 90


def test_the_paper_is_short_and_its_sources_are_there():
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert len(paper.split()) <= 1300
    sources = re.findall(r"`((?:docs|benchmarks|tests|README|CONTRIBUTING)[\w/.]*)`", paper)
    assert len(sources) > 5 and [source for source in sources if not (ROOT / source).exists()] == []
    cited = set(re.findall(r"\[(\d+)(?:, (\d+))?\](?!\()", paper))
    assert {int(number) for pair in cited for number in pair if number} == set(
        range(1, len(re.findall(r"^\d+\. ", paper, re.MULTILINE)) + 1)
    )


def test_the_map_fits_on_one_screen_and_names_files_that_are_there():
    """Check each line of CONTRIBUTING's map: a folder, or files relative to the folder above."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = contributing.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert 40 < len(lines) <= 50 and max(map(len, lines)) <= 100
    above = ""
    for line in lines:
        paths = line[:46].split()
        if not line.startswith(" "):
            above = paths[0]
        for path in paths:
            if line.startswith(" "):
                path = above + path
            for pattern in alternatives(path.replace("NN", "*")):
                assert list(ROOT.glob(pattern)), path


def alternatives(path: str) -> list[str]:
    """Return the paths that a shell makes of `ops/{half,tf32}.py`."""
    before, brace, rest = path.partition("{")
    if not brace:
        return [path]
    inside, _, after = rest.partition("}")
    return [before + name + after for name in inside.split(",")]


def test_words_of_the_glossary_are_explained_in_the_lesson_that_it_names_and_links_to_it_arrive():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    prose = {
        name: "\n".join(cell.source for cell in nbformat.read(ROOT / "notebooks" / name, 4).cells)
        for name in LESSONS
    }
    words = re.findall(
        r'^\| <a id="([^"]+)"></a>(.+?) \| .+ \| \[\d+\]\(\.\./notebooks/(.+?)\) \|$',
        glossary,
        flags=re.MULTILINE,
    )
    assert len(words) == glossary.count("<a id=") and [anchor for anchor, _, _ in words] == [
        word.lower() for _, word, _ in words
    ]
    assert [word for _, word, lesson in words if f"*{word}*" not in prose[lesson]] == []
    linked = {
        target
        for text in prose.values()
        for target in re.findall(r"\.\./docs/glossary\.md#(\w+)", text)
    }
    assert linked and linked <= {anchor for anchor, _, _ in words}
