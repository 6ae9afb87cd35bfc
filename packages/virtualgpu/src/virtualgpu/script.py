"""Running a script in this process, as Python would run it."""

import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from virtualgpu import front_end


def check_script(script: str | os.PathLike, module: bool = False) -> None:
    """Raise ValueError unless `script` is a file, or with `module` a module that Python finds."""
    if module:
        valid = all(part.isidentifier() for part in str(script).split("."))
        if not valid or _top(str(script)) is None:
            raise ValueError(f"no module named {script}")
    elif os.path.isdir(script):
        raise ValueError(f"{script} is a folder. Give the script in it that should run")
    elif not os.path.isfile(script):
        raise ValueError(f"no such script: {script}")


def module_file(name: str) -> str:
    """Return the file that `python -m name` would run, without running code of its packages.

    Raises ValueError if there is none.
    """
    check_script(name, module=True)
    spec, parts = _top(name), name.split(".")
    for end in range(2, len(parts) + 1):
        spec = spec and _part(spec, ".".join(parts[:end]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _part(spec, f"{name}.__main__")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"{name} is not a module that can be run")
    return spec.origin


def _top(name: str) -> ModuleSpec | None:
    """Return the import spec of the first part of a dotted module name.

    The current folder is searched first, as `python -m` does.
    """
    first = name.split(".")[0]
    here = [] if sys.flags.safe_path else [os.getcwd()]
    return PathFinder.find_spec(first, here + sys.path) or importlib.util.find_spec(first)


def _part(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return the import spec of the module `name` in a package, or None."""
    return PathFinder.find_spec(name, package.submodule_search_locations or [])


def run_script(script: str, arguments: list[str], module: bool = False) -> None:
    """Run `script` in this process as `python script arguments` would.

    This sets `sys.argv`, `sys.path[0]`, `__main__` and `__file__`. With `module`, `script` is a
    name and runs as with `python -m`.

    Every exception of the script is raised, also SystemExit. A printed traceback begins at the
    script's first line. The module `__main__` stays in place afterwards, because threads, pickle
    and the children that multiprocessing spawns look it up.
    """
    main, code = types.ModuleType("__main__"), None
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    try:
        code = _module_code(script, main) if module else _file_code(script, main)
        exec(code, main.__dict__)
    except BaseException:
        _hide_frames_before(code)
        raise


def _file_code(script: str, main: types.ModuleType) -> types.CodeType:
    """Return the compiled code of a script file, and prepare the module `main` to run it."""
    path = os.path.abspath(script)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as source:
        return compile(source.read(), path, "exec", dont_inherit=True)


def _module_code(name: str, main: types.ModuleType) -> types.CodeType:
    """Return the compiled code of the module `name`, and prepare the module `main` to run it.

    For a package it is the code of its `__main__`. Raises SystemExit, as Python does, if there is
    none.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # a command that pip installed does not search this folder
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    loader: Any = spec and spec.loader
    if spec is None or spec.origin is None or not hasattr(loader, "get_code"):
        raise SystemExit(f"{name} is not a module that can be run")
    main.__file__ = sys.argv[0] = spec.origin
    main.__loader__, main.__spec__, main.__package__ = loader, spec, spec.parent
    return loader.get_code(spec.name)


def _leave_out_the_kit(call: types.TracebackType | None) -> None:
    """Remove the kit's calls from the traceback of a script's error.

    `call` is the first entry of the traceback. An interrupt can happen in any of these calls, and a
    backward pass runs through some of them.
    """
    while call is not None and not sys.flags.dev_mode:
        while call.tb_next is not None and _is_of_the_kit(call.tb_next):
            call.tb_next = call.tb_next.tb_next
        call = call.tb_next


def _is_of_the_kit(call: types.TracebackType) -> bool:
    """Return whether this entry of a traceback is in a file of the kit."""
    return call.tb_frame.f_code.co_filename.startswith(front_end.folders())


def _hide_frames_before(code: types.CodeType | None) -> None:
    """Change sys.excepthook so that printed tracebacks begin at `code`.

    They are empty if `code` never ran.
    """
    show = sys.excepthook

    def from_the_script(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        while traceback is not None and traceback.tb_frame.f_code is not code:
            traceback = traceback.tb_next
        _leave_out_the_kit(traceback)
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = from_the_script
