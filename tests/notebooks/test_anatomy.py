"""The anatomy of a lesson, as CONTRIBUTING describes it.

A puzzle comes first. Each section has one idea, one prediction, one cell and a folded explanation.
An exercise follows its section. The lesson ends with something to build and five lines to remember.
"""

import ast
import re

import pytest

from benchmarks import notebooks as figures
from benchmarks.lesson_runs import lessons
from benchmarks.notebooks import cells
from gpulessons.lesson_13 import articles
from labkit import reading_time
from labkit.reading_time import prose, tags, teaching_cells

LESSONS = lessons()
PUZZLE, BUILD, REMEMBER, REFERENCES = "A puzzle", "Build it", "What to remember", "References"
FOLD = "<details><summary>After you have run it</summary>\n\n"
LESSON_ABOUT_THE_ARTICLES = "13"
MOST_QUOTATIONS = 2
WITHOUT = "**Without the kit**"


def is_introduction(path):
    """Return whether this is lesson 00, which has one exercise and nothing to build."""
    return path.name[:2] == figures.INTRODUCTION


lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
full_lessons = pytest.mark.parametrize(
    "path", [path for path in LESSONS if not is_introduction(path)], ids=lambda path: path.stem
)


def sections(path):
    """Return the lesson's sections as pairs of a title and the section's cells."""
    found = []
    for cell in cells(path):
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found.append((cell.source.partition("\n")[0].removeprefix("## "), []))
        if found:
            found[-1][1].append(cell)
    return found


def ideas(path):
    """Return the sections between the puzzle and the exercise to build."""
    found = []
    for title, inside in sections(path)[1:]:
        if title.startswith(BUILD) or title == REMEMBER:
            return found
        if f"## {title}" not in (reading_time.BREAK, reading_time.FURTHER_BREAK):
            found.append((title, inside))
    return found


@lessons
def test_a_heading_begins_its_cell(path):
    """The tests, the site and the table of contents find sections by their headings."""
    for cell in cells(path):
        if cell.cell_type == "markdown":
            assert "\n## " not in cell.source


@lessons
def test_sections_are_in_the_order_of_the_anatomy(path):
    titles = [title for title, _ in sections(path)]
    built = [title for title in titles if title.startswith(BUILD)]
    assert titles[0] == PUZZLE
    assert titles[-2:] == [REMEMBER, REFERENCES]
    assert built == ([] if is_introduction(path) else [titles[-3]])
    assert ideas(path)
    assert len(set(titles)) == len(titles)


@lessons
def test_the_lesson_begins_with_a_puzzle_that_runs(path):
    """Check that only the title and the puzzle's own text come before the first cell."""
    _, inside = sections(path)[0]
    assert cells(path)[1].source == inside[0].source
    assert teaching_cells(inside), "the puzzle has no cell to run"
    assert reading_time.exercises(inside) == 0


@lessons
def test_each_section_has_one_prediction_and_an_exercise_only_after_it(path):
    for title, inside in ideas(path):
        assert reading_time.predictions(inside) == 1, title
        stubs = [index for index, cell in enumerate(inside) if "exercise" in tags(cell)]
        taught = [index for index, cell in enumerate(inside) if cell in teaching_cells(inside)]
        assert not stubs or taught[0] < stubs[0], title


@lessons
def test_what_happened_is_folded(path):
    """Check that a prediction, its cell and the folded explanation follow each other."""
    lesson = cells(path)
    predicted = [index for index, cell in enumerate(lesson) if reading_time.predictions([cell])]
    assert predicted
    for index in predicted:
        cell, explanation = lesson[index + 1 : index + 3]
        assert cell in teaching_cells(lesson), lesson[index].source
        assert explanation.source.startswith(FOLD), cell.source
        assert explanation.source.count("<details>") == explanation.source.count("</details>") == 1


@full_lessons
def test_the_last_exercise_is_built_at_the_end(path):
    [built] = [inside for title, inside in sections(path) if title.startswith(BUILD)]
    assert reading_time.exercises(built) == 1
    assert reading_time.exercises(cells(path)) > 1


@lessons
def test_experiments_are_in_the_cells(path):
    """A call such as `collect(labs.copy_speed())` would hide the measurement from learners."""
    for cell in teaching_cells(cells(path)):
        assert not re.search(r"(?<!gc\.)\bcollect\(", cell.source), cell.source


@lessons
def test_the_same_work_is_shown_once_without_the_kit(path):
    showing = [c for c in cells(path) if c.cell_type == "markdown" and WITHOUT in c.source]
    assert len(showing) == 1
    [code] = re.findall(r"```python\n(.*?)```", showing[0].source.partition(WITHOUT)[2], re.DOTALL)
    ast.parse(code)
    assert "labkit" not in code


@lessons
def test_there_are_five_lines_to_remember(path):
    [inside] = [inside for title, inside in sections(path) if title == REMEMBER]
    assert len(re.findall(r"^- ", prose(inside), re.MULTILINE)) == 5


@lessons
def test_articles_are_quoted_at_most_twice(path):
    titles = {claim.article.title for claim in articles.claims()}
    quotations = sum(prose(cells(path)).count(title) for title in titles)
    assert quotations <= MOST_QUOTATIONS or path.name[:2] == LESSON_ABOUT_THE_ARTICLES
