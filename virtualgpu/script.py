"""A script run in this process, as Python would run it."""

import importlib.machinery
import os
import sys
import types


def check_script(script: str | os.PathLike) -> None:
    """Raises ValueError unless it is a file."""
    if os.path.isdir(script):
        raise ValueError(f"{script} is a folder: give the script in it that shall run")
    if not os.path.isfile(script):
        raise ValueError(f"no such script: {script}")


def run_script(script: str, arguments: list[str]) -> None:
    """Run `script` in this process as `python script arguments` would: `sys.argv`, `sys.path[0]`, `__main__`, `__file__`.

    Whatever the script raises goes up, SystemExit included; a traceback printed for it begins at the script's own first line.
    The module `__main__` stays in place afterwards: threads, pickle and multiprocessing's spawned children look it up.
    """
    path = os.path.abspath(script)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    code = None
    try:
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except BaseException:
        _hide_frames_before(code)
        raise


def _hide_frames_before(code: types.CodeType | None) -> None:
    """Let sys.excepthook, the script's or Python's, get a traceback that begins at `code` (an empty one if it never ran)."""
    show = sys.excepthook

    def from_the_script(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code is not code:
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = from_the_script
