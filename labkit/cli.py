"""The command line: `python -m labkit doctor`, `run`, `trace`, `torchrun`, `lessons` and `course`."""

import argparse
import importlib.machinery
import os
import sys
import traceback
import types
from collections.abc import Callable

import labkit
from labcourse import commands as course_commands


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m labkit", description="The GPU teaching kit's commands.")
    parser.add_argument("--version", action="version", version=f"labkit {labkit.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text)
        parser.set_defaults(command=does)
        return parser

    command("doctor", _doctor, "Print what this machine has, what the kit will run on, and what to do about anything missing.")
    run = command("run", _run, "Run an unmodified PyTorch script on virtual GPUs, as `python SCRIPT ARGUMENTS` would run it on real ones.")
    run.add_argument("--virtual-time", action="store_true", help="let Python's `time` tell the model's times: the same on every computer")
    _add_machine_and_script(run)
    trace = command(
        "trace", _trace, "Run a PyTorch script and write an HTML page about the memory and time of its GPUs, also when it fails."
    )
    trace.epilog = (
        "Any of --gpus, --like, --memory and --no-values asks for virtual GPUs. Without them the script runs on the real GPUs, if there "
        "are any, and CUDA is up before its first line. Recorded is this process, from the script's first line to its last: not the "
        "processes that it starts, and not one that is killed or leaves by os._exit."
    )
    _add_machine_and_script(trace)
    trace.add_argument("--output", metavar="FILE", help="the page; one of that name is written over (default: SCRIPT-memory.html, here)")
    trace.add_argument("--max-events", type=int, metavar="N", help="keep more or fewer events than labkit.record() does; the newest stay")
    trace.add_argument("--no-timeline", action="store_true", help="leave out what ran when: on real GPUs PyTorch's profiler stays off")
    torchrun = command(
        "torchrun", _torchrun, "Run a PyTorch script in several processes with PyTorch's own torchrun, each rank's output in its colour."
    )
    _add_ranks(torchrun)
    _add_script(torchrun)
    lessons = command("lessons", _lessons, "Copy the lessons into a folder to work in. What is there already stays as it is.")
    lessons.add_argument("--to", default="work", metavar="DIR", help="where the copies go (default: work, here)")
    lessons.add_argument("--reset", metavar="NN", help="bring one lesson back as it was, such as 03; what you wrote is kept beside it")
    text = "Hand out, collect and grade the lessons' exercises in a course."
    course_commands.add_to(commands.add_parser("course", help=text, description=text))
    return parser


def _add_machine_and_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, metavar="N", help="how many virtual GPUs (default: 1)")
    parser.add_argument("--like", metavar="MODEL", help="the GPU they are modelled on, such as T4 or H200 (default: T4)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each, such as 16GiB (default: the model's)")
    parser.add_argument("--no-values", action="store_true", help="keep shapes, memory, order and time, and compute nothing")
    _add_script(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many in all (default: 2)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines among which they are divided (default: 1)")
    parser.add_argument(
        "--endpoint", metavar="HOST:PORT", help="of one of the machines: give the same command on each (default: all nodes are on this one)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that the ranks may run (default: no limit)")
    parser.add_argument("--join-timeout", type=float, default=300, metavar="S", help="seconds to wait for the other nodes (default: 300)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start all ranks again when one fails (default: 0 times)")
    parser.add_argument("--devices", metavar="KIND", help="cuda or cpu (default: cuda if this machine has a GPU for each rank)")
    parser.add_argument("--in-order", action="store_true", help="show the ranks' output one rank after the other")


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="the Python script")
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    own.required = False  # argparse would ask for them where the script is missing


def _doctor(options: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.main()


def _run(options: argparse.Namespace) -> int:
    try:
        check_script(options.script)
        _use_gpus(options, virtual=True)
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(str(error))
    _set_up_for_times(options)
    run_script(options.script, options.arguments)
    return 0


def _set_up_for_times(options: argparse.Namespace) -> None:
    """What a script that measures needs. It lasts until the process ends, as the machine does: see `_use_gpus`."""
    from virtualgpu import hardware, host_clock

    machine = hardware.machine()
    machine.blanks_host = options.no_values  # a script times copies to the host too
    if options.virtual_time:
        host_clock.put_in_place(machine.clock, lambda seconds: machine.turns.sleep(seconds, machine.clock))


def check_script(script: str | os.PathLike) -> None:
    """Raises ValueError unless it is a file."""
    if os.path.isdir(script):
        raise ValueError(f"{script} is a folder: give the script in it that shall run")
    if not os.path.isfile(script):
        raise ValueError(f"no such script: {script}")


def _use_gpus(options: argparse.Namespace, virtual: bool | None) -> None:
    """Put the machine in place, until the process ends: the script's threads and atexit functions may outlive its last line."""
    from labkit import machine

    if options.gpus is not None and not 1 <= options.gpus <= machine.MAXIMUM:
        raise ValueError(f"--gpus {options.gpus}: choose a whole number from 1 to {machine.MAXIMUM}")
    machine.use(
        1 if options.gpus is None else options.gpus,
        like=options.like,
        memory=options.memory,
        virtual=virtual,
        values=not options.no_values,
        quiet=True,
        heeds_environment=True,
    )


def _trace(options: argparse.Namespace) -> int:
    import shlex

    from gputrace import report

    try:
        check_script(options.script)
        if options.max_events is not None and options.max_events < 1:
            raise ValueError(f"--max-events {options.max_events}: give a whole number, 1 or more")
        target = report.checked(options.output or report.default_path(options.script))
        wishes = (options.gpus, options.like, options.memory, options.no_values or None)
        _use_gpus(options, virtual=None if wishes == (None,) * 4 else True)
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(str(error), "trace")
    command = shlex.join([options.script, *options.arguments])
    written = report.run_and_report(
        lambda: run_script(options.script, options.arguments), command, target, options.max_events, not options.no_timeline
    )
    return 0 if written else 1


def _refuse(message: str, command: str = "run") -> int:
    print(f"labkit {command}: {message}", file=sys.stderr)
    return 2  # as argparse does for an argument that it refuses


def _torchrun(options: argparse.Namespace) -> int:
    from labkit import ranks

    chosen = {name: getattr(options, name) for name in ("ranks", "nodes", "endpoint", "timeout", "join_timeout", "max_restarts", "devices")}
    try:
        ranks.torchrun(options.script, *options.arguments, **chosen, live=not options.in_order)
    except ValueError as error:
        return _refuse(str(error), "torchrun")
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    except ranks.TorchrunError as error:
        print("\n".join([f"labkit torchrun: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("labkit torchrun: interrupted; all ranks are stopped.", file=sys.stderr)
        return 130  # as a shell reports it
    return 0


def _lessons(options: argparse.Namespace) -> int:
    from pathlib import Path

    from labkit import lesson_copies

    folder = Path(options.to)
    try:
        if options.reset is not None:
            fresh, kept = lesson_copies.reset(options.reset, folder)
            print(f"{fresh} is as it was at first." + f" What you wrote is kept in {kept}." * (kept is not None))
            return 0
        for line in lesson_copies.copy(folder):
            print(line)
        print(f"The lessons are in {folder}: your own copies, in which nothing is written over.")
    except ValueError as error:
        return _refuse(str(error), "lessons")
    except OSError as error:
        return _refuse(f"{error.filename or folder}: {error.strerror}", "lessons")
    return 0


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
