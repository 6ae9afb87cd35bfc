"""The command line: `python -m labkit doctor` and `python -m labkit run`."""

import argparse
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m labkit", description="The GPU teaching kit's commands.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text)
        parser.set_defaults(command=does)
        return parser

    command("doctor", _doctor, "Print what this machine has, what the kit will run on, and what to do about anything missing.")
    run = command("run", _run, "Run an unmodified PyTorch script on virtual GPUs, as `python SCRIPT ARGUMENTS` would run it on real ones.")
    run.add_argument("--gpus", type=int, default=1, metavar="N", help="how many virtual GPUs (default: 1)")
    run.add_argument("--like", metavar="MODEL", help="the GPU they are modelled on, such as T4 or H200 (default: T4)")
    run.add_argument("--memory", metavar="SIZE", help="memory of each, such as 16GiB (default: the model's)")
    run.add_argument("--no-values", action="store_true", help="keep shapes, memory, order and time, and compute nothing")
    run.add_argument("script", help="the Python script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.main()


def _run(options: argparse.Namespace) -> int:
    from labkit import machine

    if not os.path.isfile(options.script):
        return _refuse(f"no such script: {options.script}")
    try:
        # Until the process ends: the script's threads and atexit functions may outlive its last line.
        machine.use(
            options.gpus,
            like=options.like,
            memory=options.memory,
            virtual=True,
            values=not options.no_values,
            quiet=True,
            heeds_environment=True,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(str(error))
    run_script(options.script, options.arguments)
    return 0


def _refuse(message: str) -> int:
    print(f"labkit run: {message}", file=sys.stderr)
    return 2  # as argparse does for an argument that it refuses


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
    """Make sys.excepthook, the script's or Python's, see a traceback that begins at `code` (and an empty one if it never ran)."""
    show = sys.excepthook

    def from_the_script(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code is not code:
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = from_the_script
