"""Watches what a submission's own code does that no exercise needs: by Python's audit events, and by what it asks of modules.

A report leaves the process at once, by a pipe: it cannot be taken back. What the notebook's own code did is told from what a library did
for it: print_exc reads frames, too, but hands none out.
"""

import inspect
import json
import multiprocessing.reduction
import multiprocessing.util
import os
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]  # in C, where it is there
from threading import get_ident
from typing import Any

from labcourse import scan

OWN = (*sorted(scan.KIT), "labcourse")
LIBRARIES = tuple({os.path.dirname(os.__file__), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})
PICKLING = multiprocessing.reduction.__file__  # for another process: it asks for what it has
KIT = tuple(f"{os.path.dirname(str(import_module(package).__file__))}/" for package in OWN)
CHECKS = f"{os.path.dirname(str(import_module('labkit.checks').__file__))}/"
HANDING_OUT = {"currentframe", "stack", "trace", "getouterframes", "getinnerframes", "walk_stack", "walk_tb", "<lambda>"}  # frames, and
HANDING_OUT |= {"extract_vars", "extract_vars_above", "extract_module_locals", "getmembers", "_getmembers"}  # what is in them
HANDING_OUT |= {"get_field", "_vformat", "vformat", "format"}
CALLING = {"Guarded.__call__", "starting.<locals>.run_in_turns"}  # of the kit, what calls an answer or a thread, which may have no frame
FRAMES = {"sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile"}
OBJECTS = {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.addaudithook", "code.__new__", "function.__new__"}
LOADING = {"marshal.loads", "marshal.load", "pickle.find_class", "ctypes.dlsym", "ctypes.dlopen", "ctypes.cdata", "ctypes.string_at"}
INSIDES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame", "gi_code", "__code__", "__defaults__", "__kwdefaults__"}
EVENTS = FRAMES | OBJECTS | LOADING | {"object.__getattr__", "object.__setattr__", "compile", "open", "os.kill", "os.killpg"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
STARTING = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}  # programs, in which nothing is watched
ASKED, PUT, CALLED = "labcourse.asked", "labcourse.put", "labcourse.called"  # something of a watched module; into one; a watched function
EVENTS |= NETWORK | STARTING | {"import", "exec", ASKED, PUT, CALLED}
DONE_FOR_IT = (
    NETWORK | STARTING | {"open", "os.kill", "os.killpg", "compile", "exec", "ctypes.dlopen"}
)  # also where a library does it for the notebook
# Folders whose files the notebook reads only to cheat; libraries that read any file to show its lines, or to see whether it has changed.
SOLVING = tuple(CHECKS.replace("/checks/", f"/{folder}/") for folder in ("labs", "lab_parts", "articles", "checks"))
SHOWING = ("/traceback.py", "/warnings.py", "/ultratb.py", "/oinspect.py", "/stack_data/core.py", "/autoreload.py", "/deduperreload.py")
SECRET = re.compile(r"\.ipynb$|^/proc/[^/]+/(mem|fd|task|root|cwd|environ|maps)|^/dev/fd")  # files
CALLING_ON = "def calling(*arguments, **keywords):\n 'tell'('event', 'path')\n return 'inner'(*arguments, **keywords)"
MOST, LONGEST = 200, 100_000  # reports, and characters of each


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
        self.count = 0  # of those that have gone

    def add(self, kind: str, text: str) -> None:
        if len(self._seen) >= MOST or len(text) > LONGEST:
            kind, text = "suspect", "it made more programs than can be read"
        if (kind, text) not in self._seen:
            self._seen.add((kind, text))
            self._write(self._fd, plain([kind, text]).encode() + b"\n")
            self.count += 1


_tell, _ask = sys.audit, types.ModuleType.__getattribute__
_put, _remove = types.ModuleType.__setattr__, types.ModuleType.__delattr__


class KeptModule(types.ModuleType):
    """A module that tells of what is put into it, or taken out of it, also where it is put back before anybody looks."""

    def __setattr__(self, name: str, value: Any) -> None:
        _tell(PUT, self, name)
        _put(self, name, value)

    def __delattr__(self, name: str) -> None:
        _tell(PUT, self, name)
        _remove(self, name)

    def __reduce__(self) -> Any:  # other processes import it
        return import_module, (_ask(self, "__name__"),)


class WatchedModule(KeptModule):
    """A module that tells of each name that is asked of it: who asks can hide the name in the text of his program, but not here."""

    def __getattribute__(self, name: str) -> Any:
        value = _ask(self, name)
        _tell(ASKED, self, name)
        return value

    def __dir__(self) -> list[str]:  # which asks for all of a module, and hands out no more than names
        return list(types.ModuleType.__dir__(self))


class Watch:
    """Reports from now on, for good, what the notebook's own code does. `names` are its names, some of which become watched ones."""

    def __init__(self, reports: Reports, names: dict[str, Any]) -> None:
        self.trying = False  # whether an answer is tried
        self._add, self._names, self._busy = reports.add, names, set[int]()
        self._modules: dict[int, tuple[str, types.ModuleType]] = {}
        self._seen: dict[int, types.ModuleType] = {}  # held, so that no other gets its number
        self.renew()
        sys.addaudithook(self._hook)
        multiprocessing.util.spawnv_passfds = _told(multiprocessing.util.spawnv_passfds)
        for function in (getattr, setattr, delattr, vars):
            names[function.__name__] = _reporting(function, reports.add)

    def renew(self) -> None:
        """Watch the modules that were imported since, and report those that are watched no more."""
        for name, module in self._modules.values():
            if type(module) not in (KeptModule, WatchedModule):
                self._add("changed", f"{name}.__class__")
        for name, module in list(sys.modules.items()):
            if id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            if type(module) in (types.ModuleType, WatchedModule):  # importing makes what `sys` is
                kept = KeptModule if name.partition(".")[0] in scan.MEASURED else types.ModuleType
                module.__class__ = kind = WatchedModule if _is_watched(name) else kept
                if kind is not types.ModuleType:
                    self._modules[id(module)] = name, module

    def _hook(self, event: str, arguments: tuple[Any, ...], events: set[str] = EVENTS, getframe: Any = sys._getframe) -> None:
        if event not in events or (event == "object.__getattr__" and arguments[1] not in INSIDES):
            return
        if (thread := get_ident()) in self._busy:
            return
        self._busy.add(thread)
        try:
            frame = getframe(1)
            if (
                event in (ASKED, CALLED)
                and (asking := frame.f_back.f_code).co_filename.startswith(KIT)
                and asking.co_qualname not in CALLING
            ):
                return
            for kind, text in self._said(event, arguments, frame):
                self._add(kind, text)
        finally:
            self._busy.discard(thread)

    def _said(self, event: str, arguments: tuple[Any, ...], frame: types.FrameType) -> list[tuple[str, str]]:
        """What to report of this event. Nothing here may run code of the notebook's, such as a text's own __str__."""
        first, second = map(_text, (*arguments, "", "")[:2])
        if event in (ASKED, PUT):
            name = self._modules[id(arguments[0])][0] if id(arguments[0]) in self._modules else _name_of(arguments[0])
            asking = _asking_frame(frame.f_back, name.partition(".")[0] in scan.KIT) if _is_watched(name) or event == PUT else None
            told = "" if asking is None else scan.of_path(f"{name}.{second}", writes=True) if event == PUT else _of_asking(name, second)
            return [("suspect", told)] if told else []
        if event == CALLED:
            return [("suspect", told)] if _asking_frame(frame.f_back, True) is not None and (told := scan.of_path(first)) else []
        if event in STARTING:
            return [("suspect", "its answer started a program")] if self.trying and _is_own_start(frame) else []
        zipped = frame.f_code.co_filename == "<frozen zipimport>"
        through, importing, reading = _passed_on(event, arguments)
        if _own_frame(frame, through, importing or zipped, reading) is None:
            written = event == "compile" and second and not second.startswith("<") and not _is_known(second)
            cell = event == "exec" and "/IPython/" in frame.f_code.co_filename  # which something may have rewritten
            return [("source", first)] if written else [("suspect", told) for told in _of_code(arguments[0])] if cell else []
        if zipped:
            return [("suspect", "it imported from a zip file")]
        if event == "compile":
            if _finds_source(frame.f_back):  # of a class, by its file's tree
                return []
            return [("source", first), *([("suspect", "it gave its code another file's name")] if _is_known(second) else [])]
        if event in ("object.__getattr__", "object.__setattr__"):
            return _of_attribute(event, arguments[0], second, self._names)
        return [("suspect", told) for told in _of_event(event, arguments, first, second)]


def watch_calls(functions: list[types.FunctionType], names: dict[int, str]) -> None:
    """Have these functions tell of each call, under whatever name they were found. `names` are those that lessons have for some."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a text that is called, in whose place a function comes, and about generators
        [telling] = (part for part in compile(CALLING_ON, "", "exec").co_consts if isinstance(part, types.CodeType))
        for function in functions:
            code, path = function.__code__, names.get(id(function), f"{function.__module__}.{function.__name__}")
            inner = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            inner.__kwdefaults__ = function.__kwdefaults__
            function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
            held = {"tell": _tell, "event": CALLED, "path": path, "inner": inner}
            constants = tuple(held.get(part, part) for part in telling.co_consts)
            there = telling.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
            function.__code__ = there.replace(co_consts=constants, co_name=code.co_name)


def _is_watched(name: str) -> bool:
    return name.partition(".")[0] in (*scan.KIT, "sys", "builtins")


def _text(value: Any) -> str:
    """Of a text or bytes, whatever their class makes of them; else ""."""
    if issubclass(type(value), bytes):
        return bytes.decode(value, errors="replace")
    return str.__str__(value) if issubclass(type(value), str) else ""


def _name_of(module: types.ModuleType) -> str:
    return _text(_ask(module, "__name__"))


def _asking_frame(frame: types.FrameType | None, through: bool) -> types.FrameType | None:
    """The frame for which a module was asked; None where the kit, an import or help() asks by itself, or, if not `through`, a library."""
    if frame is not None and (frame.f_code.co_filename.startswith(("<frozen importlib", PICKLING)) or _finds_source(frame)):
        return None
    return _own_frame(frame, through, True)


def _finds_source(frame: types.FrameType | None) -> bool:
    """Whether this is `inspect`, on its way to lines that it reads itself."""
    return frame is not None and frame.f_code.co_name == "findsource" and frame.f_code.co_filename == inspect.__file__


def _of_asking(module: str, name: str) -> str:
    """Of a module's own insides, not of what imports, repr() and help() ask; `sys.modules` leads to modules, which are watched."""
    if name.startswith("__") and name.endswith("__"):
        inside = name in ("__dict__", "__getattr__") or (name in scan.NAMES and name not in ("__spec__", "__import__"))
        return f"it uses {module}.{name}" if inside else ""
    return "" if (module, name) == ("sys", "modules") else scan.of_path(f"{module}.{name}")


def _is_lent(function: types.FunctionType) -> bool:
    """Whether a check gave this function to an answer: what the answer is to find out may stand in its defaults."""
    return function.__code__.co_filename.startswith(CHECKS)


def _own_frame(frame: types.FrameType | None, through: bool, importing: bool, reading: bool = False) -> types.FrameType | None:
    """The notebook's own frame that did this, or None where a library did it by itself.

    `through` any library? Also one that imports, or that reads source without showing it?
    """
    lines = False
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if _is_kits(file):
            return frame if code.co_qualname in CALLING else None
        if not _is_known(file):
            return frame
        passed_on = (through or code.co_name in HANDING_OUT or "/ctypes/" in file) and file != "<frozen _sitebuiltins>"  # help()
        lines = lines or "/linecache." in file
        if not passed_on or (not importing and "importlib" in file) or (lines and not reading) or file.endswith(SHOWING):
            return None
        if frame.f_back is None:  # a thread, which begins with a library
            return frame if importing else None
        frame = frame.f_back
    return None


def _is_own_start(frame: types.FrameType | None) -> bool:
    """Whether the notebook started a program, also with the kit's help; what a check gave the answer may do so."""
    helped = False
    while frame is not None and _is_known(file := frame.f_code.co_filename):
        if file.startswith(CHECKS) or frame.f_code.co_qualname in CALLING:
            return not file.startswith(CHECKS)
        helped, frame = helped or _is_kits(file), frame.f_back
    return frame is not None or not helped


def _passed_on(event: str, arguments: tuple[Any, ...]) -> tuple[bool, bool, bool]:
    """Whether this is the notebook's deed also where a library does it for it; where Python imports something; where it reads source."""
    first, second = (*arguments, None, None)[:2]
    if event == "object.__getattr__":
        return second in ("__defaults__", "__kwdefaults__") and type(first) is types.FunctionType and _is_lent(first), True, True
    if event == "import":
        return second is not None, True, True  # a compiled module's file
    if event == "exec":
        return True, not _is_known(first.co_filename) if type(first) is types.CodeType else True, False
    if event == "open":
        return True, _text(first).endswith(".pyc"), os.path.realpath(_text(first)).startswith(SOLVING)
    return event in DONE_FOR_IT, not _is_known(_text(second)), False


def _is_kits(file: str) -> bool:
    return file.startswith(KIT) or file == "<claim>"  # of an article, on trial


def _is_known(file: str) -> bool:
    """Whether a file is a library's or the kit's, which no submission can write."""
    return file.startswith((*LIBRARIES, "<frozen ")) or _is_kits(file)


def _of_event(event: str, arguments: tuple[Any, ...], first: str, second: str) -> list[str]:
    """What to report of an event that the notebook's own code caused."""
    if event == "exec":
        return _of_code(arguments[0])
    if event in NETWORK:
        if event == "socket.connect":  # a socket in the file system, as processes use, has no address
            first = _text(tuple.__getitem__(arguments[1], 0)) if issubclass(type(arguments[1]), tuple) else ""
        return [] if not first or first.startswith(("127.", "localhost", "::1")) else ["it tried to use the network"]  # ranks meet there
    if event in ("os.kill", "os.killpg"):
        above = type(arguments[0]) is int and (arguments[0] <= 1 or arguments[0] == os.getppid())
        return ["it tried to end other processes"] if above else []
    if event == "pickle.find_class":
        if first.startswith("torch"):  # in which there are other modules, too
            return [f"it loaded {first}.{second}"] if "." in second and second.partition(".")[0] in sys.modules else []
        told = scan.of_path(f"{first}.{second}") or scan.of_name(second)
        return [told] if told else []
    if event in ("open", "import", "ctypes.dlopen"):
        return _of_file(first) if event == "open" else _of_module(first, second) if event == "import" else _of_program(first)
    return [f"it used {event}"]


def _of_code(code: Any) -> list[str]:
    """The names that a program reaches for, in whatever form it was made; its texts are read when it is compiled."""
    if type(code) is not types.CodeType:
        return []
    inner = [constant for constant in code.co_consts if type(constant) is types.CodeType]
    told = [said for name in code.co_names if (said := scan.of_name(name))]
    return [*told, *(said for other in inner for said in _of_code(other))]


def _of_attribute(event: str, owner: Any, attribute: str, names: dict[str, Any]) -> list[tuple[str, str]]:
    is_function = type(owner) is types.FunctionType
    if event == "object.__setattr__" and attribute in INSIDES and is_function and owner.__globals__ is not names:
        return [("changed", f"{owner.__module__}.{owner.__qualname__}.{attribute}")]
    own = attribute in ("__code__", "__defaults__", "__kwdefaults__") and not (is_function and _is_kits(owner.__code__.co_filename))
    if own or attribute not in INSIDES:
        return []
    return [("suspect", f"it looked into {attribute} of {owner.__qualname__ if is_function else 'a frame or a generator'}")]


def _of_file(path: str) -> list[str]:
    if SECRET.search(path) or _is_kits(os.path.realpath(path)):
        return [f"it tried to open {path[-200:]}"]
    return _of_program(path) if path.endswith(".pyc") and os.path.exists(path) else []


def _of_module(name: str, file: str) -> list[str]:
    if name.partition(".")[0] in ("ctypes", "_ctypes", "cffi", "labcourse"):
        return [f"it imported {name}"]
    return [told] if (told := scan.of_path(name)) else _of_program(file)


def _of_program(file: str) -> list[str]:
    """A file of compiled code that the system or a library did not bring along."""
    own = "/" in file and not file.startswith((*LIBRARIES, "/usr/", "/lib"))
    return [f"it loaded compiled code, {file[-200:]}"] if own else []


def _told(spawn: Callable[..., Any]) -> Callable[..., Any]:
    """What multiprocessing starts programs with, of which Python itself tells nobody. Its own helper, which runs nobody's code, is none."""

    def watched(path: Any, arguments: Any, fds: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.endswith("/resource_tracker.py"):
            sys.audit("subprocess.Popen", path)
        return spawn(path, arguments, fds)

    return watched


def _reporting(function: Callable[..., Any], add: Callable[[str, str], None]) -> Callable[..., Any]:
    """A built-in that reaches an attribute by name, for the notebook: it says which of Python's or the kit's insides it is asked for."""

    def watched(*arguments: Any) -> Any:
        name = _text(arguments[1]) if len(arguments) > 1 else ""
        path = f"{_name_of(arguments[0])}.{name}" if arguments and issubclass(type(arguments[0]), types.ModuleType) else name
        if told := scan.of_name(name) or scan.making_up(path) or scan.of_path(path, writes=function not in (getattr, vars)):
            add("suspect", told)
        if function is not vars:
            return function(*arguments)
        found = vars(*arguments) if arguments else sys._getframe(1).f_locals
        if arguments and not {"_gpu", "__getattribute__"}.isdisjoint(found):
            add("suspect", "it uses vars of what is on a GPU, or of a class of Python's")
        return found

    return partial(watched)
