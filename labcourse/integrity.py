"""Watches a submission's process: the names that its answers are observed with, and what its own code does that no exercise needs.

A report leaves the process at once, by a pipe: it cannot be taken back. What the notebook's own code did is told from what a library did
for it: print_exc reads frames, too, but hands none out.
"""

import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from functools import partial
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]  # in C, where it is there
from operator import is_
from typing import Any

import torch

from labcourse import scan

RELIED_ON = ("torch", "torch.functional", "torch.nn.functional", "torch.testing", "builtins", "math", "random", "time")  # in part
WATCHED = ("json", "json.encoder", "json.decoder", "torch._C", "torch.cuda", "torch.cuda.memory", "torch.cuda.streams", "torch.cuda.random")
OWN = ("virtualgpu", "gputrace", "labkit", "labcourse")
COSMETIC = {"__repr__", "__str__", "__format__", "__doc__", "print", "load", "save", "__torch_function__"}  # what no observation rests on

LIBRARIES = tuple({os.path.dirname(os.__file__), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})
KIT = tuple(f"/{package}/" for package in OWN)
HANDING_OUT = {"currentframe", "stack", "trace", "getouterframes", "getinnerframes", "walk_stack", "walk_tb", "<lambda>"}  # of frames
FRAMES = {"sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile"}
OBJECTS = {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.addaudithook", "code.__new__", "function.__new__"}
LOADING = {"marshal.loads", "marshal.load", "pickle.find_class", "ctypes.dlsym", "ctypes.dlopen", "ctypes.cdata", "ctypes.string_at"}
INSIDES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame", "gi_code", "__code__", "__defaults__", "__kwdefaults__"}
EVENTS = FRAMES | OBJECTS | LOADING | {"object.__getattr__", "object.__setattr__", "compile", "open", "os.kill", "os.killpg"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
EVENTS |= NETWORK | {"import", "labkit.labs"}
DONE_FOR_IT = NETWORK | {"open", "os.kill", "os.killpg", "compile", "ctypes.dlopen"}  # also where a library does it for the notebook
BUILT_IN = (torch.Tensor, int, float, complex, str, bytes, list, tuple, dict)
SECRET = re.compile(r"\.ipynb$|^/proc/[^/]+/(mem|fd|task|root|cwd|environ|maps)|^/dev/fd")  # files
MOST, MOST_FRAMES = 200, 200  # reports; frames that are looked at


def plain(message: Any) -> str:
    """As JSON: by an encoder of its own each time, in C, whose classes nobody can change."""
    if c_make_encoder is None:
        return json.dumps(message)
    return "".join(c_make_encoder(None, _no_other, encode_basestring_ascii, None, ": ", ", ", False, False, True)(message, 0))


def _no_other(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is no plain data")


class Reports:
    """The line to the grader: a kind ("suspect", "changed", "source") and a text, each once."""

    def __init__(self, fd: int) -> None:
        self._fd, self._seen, self._write = fd, set[tuple[str, str]](), os.write

    def add(self, kind: str, text: str) -> None:
        if len(self._seen) < MOST and (kind, text) not in self._seen:
            self._seen.add((kind, text))
            self._write(self._fd, plain([kind, text[:4000]]).encode() + b"\n")


def watch(reports: Reports, names: dict[str, Any]) -> None:
    """Report from now on, for good, what the notebook's own code does. `names` are its names, some of which become watched ones."""
    busy = False
    add, events, getframe = reports.add, EVENTS, sys._getframe

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or event not in events:
            return
        busy = True
        try:
            through, importing = _passed_on(event, arguments)
            written = event == "compile" and not str(arguments[1]).startswith("<") and not _is_known(str(arguments[1]))
            if written or _own_frame(getframe(1 + (event == "labkit.labs")), through, importing) is not None:
                for kind, text in _said(event, arguments, names):
                    add(kind, text)
        finally:
            busy = False

    sys.addaudithook(hook)
    for function in (getattr, setattr, delattr):
        names[function.__name__] = _reporting(function, add)


def _is_lent(function: types.FunctionType) -> bool:
    """Whether a check gave this function to an answer: what the answer is to find out may stand in its defaults."""
    return "/labkit/checks/" in function.__code__.co_filename


def _own_frame(frame: types.FrameType | None, through: bool, importing: bool) -> types.FrameType | None:
    """The notebook's own frame that did this, or None where a library did it by itself. `through` any library? Also one that imports?"""
    for _ in range(MOST_FRAMES):
        if frame is None or _is_kits(frame.f_code.co_filename):
            return None
        if not _is_library(frame):
            return frame
        file = frame.f_code.co_filename
        passed_on = through or frame.f_code.co_name in HANDING_OUT or "/ctypes/" in file
        if not passed_on or (not importing and ("/linecache." in file or "importlib" in file)):
            return None
        frame = frame.f_back
    return None


def _passed_on(event: str, arguments: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether this is the notebook's deed also where a library does it for it; and also where Python imports something for it."""
    first, second = (*arguments, None, None)[:2]
    if event == "object.__getattr__":
        return second in ("__defaults__", "__kwdefaults__") and isinstance(first, types.FunctionType) and _is_lent(first), True
    if event == "import":
        return second is not None, True  # a compiled module's file
    return event in DONE_FOR_IT, str(first).endswith(".pyc") if event == "open" else not _is_known(str(second))


def _is_library(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return _is_known(file) or (file.startswith("<frozen ") and "importlib" in file)


def _is_kits(file: str) -> bool:
    return any(package in file for package in KIT) and not file.startswith("<")


def _is_known(file: str) -> bool:
    """Whether a file is a library's or the kit's, which no submission can write."""
    return file.startswith(LIBRARIES) or _is_kits(file)


def _said(event: str, arguments: tuple[Any, ...], names: dict[str, Any]) -> list[tuple[str, str]]:
    """What to report of an event that the notebook's own code caused."""
    first = arguments[0] if arguments else None
    if event == "compile":
        source = first.decode(errors="replace") if isinstance(first, bytes) else first
        named = [("suspect", "it gave its code another file's name")] if _is_known(str(arguments[1])) else []
        return [("source", source), *named] if isinstance(source, str) else named
    if event == "labkit.labs":  # under whatever name it goes
        return [("suspect", told)] if (told := scan.of_path(f"labkit.labs.{first}")) else []
    if event in ("object.__getattr__", "object.__setattr__"):
        return _of_attribute(event, first, str(arguments[1]), names)
    if event in NETWORK:
        if event == "socket.connect":
            first = arguments[1][0] if isinstance(arguments[1], tuple) else "localhost"  # a socket in the file system, as processes use
        local = str(first).startswith(("127.", "localhost", "::1"))  # ranks meet there
        return [] if local or not isinstance(first, str | bytes) else [("suspect", "it tried to use the network")]
    if event in ("os.kill", "os.killpg"):
        above = isinstance(first, int) and (first <= 1 or first == os.getppid())
        return [("suspect", "it tried to end other processes")] if above else []
    if event == "pickle.find_class":
        told = "" if str(first).startswith("torch") else scan.of_path(f"{first}.{arguments[1]}") or scan.of_name(str(arguments[1]))
        return [("suspect", told)] if told else []
    if event in ("open", "import", "ctypes.dlopen"):
        odd = _of_file(first) if event == "open" else _of_module(*arguments[:2]) if event == "import" else _of_program(first)
        return [("suspect", text) for text in odd]
    return [("suspect", f"it used {event}")]


def _of_attribute(event: str, owner: Any, attribute: str, names: dict[str, Any]) -> list[tuple[str, str]]:
    if event == "object.__setattr__" and attribute in INSIDES and getattr(owner, "__globals__", None) is not names:
        return [("changed", f"{owner.__module__}.{owner.__qualname__}.{attribute}")]
    file = owner.__code__.co_filename if isinstance(owner, types.FunctionType) else ""
    own = attribute in ("__code__", "__defaults__", "__kwdefaults__") and not any(package in file for package in KIT)
    if own or attribute not in INSIDES:
        return []
    return [("suspect", f"it looked into {attribute} of {getattr(owner, '__qualname__', type(owner).__name__)}")]


def _of_file(path: Any) -> list[str]:
    text = path.decode(errors="replace") if isinstance(path, bytes) else str(path)
    if SECRET.search(text) or any(package in text for package in KIT):
        return [f"it tried to open {text[-200:]}"]
    return _of_program(text) if text.endswith(".pyc") and os.path.exists(text) else []


def _of_module(name: str, file: Any = None) -> list[str]:
    return [f"it imported {name}"] if name.partition(".")[0] in ("ctypes", "_ctypes", "cffi", "labcourse") else _of_program(file)


def _of_program(file: Any) -> list[str]:
    """A file of compiled code that the system or a library did not bring along."""
    own = isinstance(file, str) and "/" in file and not file.startswith((*LIBRARIES, "/usr/", "/lib"))
    return [f"it loaded compiled code, {file[-200:]}"] if own else []


def _reporting(function: Callable[..., Any], add: Callable[[str, str], None]) -> Callable[..., Any]:
    """A built-in that reaches an attribute by name, for the notebook: it says which of Python's or the kit's insides it is asked for."""

    def watched(owner: Any, *arguments: Any) -> Any:
        name = str(arguments[0]) if arguments else ""
        path = f"{owner.__name__}.{name}" if isinstance(owner, types.ModuleType) else name
        if told := scan.of_name(name) or scan.of_path(path, writes=function is not getattr):
            add("suspect", told)
        return function(owner, *arguments)

    return partial(watched)


class Originals:
    """What the watched names stood for when this was made: those that a check relies on, by the names that the checks' own code has.

    `kinds` are the classes that there were then of values that a check takes for what they seem.
    `learn` is told, while a machine of the kit is in use, what this puts in their place.
    """

    def __init__(self) -> None:
        relied_on = {name for code in _codes("labkit.checks", "labkit.machine", "virtualgpu") for name in code.co_names}
        made = [(path, owner, *_callables(owner, relied_on if path in RELIED_ON else None)) for path, owner in _watched()]
        self._held = [entry for entry in made if entry[2]]
        self._first = [vars(owner).keys() | COSMETIC for _, owner, _, _ in self._held]
        self._known: dict[tuple[str, str], set[Any]] = {}
        self._of_machines = _codes("virtualgpu")
        self.kinds, new = set[type](), set[type](BUILT_IN)
        while new := {below for kind in new for below in (kind, *type.__subclasses__(kind))} - self.kinds:
            self.kinds |= new
        self.learn()

    def learn(self) -> None:
        for path, owner, names, _ in self._held:
            for name in {*names, *vars(owner)} if isinstance(owner, type) else names:
                self._known.setdefault((path, name), set()).add(_identity(vars(owner).get(name)))

    def changed(self) -> list[str]:
        """The names that stand for something else now, in order.

        To a class nothing may be added either that would stand in front of what it inherits.
        """
        found = []
        for index, (path, owner, names, values) in enumerate(self._held):
            there = vars(owner)
            now = tuple(map(there.get, names))
            if not all(map(is_, now, values)):
                odd = {name for name, a, b in zip(names, now, values, strict=True) if a is not b and not self._knows(path, name, a)}
                found += [f"{path}.{name}" for name in odd]
                kept = tuple(b if name in odd else a for name, a, b in zip(names, now, values, strict=True))
                self._held[index] = path, owner, names, kept
            if isinstance(owner, type):
                new = [
                    name for name in there.keys() - self._first[index] if callable(there[name]) and not self._knows(path, name, there[name])
                ]
                found += [f"{path}.{name}" for name in new if _inherited(owner, name)]
        return sorted(found)

    def _knows(self, path: str, name: str, value: Any) -> bool:
        return _identity(value) in self._known.get((path, name), ()) or _code(value) in self._of_machines


def _inherited(owner: type, name: str) -> bool:
    return any(name in vars(base) for base in owner.__mro__[1:])


def _identity(value: Any) -> Any:
    """The code of a function, whatever it encloses; its functions' of a class, some of which are made anew; else which object it is."""
    if isinstance(value, type):
        return value.__name__, *map(_code, vars(value).values())
    code = _code(value)
    return id(value) if code is None else code


def _codes(*packages: str) -> set[types.CodeType]:
    """Of all functions in these packages and modules, those within functions too."""
    found: set[types.CodeType] = set()
    remaining = [code for name, module in list(sys.modules.items()) if name.startswith(packages) for code in _codes_in(module)]
    while remaining:
        code = remaining.pop()
        if code not in found:
            found.add(code)
            remaining += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _codes_in(module: types.ModuleType) -> list[types.CodeType]:
    """Of a module's functions, and of its classes' own."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)]
    functions = [_inner(value) for owner in owners for value in list(vars(owner).values())]
    return [function.__code__ for function in functions if isinstance(function, types.FunctionType)]


def _watched() -> list[tuple[str, Any]]:
    """Modules, the kit's classes and PyTorch's tensors, by name."""
    found: list[tuple[str, Any]] = []
    for name, module in list(sys.modules.items()):
        own = name.partition(".")[0] in OWN
        if not isinstance(module, types.ModuleType) or not (own or name in WATCHED or name in RELIED_ON):
            continue
        found.append((name, module))
        for attribute, value in vars(module).items():
            if own and isinstance(value, type) and value.__module__ == name:
                found.append((f"{name}.{attribute}", value))
    found += [("torch.Tensor", torch.Tensor), ("torch.nn.Module", torch.nn.Module), ("torch._C.TensorBase", torch._C.TensorBase)]
    return [*found, ("json.JSONEncoder", json.JSONEncoder), ("json.JSONDecoder", json.JSONDecoder)]


def _callables(owner: Any, only: set[str] | None) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    found = {
        name: value
        for name, value in list(vars(owner).items())
        if (callable(value) or isinstance(value, property | staticmethod | classmethod | types.GetSetDescriptorType))
        and name not in COSMETIC
        and (only is None or name in only)
    }
    return tuple(found), tuple(found.values())


def _code(value: Any) -> Any:
    return getattr(_inner(value), "__code__", None)


def _inner(value: Any) -> Any:
    """The function in a partial, a method or a property."""
    while isinstance(value, partial | staticmethod | classmethod | property):
        names = {partial: "func", property: "fget"}
        value = getattr(value, next((names[kind] for kind in names if isinstance(value, kind)), "__func__"))
    return value
