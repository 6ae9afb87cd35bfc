"""The names that a program has for its objects."""

import contextvars
import gc
import sys
import types

from gputrace.holders import roots
from gputrace.holders.roots import Name, Roots, location, tool_of, variables
from virtualgpu import front_end

marked = ["a global of this module"]


def names_of(*things):
    """Return the names of these objects, and of the modules' globals that hold them."""
    objects = {id(thing): thing for thing in (*things, globals())}
    return [
        name for name, thing in Roots().names(objects) if any(thing is wanted for wanted in things)
    ]


def test_what_a_name_reads_like():
    assert Name("global", "cache", "__main__").text == "global `cache` of __main__"
    assert (
        Name("global", "model", "__main__").then(".weight", "a parameter").text
        == "global `model.weight` of __main__ (a parameter)"
    )
    assert (
        Name("the autograd graph", "", "local `x`").then("[0]").text
        == "`[0]` of the autograd graph of local `x`"
    )


def test_locals_and_globals():
    here = ["a local"]
    line = sys._getframe().f_lineno + 1
    assert names_of(here) == [
        Name("local", "here", f"`test_locals_and_globals` (test_roots.py:{line})")
    ]
    assert names_of(marked) == [Name("global", "marked", __name__)]


def test_variables_of_a_library_are_faint():
    found = []
    sorted([marked], key=lambda one: found.extend(names_of(one)))
    assert [name.expression for name in found if not name.faint] == ["marked", "one"]
    gone = types.FunctionType(
        compile(
            "def f(x, look):\n return look(x)", "/usr/lib/python3/dist-packages/f.py", "exec"
        ).co_consts[0],
        {},
    )
    assert [(name.expression, name.faint) for name in gone(["new"], names_of)] == [("x", True)]


def test_the_body_of_a_class():
    class Model:
        table = frozenset(["in a class that is being made"])
        found = tuple(
            name
            for name, _ in Roots().names(
                {id(thing): thing for thing in (locals()["table"], locals())}
            )
        )

    assert [(name.kind, name.expression) for name in Model.found] == [("local", "table")]
    assert "`Model` (test_roots.py:" in Model.found[0].of


def test_context_variables():
    variable = contextvars.ContextVar("stage")
    token = variable.set(value := ["a value"])
    try:
        assert Name("context variable", "stage") in names_of(value)
    finally:
        variable.reset(token)


def test_the_kit_and_pytest_are_tools():
    assert tool_of(Roots()) == tool_of(vars(roots)) == front_end.name()
    assert tool_of(sys._getframe()) == "" and tool_of(globals()) == ""
    assert tool_of(object()) == "" and tool_of([]) == ""
    frame = sys._getframe()
    while not frame.f_globals["__name__"].startswith("_pytest"):
        frame = frame.f_back
    assert tool_of(frame) == "_pytest"


def test_variables_are_read_without_being_kept(no_collection):
    class Thing:
        pass

    def look():
        thing = Thing()
        found = dict(variables(sys._getframe()))
        return found["thing"] is thing

    assert look()
    assert not any(type(thing) is Thing for thing in gc.get_objects())


def test_roots_leave_no_cycle_behind(no_collection):
    Roots()
    assert gc.collect() == 0


def test_a_place_is_a_function_and_a_line():
    frame = sys._getframe()
    place, line = location(frame), frame.f_lineno
    assert place == f"`test_a_place_is_a_function_and_a_line` (test_roots.py:{line})"
