"""What grading reads in a notebook."""

import json

from labcourse import reading

from .handed_in import notebook


def with_written(source: str) -> bytes:
    content = json.loads(notebook("def on_gpu(numbers): ..."))
    content["cells"].append(
        {"cell_type": "markdown", "source": [source], "metadata": {"labkit": {"written": "00.why"}}}
    )
    return json.dumps(content).encode()


def test_tags_checks_and_written_answers_are_found():
    found = reading.parse(with_written("Because."))
    assert (found.tagged, found.checked) == ({"00.1"}, {"00.1"})
    assert found.cells[-1] == reading.Cell("markdown", "Because.", "00.why")
    assert len(found.code) == 3


def test_the_names_that_check_cells_give():
    assert reading.checked_number('labkit.check("02.3", run_on)') == "02.3"
    assert reading.checked_name('labkit.check("02.3", run_on)') == "run_on"
    assert reading.checked_number("checksum(1)") is None
    for source in (
        "%time labkit.check('02.3', run_on)",
        "labkit.check('02.3')",
        "labkit.check('02.3', 5)",
        "check(",
    ):
        assert reading.checked_name(source) is None


def test_an_answer_has_the_cells_with_its_functions():
    cells = [
        "def double(x):\n    return times(x, 2)",
        "class Unused: pass",
        "def times(x, n):\n    return x * n",
        "def given(x): return x",
        "def on_gpu(numbers): return old(numbers)",
        "def on_gpu(numbers):\n    return given(double(numbers))",
    ]
    names = {"00.1": "on_gpu"}
    found = reading.parse(notebook(*cells), names, {cells[3]})
    assert found.answers == {"00.1": "\n\n".join([cells[0], cells[2], cells[5]])}
