"""The commands `trace` and `fit`, of `python -m gputrace` and of packages that build on it."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gputrace import options as own_options
from virtualgpu import machines
from virtualgpu.commands import REFUSED, add_machine, checked_gpus, checked_host, run_command, use_machine
from virtualgpu.options import GPUS, CommandParser, Option
from virtualgpu.script import check_script, run_script

if TYPE_CHECKING:
    from gputrace.fit.processes import Start

TRACE = "Run a PyTorch script and write an HTML page about the memory and time of its GPUs, also when it fails."
FIT = "Say whether a training script fits GPUs of several models, what takes the memory, and what would help."
RANKS_NEEDED = (
    "fit does not start ranks as torchrun does. If the script expects torchrun, use "
    "`labkit torchrun --simulate 8 SCRIPT`. It runs one rank of 8 and says what memory the rank needs."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = CommandParser(prog="python -m gputrace", description="Record the GPUs of a script.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_trace(commands.add_parser("trace", help=TRACE, description=TRACE), "gputrace trace")
    add_fit(commands.add_parser("fit", help=FIT, description=FIT), "gputrace fit")
    return run_command(parser, arguments)


def add_trace(
    parser: CommandParser,
    name: str,
    *further: Option,
    prefers_virtual: Callable[[], bool] = lambda: False,
) -> None:
    """Add the options of `trace`, and `further` ones, and what the command does.

    Its messages begin with `name`. `prefers_virtual` says whether the script runs on virtual GPUs
    even if no option asks for them.
    """
    parser.epilog = (
        "Any of --gpus, --like, --memory, --no-values and --host asks for virtual GPUs. Without them the "
        "script runs on the real GPUs, if there are any, and CUDA is up before its first line. "
        "Recorded is this process, from the script's first line to its last: not the processes "
        "that it starts, and not one that is killed or leaves by os._exit."
    )
    add_machine(parser)
    parser.add(*own_options.FILES, own_options.MAX_EVENTS_OPTION, own_options.NO_TIMELINE, *further)
    parser.add_script()
    parser.set_defaults(command=lambda options: _trace(options, name, prefers_virtual))


def checked_files(options: argparse.Namespace) -> dict[str, Path]:
    """Return the files that `trace` is to write, by their options.

    Raises ValueError for one that cannot be written, and for an argument that does not fit.
    """
    from gputrace import report

    check_script(options.script, options.module)
    own_options.check_max_events(options.max_events)
    if options.chrome is not None and options.no_timeline:
        raise ValueError("--chrome and --no-timeline: a Chrome trace is what ran when")
    script = f"{options.script}.py" if options.module else options.script
    wanted = {
        "--output": options.output or report.default_path(script),
        "--chrome": options.chrome,
        "--snapshot": options.snapshot,
    }
    return {option: report.checked(path, option) for option, path in wanted.items() if path is not None}


def command_line(options: argparse.Namespace, *before: str) -> str:
    """Return the script and its arguments, as on a command line."""
    module = ["-m"] if options.module else []
    return shlex.join([*before, *module, options.script, *options.arguments])


def _trace(options: argparse.Namespace, name: str, prefers_virtual: Callable[[], bool]) -> int:
    from gputrace import report

    try:
        files = checked_files(options)
        _set_up(options, name, prefers_virtual)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    written = report.run_and_report(
        lambda: run_script(options.script, options.arguments, options.module),
        command_line(options),
        files,
        options.max_events,
        not options.no_timeline,
        name,
    )
    return 0 if written else 1


def _set_up(options: argparse.Namespace, name: str, prefers_virtual: Callable[[], bool]) -> None:
    """Put virtual GPUs in place if they are asked for, or if there are no real ones. Say so."""
    import torch

    wishes = (options.gpus, options.like, options.memory)
    asked = any(wish is not None for wish in wishes) or not options.values or options.host != "1"
    virtual = asked or prefers_virtual()
    if not virtual and torch.cuda.is_available():
        model, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        where = machines.described(1, model, memory, virtual=False)
        print(f"{name}: {where}. Times are measured.", file=sys.stderr)
        return
    use_machine(options, name, "The page's times are the model's, the script's own this computer's.")


def add_fit(parser: CommandParser, name: str, start: "Start | None" = None) -> None:
    """Add the options of `fit`, and what it does. Its messages begin with `name`.

    `start` starts the processes in which the script runs. None starts a Python for each.
    """
    parser.epilog = (
        "The script runs unmodified for a few steps of its optimizer on virtual GPUs of each model, "
        "without values: the numbers that it reads are made up, and nothing is learned. Processes that "
        "it starts by multiprocessing run too. torch.save to a path writes no file. Everything "
        "else that the script writes is written, so make sure that it overwrites nothing you want to keep."
    )
    parser.add(GPUS, help="number of virtual GPUs that the script has (default: 1)")
    parser.add(*own_options.FIT)
    parser.add_script()
    parser.set_defaults(command=lambda options: _fit(options, name, start))


def _fit(options: argparse.Namespace, name: str, start: "Start | None") -> int:
    from gputrace.fit import ScriptFailedError, Wish, answer
    from gputrace.fit.processes import afresh
    from virtualgpu.simulated_world import names_rank_variable

    def tell(said: Exception | str) -> None:
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
    except KeyboardInterrupt:
        tell("interrupted.")
        return 130  # as a shell reports it
    return 0
