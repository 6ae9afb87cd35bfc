"""Commands `trace` and `fit` of `python -m gputrace`, and of packages that build on it."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gputrace import options as own_options
from virtualgpu import machines
from virtualgpu.commands import (
    REFUSED,
    add_machine,
    checked_gpus,
    checked_host,
    run_command,
    use_machine,
)
from virtualgpu.options import GPUS, CommandParser, Option
from virtualgpu.script import check_script, run_script

if TYPE_CHECKING:
    from gputrace.fit.processes import Start

TRACE = (
    "Run a PyTorch script and write an HTML page about the memory and time of its GPUs, "
    "also if the script fails."
)
FIT = (
    "Say whether a training script fits on GPUs of several models, what takes the memory, "
    "and what would help."
)
RANKS_NEEDED = (
    "fit does not start ranks as torchrun does. If the script expects torchrun, use "
    "`labkit torchrun --simulate 8 SCRIPT`. It runs one rank of 8 and says how much memory the "
    "rank needs."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status.

    By default, the arguments are those of the process.
    """
    return run_command(parser(), arguments)


def parser() -> CommandParser:
    """Return the parser of `python -m gputrace`."""
    made = CommandParser(prog="python -m gputrace", description="Record the GPUs of a script.")
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    add_trace(commands.add_parser("trace", help=TRACE, description=TRACE), "gputrace trace")
    add_fit(commands.add_parser("fit", help=FIT, description=FIT), "gputrace fit")
    return made


def add_trace(
    parser: CommandParser,
    name: str,
    *further: Option,
    prefers_virtual: Callable[[], bool] = lambda: False,
) -> None:
    """Add the options of `trace` to a parser, and the function that runs the command.

    Args:
        name: the command, with which its messages begin.
        further: more options.
        prefers_virtual: returns whether the script runs on virtual GPUs even if no option asks
            for them.
    """
    parser.epilog = (
        "Any of --gpus, --like, --memory, --no-values and --host asks for virtual GPUs. Without "
        "them, the script runs on the real GPUs, if there are any, and CUDA is initialized before "
        "its first line. The recording is about this process, from the script's first line to its "
        "last. It does not include processes that the script starts. There is no page if the "
        "process is killed or ends with os._exit."
    )
    add_machine(parser)
    parser.add(*own_options.FILES, own_options.SAVE, own_options.COMPARE)
    parser.add(own_options.MAX_EVENTS_OPTION, own_options.NO_TIMELINE, *further)
    parser.add_script(is_optional=True)
    parser.examples = {
        "train.py --epochs 2": "Write the page train-memory.html about the script.",
        "--like H200 --no-values train.py": "Record the script on a virtual H200, in little time.",
        "--chrome trace.json --snapshot memory.pickle train.py": "Also write the files that "
        "Perfetto and PyTorch's memory viewer read.",
        "--save before.trace train.py": "Also keep the trace, to compare it with a later one.",
        "--compare before.trace after.trace": "Say what changed between two traces.",
    }
    parser.set_defaults(command=lambda options: _trace(options, name, prefers_virtual))


def checked_files(options: argparse.Namespace) -> dict[str, Path]:
    """Return the path of each file that `trace` will write, by its option.

    Raises:
        ValueError: a file cannot be written, or an argument is invalid.
    """
    from gputrace import report

    if options.script is None:
        raise ValueError("name the script to run, or two traces with --compare BEFORE AFTER")
    check_script(options.script, options.module)
    own_options.check_max_events(options.max_events)
    if options.chrome is not None and options.no_timeline:
        raise ValueError(
            "--chrome and --no-timeline exclude each other, because a Chrome trace is a timeline. "
            "Leave out one of them"
        )
    script = f"{options.script}.py" if options.module else options.script
    wanted = {
        "--output": options.output or report.default_path(script),
        "--chrome": options.chrome,
        "--snapshot": options.snapshot,
        "--save": options.save,
    }
    files = {}
    for option, path in wanted.items():
        if path is not None:
            files[option] = report.checked(path, option)
    return files


def command_line(options: argparse.Namespace, *before: str) -> str:
    """Return the command line of the script: the words `before`, the script and its arguments."""
    module = ["-m"] if options.module else []
    return shlex.join([*before, *module, options.script, *options.arguments])


def _trace(options: argparse.Namespace, name: str, prefers_virtual: Callable[[], bool]) -> int:
    """Run the command `trace`, and return its exit status.

    Messages begin with `name`. `prefers_virtual` returns whether the script runs on virtual GPUs
    even if no option asks for them.
    """
    from gputrace import report

    if options.compare is not None:
        return _compare(options, name)
    try:
        files = checked_files(options)
        _set_up(options, name, prefers_virtual)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    from virtualgpu.rank_variables import advising_torchrun

    def run() -> None:
        with advising_torchrun("`labkit trace --ranks 2 SCRIPT`"):
            run_script(options.script, options.arguments, options.module)

    written = report.run_and_report(
        run,
        command_line(options),
        files,
        options.max_events,
        not options.no_timeline,
        name,
    )
    return 0 if written else 1


def _compare(options: argparse.Namespace, name: str) -> int:
    """Compare the two traces that `--compare` names, and write a page about the changes.

    Print the main change, and return the exit status. Messages begin with `name`.
    """
    from gputrace import report
    from gputrace.trace import Trace

    try:
        others = _given_beside_compare(options)
        if others:
            raise ValueError(f"--compare runs no script: leave out {', '.join(others)}")
        target = report.checked(options.output or "comparison.html")
        before, after = map(Trace.load, options.compare)
    except OSError as error:
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    comparison = before.compare(after)
    print(comparison.finding)
    names = tuple(Path(path).name for path in options.compare)
    page = comparison.page((names[0], names[1]))
    written = report.write(lambda path: path.write_text(page, encoding="utf-8"), target, name)
    return 0 if written else 1


def _given_beside_compare(options: argparse.Namespace) -> list[str]:
    """Return the given arguments that have no effect together with `--compare`."""
    given = {
        "--gpus": options.gpus,
        "--like": options.like,
        "--memory": options.memory,
        "--no-values": not options.values,
        "--host": options.host != "1",
        "--chrome": options.chrome,
        "--snapshot": options.snapshot,
        "--save": options.save,
        "--max-events": options.max_events != own_options.MAX_EVENTS,
        "--no-timeline": options.no_timeline,
        "--ranks": getattr(options, "ranks", None),  # an option of labkit's command
        options.script: options.script,
    }
    return [name for name, value in given.items() if value]


def _set_up(options: argparse.Namespace, name: str, prefers_virtual: Callable[[], bool]) -> None:
    """Install virtual GPUs if the options ask for them or there is no real GPU.

    Print which GPUs are used, after `name`. `prefers_virtual` returns whether to use virtual GPUs
    even if no option asks for them.
    """
    import torch

    wishes = (options.gpus, options.like, options.memory)
    asked = any(wish is not None for wish in wishes) or not options.values or options.host != "1"
    virtual = asked or prefers_virtual()
    if not virtual and torch.cuda.is_available():
        model = torch.cuda.get_device_name(0)
        memory = torch.cuda.get_device_properties(0).total_memory
        where = machines.described(1, model, memory, virtual=False)
        print(f"{name}: {where}. Times are measured.", file=sys.stderr)
        return
    note = "Times on the page are modelled. The script itself runs at this computer's speed."
    use_machine(options, name, note)


def add_fit(parser: CommandParser, name: str, start: "Start | None" = None) -> None:
    """Add the options of `fit` to a parser, and the function that runs the command.

    Args:
        name: the command, with which its messages begin.
        start: starts the processes in which the script runs. By default, each is a new Python.
    """
    parser.epilog = (
        "The script runs unmodified for a few steps of its optimizer, on virtual GPUs of each "
        "model. No values are computed: the numbers that the script reads are made up, and it "
        "learns nothing. Processes that it starts with multiprocessing run too. torch.save to a "
        "path writes no file. The script writes all its other files, so make sure that it "
        "overwrites nothing that you want to keep."
    )
    parser.add(GPUS, help="number of virtual GPUs that the script has (default: 1)")
    parser.add(*own_options.FIT)
    parser.add_script()
    parser.examples = {
        "train.py --batch-size 64": "Try one GPU of each common model.",
        "--like T4,A100 --gpus 2 train.py": "Try two T4s, then two A100s.",
        "--host here train.py": "Take the speed of this computer's CPU for the host.",
    }
    parser.set_defaults(command=lambda options: _fit(options, name, start))


def _fit(options: argparse.Namespace, name: str, start: "Start | None") -> int:
    """Run the command `fit`, and return its exit status.

    Messages begin with `name`. `start` starts the processes in which the script runs.
    """
    try:
        return _answer(options, name, start)
    except KeyboardInterrupt:  # also while torch is imported
        print(f"{name}: interrupted.", file=sys.stderr)
        return 130  # the exit status that shells use for an interrupt


def _answer(options: argparse.Namespace, name: str, start: "Start | None") -> int:
    """Print the answer of `fit`, and return the exit status.

    Messages begin with `name`. `start` starts the processes in which the script runs.
    """
    from gputrace.fit import ScriptFailedError, Wish, answer
    from gputrace.fit.processes import afresh
    from virtualgpu.rank_variables import names_rank_variable

    def tell(said: Exception | str) -> None:
        """Print a message, or an error with its notes, to standard error."""
        notes = getattr(said, "__notes__", [])
        print("\n".join([f"{name}: {said}", *notes]), file=sys.stderr)

    try:
        check_script(options.script, options.module)
        models = [model.strip() for model in options.like.split(",")]
        wish = Wish(
            options.script,
            options.arguments,
            options.module,
            models[0],
            options.steps,
            checked_host(options.host),
            gpus=checked_gpus(options),
        )
        for table in answer(wish, models, tell, start or afresh):
            print(table, end="\n\n", flush=True)
    except ValueError as error:
        tell(error)
        return REFUSED
    except ScriptFailedError as error:
        if names_rank_variable(str(error)):
            error.add_note(RANKS_NEEDED)
        tell(error)
        return 1
    return 0
