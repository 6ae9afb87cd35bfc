"""A script run in this process, as Python would run it."""

import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from virtualgpu import front_end


def check_script(script: str | os.PathLike, module: bool = False) -> None:
    """Raises ValueError unless it is a file, or the name of a module or package that Python finds."""
    if module:
        if not all(part.isidentifier() for part in str(script).split(".")) or _top(str(script)) is None:
            raise ValueError(f"no module named {script}")
    elif os.path.isdir(script):
        raise ValueError(f"{script} is a folder: give the script in it that shall run")
    elif not os.path.isfile(script):
        raise ValueError(f"no such script: {script}")


def module_file(name: str) -> str:
    """The file that `python -m name` would run, found without running any code of its packages. Raises ValueError where there is none."""
    check_script(name, module=True)
    spec, parts = _top(name), name.split(".")
    for end in range(2, len(parts) + 1):
        spec = spec and _part(spec, ".".join(parts[:end]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _part(spec, f"{name}.__main__")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"{name} is no module that can be run")
    return spec.origin


def _top(name: str) -> ModuleSpec | None:
    """The module's first part, looked for in the current folder first, as `python -m` does."""
    first = name.split(".")[0]
    here = [] if sys.flags.safe_path else [os.getcwd()]
    return PathFinder.find_spec(first, here + sys.path) or importlib.util.find_spec(first)


def _part(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, package.submodule_search_locations or [])


def run_script(script: str, arguments: list[str], module: bool = False) -> None:
    """Run `script` in this process as `python script arguments` would: `sys.argv`, `sys.path[0]`, `__main__`, `__file__`. With `module` it
    is a name, and runs as after `python -m`.

    Whatever the script raises goes up, SystemExit included; a traceback printed for it begins at the script's own first line.
    The module `__main__` stays in place afterwards: threads, pickle and multiprocessing's spawned children look it up.
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
    path = os.path.abspath(script)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as source:
        return compile(source.read(), path, "exec", dont_inherit=True)


def _module_code(name: str, main: types.ModuleType) -> types.CodeType:
    """The code of a module, or of a package's `__main__`. Raises SystemExit, as Python does, where there is none."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # the installed command does not look here
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    loader: Any = spec and spec.loader
    if spec is None or spec.origin is None or not hasattr(loader, "get_code"):
        raise SystemExit(f"{name} is no module that can be run")
    main.__file__ = sys.argv[0] = spec.origin
    main.__loader__, main.__spec__, main.__package__ = loader, spec, spec.parent
    return loader.get_code(spec.name)


def _leave_out_the_kit(call: types.TracebackType | None) -> None:
    """Take the kit's calls out of a script's traceback: an interrupt lands in any of them, and a backward comes through some."""
    while call is not None and not sys.flags.dev_mode:
        while call.tb_next is not None and call.tb_next.tb_frame.f_code.co_filename.startswith(front_end.folders()):
            call.tb_next = call.tb_next.tb_next
        call = call.tb_next


def _hide_frames_before(code: types.CodeType | None) -> None:
    """Let sys.excepthook, the script's or Python's, get a traceback that begins at `code` (an empty one if it never ran)."""
    show = sys.excepthook

    def from_the_script(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code is not code:
            traceback = traceback.tb_next
        _leave_out_the_kit(traceback)
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = from_the_script
