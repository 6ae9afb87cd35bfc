"""Names that a program has for its objects. The search for what keeps a tensor alive ends there."""

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

# Packages that observe a program. The user cannot release what they hold.
_TOOLS = {
    "IPython",
    "_pydevd_bundle",
    "_pytest",
    "debugpy",
    "execnet",
    "ipykernel",
    "pluggy",
    "pytest",
    "traitlets",
    "xdist",
}
_LAST_ERROR = ("last_exc", "last_value", "last_traceback")  # variables of `sys`


@dataclass(frozen=True, order=True)
class Name:
    """Name of an object.

    Attributes:
        kind: the kind of name, such as "global" or "the traceback".
        expression: the Python expression, or "" if there is none.
        of: what the name belongs to, such as a module or a function.
        remark: more information, such as "a parameter".
        faint: whether it is a variable inside a library. Such names are used only if there is no
            other.
    """

    kind: str
    expression: str
    of: str = ""
    remark: str = ""
    faint: bool = False

    @property
    def text(self) -> str:
        """The name in words, such as: global `model.weight` of __main__ (a parameter)."""
        text = self.kind
        if self.expression:
            text = f"{self.kind} `{self.expression}`".lstrip()
        if self.of:
            text += f" of {self.of}"
        if self.remark:
            text += f" ({self.remark})"
        return text

    def then(self, suffix: str, remark: str = "") -> "Name":
        """Return the name of a part of the object that has this name, such as an attribute.

        `suffix` is added to the expression, and `remark` replaces the remark.
        """
        if self.kind == _RECORDS:
            return self
        if self.expression:
            return replace(self, expression=self.expression + suffix, remark=remark)
        return Name("", suffix, self.text, remark)


LAST_ERROR = Name("the last exception,", "sys.last_value")
_RECORDS = "the records"  # the kind of name for what a tool keeps, whose attributes have no names
_REMARKS = {"IPython": "it keeps the last three results and the last error until others come"}


def tool_of(thing: Any) -> str:
    """Return the package of an object if it is a tool, or "".

    Tools are the kit itself, IPython, debuggers and pytest.
    """
    if type(thing) is types.FrameType:
        module = thing.f_globals.get("__name__")
    elif type(thing) is dict:
        module = None
        if is_namespace(thing):
            module = thing.get("__name__")
    else:
        kind = thing if isinstance_of(thing, type) else type(thing)
        module = attributes(kind).get("__module__")
    if not isinstance(module, str):
        return ""
    package = module.partition(".")[0]
    if package in front_end.packages():
        return front_end.name()
    if package in _TOOLS:
        return package
    return ""


def _is_ended_by_tool(thing: Any) -> bool:
    """Return whether an object belongs to a tool, so that the search ends there.

    A tool's frame does not end the search, because a traceback leads through such frames to those
    of the program.
    """
    return type(thing) is not types.FrameType and bool(tool_of(thing))


def is_namespace(thing: Any) -> bool:
    """Return whether an object is the dictionary of a module's globals."""
    return (
        type(thing) is dict and "__builtins__" in thing and isinstance(thing.get("__name__"), str)
    )


class Roots:
    """The names that exist at this moment, except those of tools."""

    def __init__(self) -> None:
        self._locals: list[tuple[Name, Any]] = []
        self._class_bodies: dict[int, tuple[Name, dict]] = {}
        self._modules = {id(namespace): name for name, namespace in _modules()}
        for frame, of in _live_frames():
            self._add_frame(frame, of)
        self._threads = {id(thread): thread for thread in threading.enumerate()}
        self._others: list[tuple[Name, Any]] = []
        for variable, value in contextvars.copy_context().items():
            self._others.append((Name("context variable", variable.name), value))
        for handled in sys._current_exceptions().values():
            # Until Python 3.11, an exception comes with its class and traceback.
            error = handled[1] if isinstance(handled, tuple) else handled
            self._others.append((Name("the exception now being handled", ""), error))

    def ends(self, thing: Any) -> bool:
        """Return whether the search ends at an object, because it has a name or is a tool's."""
        return self._is_named(thing) or _is_ended_by_tool(thing)

    def _is_named(self, thing: Any) -> bool:
        """Return whether an object is a class, or holds the names of a module or a class body."""
        if id(thing) in self._modules or id(thing) in self._class_bodies:
            return True
        return is_namespace(thing) or isinstance_of(thing, type)

    def names(self, objects: dict[int, Any]) -> list[tuple[Name, Any]]:
        """Return the names of objects, in a fixed order.

        Objects of a tool have faint names.

        Args:
            objects: the objects by their ids.
        """
        found = [
            (name, thing) for name, thing in (*self._locals, *self._others) if id(thing) in objects
        ]
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
        """Yield the names that a module's globals or a class body have for some objects.

        `objects` are the objects by their ids.
        """
        body, _ = self._class_bodies.get(id(namespace), (None, None))
        module = str(namespace.get("__name__") or self._modules.get(id(namespace), ""))
        for key, value in list(namespace.items()):
            if id(value) not in objects or not isinstance(key, str):
                continue
            if body is not None:
                yield Name(body.kind, key, body.of), value
            elif module == "sys" and key in _LAST_ERROR:
                yield LAST_ERROR, value
            elif "_oh" in namespace and "Out" in namespace:  # a notebook
                is_result = key.startswith("_") and not key.strip("_0123456789")
                if key == "Out" or is_result:
                    yield Name("IPython's", key), value
                elif key != "_oh":  # it is the same dictionary as `Out`
                    yield Name("global", key, module), value
            else:
                yield Name("global", key, module), value

    def _add_frame(self, frame: types.FrameType, of: str) -> None:
        """Add the names of a frame's variables.

        `of` is what the names belong to, such as a function.
        """
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            faint = not is_users(frame.f_code.co_filename)
            for variable, value in variables(frame):
                self._locals.append((Name("local", variable, of, faint=faint), value))
        elif frame.f_locals is not frame.f_globals:  # the body of a class, or code run by `exec`
            self._class_bodies[id(frame.f_locals)] = Name("local", "", of), frame.f_locals


def _modules() -> list[tuple[str, dict]]:
    """Return the names and globals of all modules, without loading a lazy module."""
    globals_of = vars(types.ModuleType)["__dict__"].__get__
    found = []
    for name, module in list(sys.modules.items()):
        if isinstance_of(module, types.ModuleType):
            found.append((name, globals_of(module)))
    return found


def modules_globals() -> list[dict]:
    """Return the globals of all modules, each dictionary once."""
    return list({id(namespace): namespace for _, namespace in _modules()}.values())


def _live_frames() -> Iterator[tuple[types.FrameType, str]]:
    """Yield the frames of all threads with their names, those of this thread first.

    The innermost frame of a thread comes first. No variable may keep this function's own frame or a
    caller's, because that would be a reference cycle, which keeps everything in these frames alive.
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
    """Return a frame's function and line, such as: `train` (train.py:12)."""
    line = SourceLine(frame.f_code.co_filename, frame.f_lineno, "")
    return f"`{frame.f_code.co_name}` ({line.location})"


def copies() -> set[int]:
    """Return the ids of the dictionaries in which live frames keep copies of their variables.

    The dictionaries are left unchanged.
    """
    found = set()
    for frame, _ in _live_frames():
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.add(id(frame.f_locals))
            variables(frame)
    return found


def variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a function's frame, and leave the frame unchanged.

    Until Python 3.12, `f_locals` is a copy that the frame keeps. This copy would keep the values
    of the variables alive.
    """
    copy = frame.f_locals
    # Other names are those of pytest or of a comprehension.
    found = [(name, value) for name, value in copy.items() if name.isidentifier()]
    # Three references mean that only the frame, this function and the call have the copy.
    if isinstance(copy, dict) and sys.getrefcount(copy) <= 3:
        copy.clear()
    return found
