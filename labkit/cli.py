"""The command line `python -m labkit`.

Its commands are `doctor`, `run`, `trace`, `fit`, `torchrun`, `top` and `lessons`, and `course` if
the package `labcourse` is installed.
"""

import argparse
import datetime
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gputrace.commands import FIT, TRACE, add_fit, add_trace, checked_files, command_line
from gputrace.options import MAX_EVENTS
from labkit import torchrun_options
from labkit.version import __version__
from virtualgpu.commands import REFUSED, RUN, add_run, checked_host, run_command
from virtualgpu.driver import running
from virtualgpu.machines import DEFAULT_MODEL
from virtualgpu.options import CommandParser
from virtualgpu.script import check_script


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. The default arguments are the process's own."""
    return run_command(_parser(), arguments)


def _parser() -> CommandParser:
    """Return the parser of all commands."""
    parser = CommandParser(prog="python -m labkit", description="The GPU teaching kit's commands.")
    parser.add_argument("--version", action="version", version=f"labkit {__version__}")
    parser.examples = {
        "doctor": "Check this machine.",
        "lessons --to work": "Copy the lessons into the folder work.",
        "run --like H200 train.py": "Run a script on a virtual H200.",
        "run --help": "Say what `run` can do. Each command has --help.",
    }
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> CommandParser:
        parser = commands.add_parser(name, help=text, description=text)
        parser.set_defaults(command=does)
        return parser

    doctor = command(
        "doctor",
        _doctor,
        "Print what this machine has, what the kit will run on, and what to do about anything "
        "missing.",
    )
    doctor.examples = {"": "Check this machine."}
    add_run(commands.add_parser("run", help=RUN, description=RUN), "labkit run")
    _add_trace(commands.add_parser("trace", help=TRACE, description=TRACE))
    add_fit(commands.add_parser("fit", help=FIT, description=FIT), "labkit fit", _start_attempt)
    torchrun = command(
        "torchrun",
        lambda options: _torchrun(options, torchrun.get_default),
        "Run a PyTorch script in several processes with PyTorch's own torchrun. "
        "The output of each rank has its own colour.",
    )
    torchrun_options.add_job(torchrun, timeout=None)
    torchrun.add(torchrun_options.SIMULATE, torchrun_options.RANK, torchrun_options.IN_ORDER)
    torchrun.add_script()
    torchrun.examples = {
        "--ranks 4 train.py": "Start four ranks, on real GPUs if there is one for each rank.",
        "--ranks 4 --like H200 train.py": "Give each rank a virtual H200.",
        "--simulate 1024 --nodes 128 --like H100 train.py": "Run rank 0 of 1,024 ranks alone.",
    }
    top = command(
        "top",
        _top,
        "Show the GPUs of the scripts and notebooks that run now, real and virtual ones: their "
        "memory, the streams that are busy, and the line that runs. q ends the view.",
    )
    top.add_argument("pid", nargs="?", type=int, metavar="PID", help="show only this process")
    top.add_argument("--once", action="store_true", help="print the state once, as plain text")
    top.epilog = (
        "top shows your own processes: scripts that were started with labkit run, trace and "
        "torchrun, and scripts and notebooks that called labkit.use. Without a terminal, it prints "
        "the state once. Busy streams are known only of virtual GPUs."
    )
    top.examples = {
        "": "Show all scripts, and look again every second.",
        "--once 4711": "Print what process 4711 does now.",
    }
    lessons = command(
        "lessons",
        _lessons,
        "Copy the lessons into a folder to work in. Lessons that you have changed are kept.",
    )
    lessons.add_argument(
        "--to", default="work", metavar="DIR", help="folder for the copies (default: work)"
    )
    lessons.add_argument(
        "--reset",
        metavar="NN",
        help="restore one lesson, such as 03; a copy with your changes is kept beside it",
    )
    lessons.examples = {
        "": "Copy all lessons into the folder work.",
        "--to course": "Copy them into the folder course.",
        "--reset 03": "Restore lesson 3 in the folder work.",
    }
    # labcourse imports this package and may be missing, so it is not imported at the top.
    if importlib.util.find_spec("labcourse") is not None:
        importlib.import_module("labcourse.commands").add_to(commands)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.main()


def _add_trace(parser: CommandParser) -> None:
    """Add the options of the command `trace`: those of gputrace's command, and `--ranks`."""
    from labkit import machine

    ranks = torchrun_options.RANKS_OPTION.changed(
        default=None,
        help="run the script in N processes, each with a virtual GPU, and write one page about all",
    )
    add_trace(parser, "labkit trace", ranks, prefers_virtual=machine.virtual_by_default)
    parser.examples["--ranks 4 --like H200 train.py"] = "Write one page about four ranks."
    trace_alone = parser.get_default("command")

    def trace(options: argparse.Namespace) -> int:
        if options.ranks is None or options.compare is not None:
            if options.compare is None:
                running.answer()  # for real GPUs. Virtual ones have an answer of their own
            return trace_alone(options)
        return _trace_ranks(options)

    parser.set_defaults(command=trace)


def _top(options: argparse.Namespace) -> int:
    from labkit import top

    return top.main(options.pid, options.once)


def _start_attempt(command: Sequence[str], output: int) -> Any:
    """Start a process that tries one setting of `fit`, and return the process.

    `command` is the script to run and its arguments, and `output` the file descriptor for the
    process's output.
    """
    from labkit.processes import forkserver

    # One thread for each process, because as many processes as processors run at once.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return forkserver.popen(command, environment, output=output)


def _trace_ranks(options: argparse.Namespace) -> int:
    """Run the script in several ranks, write one page about all, and return the exit status."""
    from gputrace import report
    from labkit import ranks

    given = {
        "--gpus": options.gpus,
        "--max-events": options.max_events != MAX_EVENTS,
        "--no-timeline": options.no_timeline,
    }
    failed = None
    try:
        files = checked_files(options)
        unfit = [name for name, value in given.items() if value]
        if unfit:
            raise ValueError(
                f"--ranks {options.ranks}: leave out {', '.join(unfit)}, because each rank has one "
                "virtual GPU and a whole timeline"
            )
        trace = ranks.torchrun(
            options.script,
            *options.arguments,
            module=options.module,
            ranks=options.ranks,
            timeout=None,
            like=options.like or DEFAULT_MODEL,
            memory=options.memory,
            values=options.values,
            host=checked_host(options.host),
            trace=True,
            live=True,
        ).trace
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(str(error), "trace")
    except ranks.TorchrunError as error:
        _tell(error, "trace")
        failed, trace = error, error.trace
    if trace is None:
        return _refuse("no rank wrote a recording, so there is no page", "trace")
    command = command_line(options, f"--ranks={options.ranks}")
    ended = "at its last line" if failed is None else f"by a rank: {failed}"
    written = report.write_all(trace, command, ended, files, datetime.date.today(), "labkit trace")
    return 0 if written and failed is None else 1


def _tell(message: Exception | str, command: str) -> None:
    """Print a message, or an exception with its notes, to standard error.

    The text begins with the name of the command.
    """
    notes = getattr(message, "__notes__", [])
    print("\n".join([f"labkit {command}: {message}", *notes]), file=sys.stderr)


def _refuse(message: str, command: str) -> int:
    """Print why a command did not run, and return the exit status for that."""
    print(f"labkit {command}: {message}", file=sys.stderr)
    return REFUSED


def _torchrun(options: argparse.Namespace, default: Callable[[str], Any]) -> int:
    """Run the command `torchrun`. `default` returns the default of an option by its name."""
    changed = {name for name, value in vars(options).items() if value != default(name)}
    if options.simulate is not None:
        return _simulate(options, changed)
    if options.rank is not None:
        return _refuse(
            f"--rank {options.rank} needs --simulate, because without --simulate all ranks run",
            "torchrun",
        )
    from labkit import ranks

    other = {"command", "script", "arguments", "simulate", "rank", "in_order"}
    chosen = {name: value for name, value in vars(options).items() if name not in other}
    try:
        chosen["host"] = checked_host(options.host)
        ranks.torchrun(options.script, *options.arguments, **chosen, live=not options.in_order)
    except ValueError as error:
        return _refuse(str(error), "torchrun")
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    except ranks.TorchrunError as error:
        _tell(error, "torchrun")
        return 1
    except KeyboardInterrupt:
        print("labkit torchrun: interrupted; all ranks are stopped.", file=sys.stderr)
        return 130  # the status that shells report for an interrupted program
    return 0


def _simulate(options: argparse.Namespace, changed: set[str]) -> int:
    """Run one simulated rank. `changed` has the names of the options that were given."""
    from virtualgpu import simulated_world

    def tell(sentence: str) -> None:
        _tell(sentence, "torchrun")

    alone = ("ranks", "timeout", "max_restarts", "devices", "in_order")
    unfit = [f"--{name.replace('_', '-')}" for name in alone if name in changed]
    try:
        if unfit:
            raise ValueError(f"--simulate starts no other rank: leave out {', '.join(unfit)}")
        check_script(options.script, options.module)
        chosen = {name: getattr(options, name) for name in ("nodes", "network", "like", "memory")}
        host = checked_host(options.host)
        gpus = simulated_world.set_up(
            options.simulate, rank=options.rank or 0, **chosen, host=host, tell=tell
        )
    except ValueError as error:
        return _refuse(str(error), "torchrun")
    simulated_world.run(gpus, options.script, options.arguments, options.module, tell)
    return 0


def _how_to_open(index: Path) -> str:
    """Return the commands that open the table of lessons in JupyterLab.

    Without a browser, JupyterLab prints the address of its launcher, unless it is told which page
    to begin with.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        return "To open them, install JupyterLab: pip install jupyterlab"
    folder, page = shlex.quote(str(index.parent)), f"/lab/tree/{index.name}"
    return (
        f"Open them: jupyter lab {shlex.quote(str(index))}\n"
        "Open them without a browser on this machine: jupyter lab --no-browser "
        f"--ServerApp.root_dir={folder} --LabApp.default_url={page}"
    )


def _lessons(options: argparse.Namespace) -> int:
    """Copy the lessons, or restore one of them."""
    from labkit import contents, lesson_copies

    folder = Path(options.to)
    try:
        if options.reset is not None:
            fresh, kept = lesson_copies.reset(options.reset, folder)
            print(f"{fresh} is restored.")
            if kept is not None:
                print(f"A copy with your changes is kept in {kept}.")
            return 0
        for line in lesson_copies.copy(folder):
            print(line)
        print(
            f"The lessons are in {folder}. They are your own copies, and a lesson that you have "
            f"changed is never overwritten. {folder / contents.INDEX} lists all lessons."
        )
        if "MAKELEVEL" not in os.environ:  # `make lab` opens the lessons itself
            print(_how_to_open(folder / contents.INDEX))
    except ValueError as error:
        return _refuse(str(error), "lessons")
    except OSError as error:
        return _refuse(f"{error.filename or folder}: {error.strerror}", "lessons")
    return 0
