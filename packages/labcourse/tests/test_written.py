"""A written answer counts wherever a student put it."""

import json

import nbformat
import pytest

from labcourse import assignment, reading, release, written
from labcourse.reading import PLACEHOLDER

from .handed_in import COURSE

QUESTIONS = """
[[labs."00".written]]
id = "00.why"
question = "Why?"
[[labs."00".written]]
id = "00.when"
question = "When does a copy to the GPU wait for the host? Answer in two sentences."
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "course.toml"
    path.write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', QUESTIONS))
    return assignment.read(path)


def found(course, change, contents="exercises"):
    """Return the answers in a student's copy after a change of its cells.

    `change` also gets the cells by their ids.
    """
    lab = course.lab("00")
    notebook = release.student_copy(course, lab)
    change(notebook.cells, {cell.id: cell for cell in notebook.cells})
    cells = reading.parse(json.dumps(notebook).encode()).cells
    answers = written.answers(
        cells, [task.id for task in lab.written], release.handed_out(course, lab)
    )
    return answers["00.why"], answers["00.when"]


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def at_its_place(cells, by_id):
    by_id["written-00-why"].source = "Because."


def below_the_placeholder(cells, by_id):
    cells.insert(cells.index(by_id["written-00-why"]) + 1, text("Because."))


def without_metadata(cells, by_id):
    by_id["written-00-why"].source, by_id["written-00-why"].metadata = "Because.", {}


def in_another_cell(cells, by_id):
    cells[cells.index(by_id["written-00-why"])] = nbformat.v4.new_raw_cell("Because.")


def in_the_questions_cell(cells, by_id):
    by_id["question-00-why"].source += "\n\nBecause."


def below_the_placeholder_in_its_cell(cells, by_id):
    by_id["written-00-why"].source = f"{PLACEHOLDER}\n\nBecause."


def in_a_code_cell_that_was_a_text_cell(cells, by_id):
    cell = nbformat.v4.new_code_cell("Because.", metadata=by_id["written-00-why"].metadata)
    cells[cells.index(by_id["written-00-why"])] = cell


def with_a_copy_of_the_placeholder_below(cells, by_id):
    copy = text(PLACEHOLDER)
    copy.metadata = by_id["written-00-why"].metadata
    by_id["written-00-why"].source = "Because."
    cells.insert(cells.index(by_id["written-00-why"]) + 1, copy)


def merged_into_one_cell(cells, by_id):
    by_id["question-00-why"].source += "\n\nBecause."
    cells.remove(by_id["written-00-why"])


@pytest.mark.parametrize(
    "change",
    [
        at_its_place,
        below_the_placeholder,
        without_metadata,
        in_another_cell,
        in_the_questions_cell,
        below_the_placeholder_in_its_cell,
        in_a_code_cell_that_was_a_text_cell,
        with_a_copy_of_the_placeholder_below,
        merged_into_one_cell,
    ],
)
def test_an_answer_counts_wherever_it_is(change, asked):
    why, when = found(asked, change)
    assert why == written.Answer("Because.")
    assert when.text == ""


def above_everything(cells, by_id):
    cells.insert(0, text("Because."))


def above_its_question(cells, by_id):
    by_id["written-00-why"].source = "This answers the first question."
    cells.insert(cells.index(by_id["question-00-when"]), text("Because."))


def in_a_new_code_cell(cells, by_id):
    cells.append(nbformat.v4.new_code_cell("# Because."))


def in_an_exercise_s_text(cells, by_id):
    at = next(
        cell
        for cell in cells
        if cell.source.startswith("**00.1**") or "\n\n**00.1**" in cell.source
    )
    at.source += "\n\nBecause."


@pytest.mark.parametrize(
    "change", [above_everything, above_its_question, in_a_new_code_cell, in_an_exercise_s_text]
)
def test_text_that_may_belong_to_an_empty_answer_is_shown_beside_it(change, asked):
    _, when = found(asked, change)
    assert when.text == "" and when.beside.strip("# ") == "Because."


def test_what_was_handed_out_is_no_answer(asked):
    assert found(asked, lambda cells, by_id: None) == (written.Answer(), written.Answer())


def test_two_parts_of_an_answer_are_one(asked):
    def in_two_cells(cells, by_id):
        at_its_place(cells, by_id)
        cells.insert(cells.index(by_id["written-00-why"]) + 1, text("And more."))

    assert found(asked, in_two_cells)[0] == written.Answer("Because.\n\nAnd more.")
