"""Public names, commands and options are documented: docstrings, errors, annotations, help."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

import pytest

import gputrace
import labcourse
import labkit
import virtualgpu
from gputrace.holders.search import Holder
from gputrace.leaks import Leak, Leaks
from gputrace.tables import Table
from gputrace.trace_data import MemoryTimeline
from labkit import cli, labs
from labkit.checks import Progress, Verdict
from labkit.contents import Lessons
from labkit.machine import GPUsInUse
from labkit.ranks import Ranks
from virtualgpu.streams.race_reports import Race

PACKAGES = ("virtualgpu", "gputrace", "labkit", "gpulessons", "labcourse")
# Classes without a public name whose objects public functions return.
GIVEN = [
    Holder,
    Leak,
    Leaks,
    Lessons,
    GPUsInUse,
    Progress,
    Race,
    Ranks,
    Table,
    MemoryTimeline,
    Verdict,
]


def named() -> Iterator[tuple[str, object]]:
    """Yield public functions and classes. Constants need no docstring."""
    for package in (
        labkit,
        virtualgpu,
        gputrace,
        labs,
        *(getattr(labcourse, name) for name in labcourse.__all__),
    ):
        yield from (
            (f"{package.__name__}.{name}", getattr(package, name))
            for name in package.__all__
            if callable(getattr(package, name))
        )
    yield from ((f"{given.__module__}.{given.__name__}", given) for given in GIVEN)


def function_of(member: object) -> Callable | None:
    if isinstance(member, property):
        return member.fget
    member = getattr(member, "__func__", member)
    return member if inspect.isfunction(member) else None


def methods(cls: type) -> Iterator[tuple[str, Callable]]:
    """Return a class's constructor, public methods and properties, also inherited ones."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in PACKAGES:
            for name, member in vars(base).items():
                function = function_of(member)
                is_public = not name.startswith("_") or name in ("__init__", "__post_init__")
                if function is not None and is_public:
                    yield name, function


def documented() -> Iterator[tuple[str, Callable, str]]:
    """Yield every public function and method, and the docstring in which a user would look."""
    for name, thing in named():
        if not inspect.isclass(thing):
            yield name, thing, inspect.getdoc(thing) or ""
            continue
        for method, function in methods(thing):
            if method in ("__init__", "__post_init__"):
                yield f"{name}()", function, inspect.getdoc(thing) or ""
            else:
                yield f"{name}.{method}", function, inspect.getdoc(getattr(thing, method)) or ""


def raised(function: Callable) -> set[str]:
    """Return the classes of errors that a function's body raises.

    NotImplementedError is left out, because it marks methods that subclasses define.
    """
    if function.__code__.co_filename == "<string>":  # dataclasses wrote it
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    return {ast.unparse(call.func) for call in calls} - {"NotImplementedError"}


def test_every_public_name_has_a_docstring():
    own = {
        name: vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        for name, thing in named()
    }
    # a dataclass's own
    made_up = {
        name for name, text in own.items() if text and text.startswith(f"{name.rsplit('.', 1)[1]}(")
    }
    assert {name for name, text in own.items() if not text} | made_up == set()


def test_every_public_method_has_a_docstring():
    assert sorted({name for name, _, text in documented() if not text}) == []


def test_every_public_name_is_annotated():
    bare = set()
    for name, function, _ in documented():
        signature = inspect.signature(function)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is inspect.Parameter.empty
        ]
        if set(untyped) - {"self", "cls"} or (
            signature.return_annotation is inspect.Signature.empty
        ):
            bare.add(name)
    assert sorted(bare) == []


def test_a_docstring_names_the_errors_that_its_function_raises():
    unsaid = {
        f"{name}: {error}"
        for name, function, text in documented()
        for error in raised(function)
        if error not in text
    }
    assert sorted(unsaid) == []


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize(
    "parser",
    list(parsers(cli._parser())),
    ids=lambda parser: parser.prog.removeprefix("python -m "),
)
def test_every_command_and_option_says_what_it_does(parser):
    assert parser.description
    options = [
        action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)
    ]
    assert [action.dest for action in options if not action.help] == []
