"""A spreadsheet computes no text of a student, and a table that is read is as it was written."""

import csv
import io
import re

import pytest

from labcourse import tables

FORMULAS = ("=1+1", "@SUM(1)", "+1", "-1", "\t=1", "\r=1", "a;=1", "a\n=1", "a;b\t@x;-1", "\n+1;=1")
TEXTS = ("plain", "two:\n- one\n- two", "a = b; c", "1 + 1", "it's", "'quoted'", "a;'b'")


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_cell_is_a_formula_whatever_separates_the_cells(text, delimiter):
    table = tables.written(["student", "answer"], [{"student": "ada", "answer": text}])
    for line in re.split(r"[\r\n]", table):  # quotes within a cell do not hold a line together
        for row in csv.reader(io.StringIO(line), delimiter=delimiter):
            for cell in row:
                assert not cell.lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("text", [*FORMULAS, *TEXTS])
def test_what_is_written_can_be_read(text, tmp_path):
    path = tmp_path / "table.csv"
    text = text.replace("\r", "\n")
    row = {"student": "ada", "comment": text}
    path.write_text(tables.written(["student", "comment"], [row]), newline="")
    assert tables.read(path) == [row]


@pytest.mark.parametrize("text", TEXTS)
def test_other_text_is_unchanged(text):
    assert tables._quoted(text) == text
