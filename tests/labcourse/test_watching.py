"""What the notebook's own code asks for is told from what a library or the kit does, and read in whatever form it was made."""

import inspect
import json
import os
import sys

from labcourse import watching
from labcourse.watching import Reports, WatchedModule


def in_a_cell(source: str, **names):
    """What `answer` is after this source has run as a notebook's cell does."""
    exec(compile(source, "<ipython-input-1>", "exec"), names)
    return names["answer"]


def asking(frame, through=True):
    return watching._asking_frame(frame, through)


def test_a_module_tells_of_what_it_is_asked_under_whatever_name(monkeypatch):
    told = []
    kit = WatchedModule("labkit")
    object.__setattr__(kit, "formula", 3)
    monkeypatch.setattr(watching, "_tell", lambda event, module, name: told.append(name))
    assert in_a_cell("for k in [kit]: answer = eval('k.for' + 'mula')", kit=kit) == 3
    assert told == ["formula"]
    assert watching._of_asking("labkit.labs", "rank_memory") and watching._of_asking("labkit", "__dict__")
    assert not watching._of_asking("labkit", "use") and not watching._of_asking("sys", "modules")


def test_who_asked_is_the_notebook_also_by_a_library_but_not_by_the_kit():
    frame = in_a_cell("def answer(): return getframe()", getframe=sys._getframe)()
    assert asking(frame) is frame
    sorted_by = in_a_cell("import functools\nanswer = functools.reduce(lambda a, b: getframe(), [1, 2])", getframe=sys._getframe)
    assert asking(sorted_by) is sorted_by

    class ByALibrary:
        def __deepcopy__(self, memo):
            return sys._getframe(1)  # of `copy`

    library = in_a_cell("import copy\nanswer = copy.deepcopy(thing)", thing=ByALibrary())
    assert asking(library).f_code.co_filename == "<ipython-input-1>"
    assert asking(library, through=False) is None


def test_a_program_is_read_by_the_names_in_it():
    code = compile("def f(): return [x.__globals__ for x in (1,)]", "<made up>", "exec")
    assert watching._of_code(code) == ["it reaches for insides of Python (__globals__)"]
    assert watching._of_code(compile("x.keys()", "<made up>", "exec")) == []


def test_a_text_is_what_python_takes_it_for():
    class Lying(str):
        def __str__(self):
            raise AssertionError("the notebook's own code")

    assert watching._text(Lying("sys")) == "sys" and type(watching._text(Lying("sys"))) is str
    assert watching._text(object()) == ""


def test_a_function_tells_of_its_calls_and_does_what_it_did(monkeypatch):
    told = []
    monkeypatch.setattr(watching, "_tell", lambda event, path: told.append(path))

    def formula(x, *, by: int = 2):
        return x * by

    def steps():
        yield from (1, 2)

    held = formula
    watching.watch_calls([formula, steps], {id(formula): "labkit.labs.formula"})
    assert held(3, by=5) == 15 and held(3) == 6 and list(steps()) == [1, 2]
    assert told == ["labkit.labs.formula"] * 2 + [f"{__name__}.steps"]
    assert str(inspect.signature(formula)) == "(x, *, by: int = 2)"


def test_reports_that_are_too_many_or_too_long_are_reported():
    reading, writing = os.pipe()
    reports = Reports(writing)
    for number in range(watching.MOST + 5):
        reports.add("source", str(number))
    reports.add("source", "x" * (watching.LONGEST + 1))
    os.close(writing)
    with open(reading) as file:
        lines = [json.loads(line) for line in file]
    assert len(lines) == reports.count == watching.MOST + 1
    assert lines[-1] == ["suspect", "it made more programs than can be read"]
