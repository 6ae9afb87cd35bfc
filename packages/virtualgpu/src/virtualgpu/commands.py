"""The command `run` of `python -m virtualgpu` and of the packages that build on it."""

import argparse
import json
import os
import sys
from math import inf
from time import monotonic, process_time
from typing import TYPE_CHECKING

from virtualgpu import front_end, machines
from virtualgpu.in_children import sitecustomize
from virtualgpu.options import GPUS, HOST, LIKE, MEMORY, NO_VALUES, VIRTUAL_TIME, CommandParser
from virtualgpu.script import check_script, run_script

if TYPE_CHECKING:
    from virtualgpu.machines import VirtualGPUs

RUN = (
    "Run an unmodified PyTorch script on virtual GPUs, as `python SCRIPT ARGUMENTS` would run it "
    "on real ones."
)
LONG = 60  # seconds of CPU time after which the run suggests --no-values
REFUSED = 2  # the exit status that argparse uses for a refused argument


def main(arguments: list[str] | None = None) -> int:
    """Run the command `python -m virtualgpu` with these arguments, and return its exit status."""
    return run_command(parser(), arguments)


def parser() -> CommandParser:
    """Return the parser of `python -m virtualgpu`."""
    about = "torch.cuda on a computer without a GPU."
    made = CommandParser(prog="python -m virtualgpu", description=about)
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    add_run(commands.add_parser("run", help=RUN, description=RUN), "virtualgpu run")
    return made


def run_command(parser: CommandParser, arguments: list[str] | None) -> int:
    """Run the command that the arguments name, and return its exit status.

    Without a command, print the help.
    """
    options = parser.parse_args(arguments)
    if "command" in options:
        return options.command(options)
    parser.print_help()
    return 0


def add_run(parser: CommandParser, name: str) -> None:
    """Add the options and the action of the command `run` to a parser.

    The command's messages begin with `name`.
    """
    parser.add(VIRTUAL_TIME)
    add_machine(parser)
    parser.add_script()
    parser.examples = {
        "train.py --epochs 2": "Run the script on one virtual T4, with an argument of its own.",
        "--gpus 4 --like H200 train.py": "Run it on four virtual H200s.",
        "--memory 16GiB --no-values train.py": "See whether 16 GiB are enough, in little time.",
        "-m package.train": "Run a module, as `python -m` does.",
    }
    parser.set_defaults(command=lambda options: _run(options, name))


def add_machine(parser: CommandParser) -> None:
    """Add the command-line options that choose the virtual GPUs of one process."""
    parser.add(GPUS)
    parser.add(LIKE, help=f"{LIKE.settings['help']} (default: {machines.DEFAULT_MODEL})")
    parser.add(MEMORY, NO_VALUES, HOST)


def checked_gpus(options: argparse.Namespace) -> int:
    """Return the number of GPUs that the command-line options ask for.

    Raises ValueError if no machine has this number.
    """
    if options.gpus is None:
        return 1
    if not 1 <= options.gpus <= machines.MAXIMUM:
        raise ValueError(
            f"--gpus {options.gpus}: choose a whole number from 1 to {machines.MAXIMUM}"
        )
    return options.gpus


def checked_host(text: str) -> float:
    """Convert the value of `--host` to a number. For "here", measure this computer's speed.

    Raises ValueError for anything else.
    """
    if text == "here":
        from virtualgpu.host_speed import measure_host

        return round(measure_host(), 2)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--host {text}: give a number, such as 2, or 'here'") from None


def _run(options: argparse.Namespace, name: str) -> int:
    """Run the script that the options name, and return the exit status.

    Messages begin with `name`. The machine stays in use until the process ends, because threads and
    atexit functions of the script can run after its last line.
    """
    whose = "Times in the script are this computer's, not the model's."
    if options.virtual_time:
        whose = "Python's `time` shows the model's time."
    try:
        check_script(options.script, options.module)
        gpus = use_machine(options, name, whose)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    set_up_for_times(gpus, options.virtual_time)
    _hand_down(gpus)
    from virtualgpu.rank_variables import advising_torchrun

    with advising_torchrun("`labkit torchrun --ranks 2 --like T4 SCRIPT`"):
        run_script(options.script, options.arguments, options.module)
    return 0


def use_machine(options: argparse.Namespace, name: str, whose: str) -> "VirtualGPUs":
    """Put the virtual GPUs that the options of `add_machine` describe in use, and return them.

    Their description is printed. It begins with `name` and ends with the sentence `whose`, which
    says whose times the script shows. Raises the errors of `machines.use`.
    """
    gpus = machines.use(
        checked_gpus(options),
        options.like,
        options.memory,
        options.values,
        heeds_environment=True,
        host=checked_host(options.host),
    )
    tell_machine(gpus, name, whose)
    return gpus


def tell_machine(gpus: "VirtualGPUs", name: str, whose: str) -> None:
    """Describe a script's virtual GPUs on standard error.

    The line begins with `name` and ends with the sentence `whose`, which says whether the script's
    times are virtual. After a minute of CPU time, suggest --no-values once.
    """
    where = f"{gpus.description}."
    if gpus.request.host != 1:
        where += f" Their host takes {gpus.request.host:g} times as long as the recorded one."
    print(f"{name}: {where} {whose}", file=sys.stderr)
    if gpus.request.values:
        next_check = monotonic()  # the real clock, which `time` may not show later

        def tell_once(*event: object) -> None:
            nonlocal next_check
            now = monotonic()
            if now < next_check:
                return
            next_check = now + 1  # reading a process's time is slow if it has many threads
            if process_time() > LONG:
                next_check = inf
                print(
                    f"{name}: the run computes every value on the CPU, which is slow. With "
                    "--no-values it keeps only memory and times.",
                    file=sys.stderr,
                )

        for gpu in gpus.machine.gpus:
            gpu.allocator.listen(tell_once)


def _hand_down(gpus: "VirtualGPUs") -> None:
    """Give Python programs that the script starts the same virtual GPUs.

    The environment variables of this process tell them.
    """
    names = ("gpus", "like", "memory", "values", "host")
    request = {name: getattr(gpus.request, name) for name in names}
    request |= {"front": front_end.name(), "places": front_end.import_folders()}
    os.environ[sitecustomize.REQUEST] = json.dumps(request)
    folders = [str(sitecustomize.HERE.parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


def set_up_for_times(gpus: "VirtualGPUs", virtual_time: bool) -> None:
    """Prepare the machine for a script that measures times.

    With `virtual_time`, the module `time` shows the machine's clock.
    """
    from virtualgpu.host import time_module

    machine = gpus.machine
    machine.blanks_host = not gpus.request.values  # a script also times copies to the host
    if virtual_time:
        time_module.put_in_place(
            machine.clock, lambda seconds: machine.scheduler.sleep(seconds, machine.clock)
        )
