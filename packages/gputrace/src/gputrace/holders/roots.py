"""The names that a program has for its objects; the search for what keeps a tensor alive ends there."""

import contextvars
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gputrace.holders.autograd import attributes, isinstance_of
from virtualgpu import front_end
from virtualgpu.source_lines import SourceLine, is_users

# Packages that observe a program: what their variables hold, the user cannot release.
_TOOLS = {"IPython", "ipykernel", "traitlets", "pytest", "_pytest", "pluggy", "debugpy", "_pydevd_bundle", "xdist", "execnet"}
_LAST_ERROR = ("last_exc", "last_value", "last_traceback")  # of `sys`


@dataclass(frozen=True, order=True)
class Name:
    """A name of an object: what `kind` of name, the expression, empty if there is none, what it is a name `of`, and a remark.

    A `faint` one is a variable inside a library, which is used only if there is no better name.
    """

    kind: str
    expression: str
    of: str = ""
    remark: str = ""
    faint: bool = False

    @property
    def text(self) -> str:
        """As in: global `model.weight` of __main__ (a parameter)."""
        named = f"{self.kind} `{self.expression}`".lstrip() if self.expression else self.kind
        return named + f" of {self.of}" * bool(self.of) + f" ({self.remark})" * bool(self.remark)

    def then(self, suffix: str, remark: str = "") -> "Name":
        """The name of an element or an attribute of what this one names."""
        if self.kind == _RECORDS:
            return self
        if self.expression:
            return replace(self, expression=self.expression + suffix, remark=remark)
        return Name("", suffix, self.text, remark)


LAST_ERROR = Name("the last exception,", "sys.last_value")
_RECORDS = "the records"  # the kind of what a tool keeps; its attributes are not named
_REMARKS = {"IPython": "it keeps the last three results and the last error until others come"}


def tool_of(thing: Any) -> str:
    """The package that an object belongs to, if that is the kit itself, IPython, a debugger or pytest; else empty."""
    if type(thing) is types.FrameType:
        module = thing.f_globals.get("__name__")
    elif type(thing) is dict:
        module = thing.get("__name__") if is_namespace(thing) else None
    else:
        kind = thing if isinstance_of(thing, type) else type(thing)
        module = attributes(kind).get("__module__")
    package = module.partition(".")[0] if isinstance(module, str) else ""
    if package in front_end.packages():
        return front_end.name()
    return package if package in _TOOLS else ""


def _is_ended_by_tool(thing: Any) -> bool:
    """Does it belong to a tool? A tool's frame does not count: a traceback leads through those to the program's own."""
    return type(thing) is not types.FrameType and bool(tool_of(thing))


def is_namespace(thing: Any) -> bool:
    """Is it the dictionary of a module's globals?"""
    return type(thing) is dict and "__builtins__" in thing and isinstance(thing.get("__name__"), str)


class Roots:
    """The names that exist now, except those of tools."""

    def __init__(self) -> None:
        self._locals: list[tuple[Name, Any]] = []
        self._class_bodies: dict[int, tuple[Name, dict]] = {}
        self._modules = {id(namespace): name for name, namespace in _modules()}
        for frame, of in _live_frames():
            self._add_frame(frame, of)
        self._threads = {id(thread): thread for thread in threading.enumerate()}
        self._others = [(Name("context variable", variable.name), value) for variable, value in contextvars.copy_context().items()]
        for handled in sys._current_exceptions().values():
            error = handled[1] if isinstance(handled, tuple) else handled  # until Python 3.11 with its class and traceback
            self._others.append((Name("the exception now being handled", ""), error))

    def ends(self, thing: Any) -> bool:
        """Does the search end at this object, because it has a name or belongs to a tool?"""
        return self._is_named(thing) or _is_ended_by_tool(thing)

    def _is_named(self, thing: Any) -> bool:
        return id(thing) in self._modules or id(thing) in self._class_bodies or is_namespace(thing) or isinstance_of(thing, type)

    def names(self, objects: dict[int, Any]) -> list[tuple[Name, Any]]:
        """The names of these objects, given by id, in a fixed order. What belongs to a tool has a faint name."""
        found = [(name, thing) for name, thing in (*self._locals, *self._others) if id(thing) in objects]
        named = {id(thing) for _, thing in found}
        for thing in objects.values():
            if id(thing) in self._threads:
                found.append((Name("thread", self._threads[id(thing)].name), thing))
            elif tool_of(thing) or not self._is_named(thing) or id(thing) in named:
                continue
            elif isinstance_of(thing, type):
                found.append((Name("class", thing.__qualname__, str(thing.__module__)), thing))
            else:
                found += self._in_namespace(thing, objects)
        found = [(name, thing) for name, thing in found if not _is_ended_by_tool(thing)]
        for thing in objects.values():
            if _is_ended_by_tool(thing):
                tool = tool_of(thing)
                found.append((Name(_RECORDS, "", tool, _REMARKS.get(tool, ""), faint=True), thing))
        return sorted(found, key=lambda pair: pair[0])

    def _in_namespace(self, namespace: dict, objects: dict[int, Any]) -> Iterator[tuple[Name, Any]]:
        body, _ = self._class_bodies.get(id(namespace), (None, None))
        module = str(namespace.get("__name__") or self._modules.get(id(namespace), ""))
        for key, value in list(namespace.items()):
            if id(value) not in objects or not isinstance(key, str):
                continue
            if body is not None:
                yield Name(body.kind, key, body.of), value
            elif module == "sys" and key in _LAST_ERROR:
                yield LAST_ERROR, value
            elif "_oh" in namespace and "Out" in namespace and (key == "Out" or (key.startswith("_") and key.strip("_0123456789") == "")):
                yield Name("IPython's", key), value
            elif not ("Out" in namespace and key == "_oh"):  # which is `Out` again
                yield Name("global", key, module), value

    def _add_frame(self, frame: types.FrameType, of: str) -> None:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            faint = not is_users(frame.f_code.co_filename)
            self._locals += [(Name("local", variable, of, faint=faint), value) for variable, value in variables(frame)]
        elif frame.f_locals is not frame.f_globals:  # the body of a class, or what `exec` runs
            self._class_bodies[id(frame.f_locals)] = Name("local", "", of), frame.f_locals


def _modules() -> list[tuple[str, dict]]:
    """The modules' names and globals; a module that is loaded when it is first used stays unloaded."""
    globals_of = vars(types.ModuleType)["__dict__"].__get__
    return [(name, globals_of(module)) for name, module in list(sys.modules.items()) if isinstance_of(module, types.ModuleType)]


def modules_globals() -> list[dict]:
    """The dictionaries of the modules' globals, each once."""
    return list({id(namespace): namespace for _, namespace in _modules()}.values())


def _live_frames() -> Iterator[tuple[types.FrameType, str]]:
    """The frames of all threads with their names: this thread's first, the innermost first.

    No variable may keep this function's own frame or a caller's: that would be a cycle, and keep all that they hold alive.
    """
    mine = threading.get_ident()
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if not tool_of(frame):
            yield frame, location(frame)
        frame = frame.f_back
    others = sys._current_frames()
    del others[mine]
    for thread in sorted(others, key=lambda thread: named.get(thread, "")):
        frame = others.pop(thread)
        while frame is not None:
            if not tool_of(frame):
                yield frame, f"{location(frame)} in thread `{named.get(thread, 'without a name')}`"
            frame = frame.f_back


def location(frame: types.FrameType) -> str:
    """A frame's function and line: `train` (train.py:12)."""
    return f"`{frame.f_code.co_name}` ({SourceLine(frame.f_code.co_filename, frame.f_lineno, '').location})"


def copies() -> set[int]:
    """The ids of the dictionaries in which live frames keep copies of their variables; they are left as they were."""
    found = set()
    for frame, _ in _live_frames():
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.add(id(frame.f_locals))
            variables(frame)
    return found


def variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a function's frame; the frame is left as it was.

    Until Python 3.12 `f_locals` is a copy that the frame keeps, and it would keep the variables' values alive.
    """
    copy = frame.f_locals
    found = [(name, value) for name, value in copy.items() if name.isidentifier()]  # others are pytest's, or a comprehension's
    if isinstance(copy, dict) and sys.getrefcount(copy) <= 3:  # held by the frame, by this function, and by the call
        copy.clear()
    return found
