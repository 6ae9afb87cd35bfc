"""The command line: `python -m labkit doctor`, `run`, `trace`, `fit`, `torchrun`, `lessons` and `course`."""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gputrace.options import MAX_EVENTS, MAX_EVENTS_OPTION, check_max_events
from labkit import torchrun_options
from labkit.version import __version__
from virtualgpu.commands import REFUSED, RUN, add_machine, add_run, checked_gpus, run_command, tell_machine
from virtualgpu.options import GPUS, CommandParser
from virtualgpu.script import check_script, run_script

RANKS_NEEDED = (
    "fit does not start ranks as torchrun does. If the script expects torchrun, use "
    "`labkit torchrun --simulate 8 SCRIPT`. It runs one rank of 8 and says what memory the rank needs."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_command(_parser(), arguments)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m labkit", description="The GPU teaching kit's commands.")
    parser.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> CommandParser:
        parser = commands.add_parser(name, help=text, description=text)
        parser.set_defaults(command=does)
        return parser

    command("doctor", _doctor, "Print what this machine has, what the kit will run on, and what to do about anything missing.")
    add_run(commands.add_parser("run", help=RUN, description=RUN), "labkit run")
    trace = command(
        "trace", _trace, "Run a PyTorch script and write an HTML page about the memory and time of its GPUs, also when it fails."
    )
    trace.epilog = (
        "Any of --gpus, --like, --memory and --no-values asks for virtual GPUs. Without them the script runs on the real GPUs, if there "
        "are any, and CUDA is up before its first line. Recorded is this process, from the script's first line to its last: not the "
        "processes that it starts, and not one that is killed or leaves by os._exit."
    )
    add_machine(trace)
    trace.add_argument("--output", metavar="FILE", help="the page; one of that name is written over (default: SCRIPT-memory.html, here)")
    trace.add_argument("--chrome", metavar="FILE", help="also write what ran when for https://ui.perfetto.dev, such as trace.json")
    trace.add_argument("--snapshot", metavar="FILE", help="also write the memory for https://pytorch.org/memory_viz, such as memory.pickle")
    trace.add(MAX_EVENTS_OPTION)
    trace.add_argument("--no-timeline", action="store_true", help="leave out what ran when: on real GPUs PyTorch's profiler stays off")
    trace.add(
        torchrun_options.RANKS_OPTION,
        default=None,
        help="run the script in N processes, each with a virtual GPU, and write one page about all",
    )
    trace.add_script()
    fit = command("fit", _fit, "Say whether a training script fits GPUs of several models, what takes the memory, and what would help.")
    fit.epilog = (
        "The script runs unmodified for a few steps of its optimizer on virtual GPUs of each model, "
        "without values: the numbers that it reads are made up, and nothing is learned. Processes that "
        "it starts by multiprocessing run too. torch.save to a path writes no file. Everything "
        "else that the script writes is written, so make sure that it overwrites nothing you want to keep."
    )
    fit.add(GPUS, help="number of virtual GPUs that the script has (default: 1)")
    fit.add_argument("--like", metavar="A,B", default="T4,L4,A100,A100-80,H100,H200", help="the models (default: %(default)s)")
    steps_help = "number of steps, 3 or more; up to 4 more run if memory changes (default: %(default)s)"
    fit.add_argument("--steps", type=int, default=4, metavar="N", help=steps_help)
    fit.add_argument(
        "--host",
        default="1",
        metavar="X",
        help="how many times as long your CPU takes for an operator as the recorded H200s', such as 0.5; 'here' measures this computer",
    )
    fit.add_script()
    torchrun = command(
        "torchrun",
        lambda options: _torchrun(options, torchrun.get_default),
        "Run a PyTorch script in several processes with PyTorch's own torchrun, each rank's output in its colour.",
    )
    torchrun_options.add_job(torchrun, timeout=None)
    torchrun.add(*torchrun_options.SIMULATION, torchrun_options.IN_ORDER)
    torchrun.add_script()
    lessons = command("lessons", _lessons, "Copy the lessons into a folder to work in. What is there already stays as it is.")
    lessons.add_argument("--to", default="work", metavar="DIR", help="where the copies go (default: work, here)")
    lessons.add_argument("--reset", metavar="NN", help="bring one lesson back as it was, such as 03; what you wrote is kept beside it")
    if importlib.util.find_spec("labcourse") is not None:  # by name, for it stands on this package, and may be left out
        importlib.import_module("labcourse.commands").add_to(commands)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.main()


def _trace(options: argparse.Namespace) -> int:
    import shlex

    import virtualgpu
    from gputrace import report
    from labkit import machine

    try:
        check_script(options.script, options.module)
        check_max_events(options.max_events)
        if options.chrome is not None and options.no_timeline:
            raise ValueError("--chrome and --no-timeline: a Chrome trace is what ran when")
        wanted = {
            "--output": options.output or report.default_path(f"{options.script}.py" if options.module else options.script),
            "--chrome": options.chrome,
            "--snapshot": options.snapshot,
        }
        files = {option: report.checked(path, option) for option, path in wanted.items() if path is not None}
        if options.ranks is not None:
            return _trace_ranks(options, files)
        wishes = (options.gpus, options.like, options.memory)
        wants_virtual = any(wish is not None for wish in wishes) or not options.values
        used = machine.use(
            checked_gpus(options),
            like=options.like,
            memory=options.memory,
            virtual=True if wants_virtual else None,
            values=options.values,
            quiet=True,
            heeds_environment=True,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        return _refuse(str(error), "trace")
    gpus = virtualgpu.current()
    if gpus is None:
        print(f"labkit trace: {used.banner.removeprefix('labkit: ')} Times are measured.", file=sys.stderr)
    else:
        tell_machine(gpus, "labkit trace", "The page's times are the model's, the script's own this computer's.")
    command = shlex.join([*(["-m"] if options.module else []), options.script, *options.arguments])
    written = report.run_and_report(
        lambda: run_script(options.script, options.arguments, options.module), command, files, options.max_events, not options.no_timeline
    )
    return 0 if written else 1


def _fit(options: argparse.Namespace) -> int:
    try:
        return _tell_whether_it_fits(options)
    except KeyboardInterrupt:
        _tell("interrupted.", "fit")
        return 130  # as a shell reports it


def _tell_whether_it_fits(options: argparse.Namespace) -> int:
    from gputrace import fit
    from labkit.processes import forkserver

    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many run at once as there are processors

    def start(command: Sequence[str], output: int) -> fit.Process:
        return forkserver.popen(command, environment, output=output, with_caller=True)

    try:
        check_script(options.script, options.module)
        models = [name.strip() for name in options.like.split(",")]
        wish = fit.Wish(
            options.script,
            options.arguments,
            options.module,
            models[0],
            options.steps,
            _host(options.host),
            gpus=checked_gpus(options),
        )
        for table in fit.answer(wish, models, lambda line: _tell(line, "fit"), start):
            print(table, end="\n\n", flush=True)
    except ValueError as error:
        return _refuse(str(error), "fit")
    except fit.ScriptFailedError as error:
        from labkit.ranks import large_worlds

        if large_worlds.names_rank_variable(str(error)):
            error.add_note(RANKS_NEEDED)
        _tell(error, "fit")
        return 1
    return 0


def _host(wanted: str) -> float:
    """Raises ValueError for what is neither a number nor "here"."""
    from gputrace.fit import measure_host

    if wanted == "here":
        return round(measure_host(), 2)
    try:
        return float(wanted)
    except ValueError:
        raise ValueError(f"--host {wanted}: give a number, such as 2, or 'here'") from None


def _trace_ranks(options: argparse.Namespace, files: dict[str, Any]) -> int:
    """Raises ValueError for an argument that is not one of the choices."""
    import datetime
    import shlex

    from gputrace import report
    from labkit import ranks
    from virtualgpu.machines import DEFAULT_MODEL

    fewer = options.max_events != MAX_EVENTS
    given = {"--gpus": options.gpus, "--max-events": fewer, "--no-timeline": options.no_timeline}
    if unfit := [option for option, value in given.items() if value]:
        raise ValueError(f"--ranks {options.ranks}: leave out {', '.join(unfit)}; each rank has one virtual GPU, and its timeline")
    chosen = {"like": options.like or DEFAULT_MODEL, "memory": options.memory, "values": options.values, "timeout": None}
    chosen |= {"ranks": options.ranks, "module": options.module}
    failed = None
    try:
        trace = ranks.torchrun(options.script, *options.arguments, **chosen, trace=True, live=True).trace
    except ranks.TorchrunError as error:
        _tell(error, "trace")
        failed, trace = error, error.trace
    if trace is None:
        return _refuse("no rank left a recording, so there is no page", "trace")
    command = shlex.join([f"--ranks={options.ranks}", *(["-m"] if options.module else []), options.script, *options.arguments])
    ended = "at its last line" if failed is None else f"by a rank: {failed}"
    written = report.write_all(trace, command, ended, files, datetime.date.today())
    return 0 if written and failed is None else 1


def _tell(said: Exception | str, command: str) -> None:
    print("\n".join([f"labkit {command}: {said}", *getattr(said, "__notes__", [])]), file=sys.stderr)


def _refuse(message: str, command: str) -> int:
    print(f"labkit {command}: {message}", file=sys.stderr)
    return REFUSED


def _torchrun(options: argparse.Namespace, default: Callable[[str], Any]) -> int:
    changed = {name for name, value in vars(options).items() if value != default(name)}
    if options.simulate is not None:
        return _simulate(options, changed)
    if options.rank is not None:
        return _refuse(f"--rank {options.rank} is for --simulate; without it all ranks run", "torchrun")
    from labkit import ranks

    other = {"command", "script", "arguments", "simulate", "rank", "in_order"}
    chosen = {name: value for name, value in vars(options).items() if name not in other}
    try:
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
        return 130  # as a shell reports it
    return 0


def _simulate(options: argparse.Namespace, changed: set[str]) -> int:
    from labkit.ranks import large_worlds

    alone = ("ranks", "endpoint", "timeout", "join_timeout", "max_restarts", "devices", "in_order")
    unfit = [f"--{name.replace('_', '-')}" for name in alone if name in changed]
    try:
        if unfit:
            raise ValueError(f"--simulate starts no other rank: leave out {', '.join(unfit)}")
        check_script(options.script, options.module)
        chosen = {name: getattr(options, name) for name in ("nodes", "network", "like", "memory")}
        gpus = large_worlds.set_up(options.simulate, rank=options.rank or 0, **chosen)
    except ValueError as error:
        return _refuse(str(error), "torchrun")
    large_worlds.run(gpus, options.script, options.arguments, options.module)
    return 0


def _lessons(options: argparse.Namespace) -> int:
    from pathlib import Path

    from labkit import contents, lesson_copies

    folder = Path(options.to)
    try:
        if options.reset is not None:
            fresh, kept = lesson_copies.reset(options.reset, folder)
            print(f"{fresh} is as it was at first.")
            if kept is not None:
                print(f"What you wrote is kept in {kept}.")
            return 0
        for line in lesson_copies.copy(folder):
            print(line)
        print(f"The lessons are in {folder}: your own copies, in which nothing is written over. {folder / contents.INDEX} shows them all.")
    except ValueError as error:
        return _refuse(str(error), "lessons")
    except OSError as error:
        return _refuse(f"{error.filename or folder}: {error.strerror}", "lessons")
    return 0
