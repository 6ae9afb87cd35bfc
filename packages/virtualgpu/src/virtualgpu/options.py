"""Options of commands that run a script on virtual GPUs, and their parser.

The parser reads only what precedes the script's name. Everything after the name belongs to the
script. Packages that build on this one declare their own options in the same way.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from virtualgpu import profiles

ALIKE = 0.75  # how much a mistyped option is like the one that was meant, from 0 to 1


class Option(NamedTuple):
    """Declaration of an option: its names and the keyword arguments of `add_argument`."""

    names: tuple[str, ...]
    settings: dict[str, Any]

    def changed(self, **changes: Any) -> "Option":
        """Return a copy of this option with other keyword arguments of `add_argument`."""
        return Option(self.names, {**self.settings, **changes})


def option(*names: str, **settings: Any) -> Option:
    """Declare an option with these names. `settings` are keyword arguments of `add_argument`."""
    return Option(names, settings)


LIKE = option(
    "--like",
    metavar="MODEL",
    help=f"GPU model of the virtual GPUs, one of {', '.join(profiles.names())}",
)
GPUS = option("--gpus", type=int, metavar="N", help="number of virtual GPUs (default: 1)")
MEMORY = option(
    "--memory",
    metavar="SIZE",
    help="memory of each virtual GPU, such as 16GiB (default: the model's)",
)
NO_VALUES = option(
    "--no-values",
    dest="values",
    action="store_false",
    help="keep the shapes, memory, order and time of virtual GPUs, but compute no values",
)
HOST = option(
    "--host",
    default="1",
    metavar="X",
    help="time that the CPU takes for an operator, relative to the recorded H200s' host, such as "
    "0.5; 'here' measures this computer (default: 1)",
)
VIRTUAL_TIME = option(
    "--virtual-time",
    action="store_true",
    help="let Python's `time` show the model's time, which is the same on every computer",
)
MODULE = option(
    "-m",
    "--module",
    action="store_true",
    help="SCRIPT is the name of a module or package, as after python -m",
)


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's options. It does not accept abbreviations.

    After `add_script` it reads only the options that precede the script's name. A `--` in front of
    the name ends the options, as it does for `python` and `torchrun`.

    `examples` maps the arguments of a command to a sentence that says what the command then does.
    The help ends with them.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._runs_script = False
        self.examples: dict[str, str] = {}
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def add(self, *options: Option, **changes: Any) -> None:
        """Add declared options to the parser.

        `changes` replace keyword arguments of all of them.
        """
        for each in options:
            names, settings = each.changed(**changes)
            self.add_argument(*names, **settings)

    def format_help(self) -> str:
        """Return the help, with the examples at the end."""
        help_text = super().format_help()
        if self.examples:
            help_text += "\nexamples:\n"
        for arguments, meaning in self.examples.items():
            help_text += f"  {self.prog} {arguments}".rstrip() + f"\n      {meaning}\n"
        return help_text

    def add_script(self, is_optional: bool = False) -> None:
        """Let the command take a script or a module, and the script's own arguments.

        With `is_optional`, the command also runs without a script.
        """
        self.add(MODULE)
        nargs = "?" if is_optional else None
        self.add_argument("script", nargs=nargs, help="the Python script")
        own = self.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
        )
        own.required = False  # otherwise argparse would name them if the script is missing
        self._runs_script = True

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command's own options, without those of the script.

        An unknown option is an error of this command, whose usage is shown.
        """
        given = sys.argv[1:] if args is None else list(args)
        if self._runs_script:
            found, unknown = self._parse_before_script(given, namespace)
        else:
            found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def _parse_before_script(
        self, given: list[str], namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options that precede the script's name in the arguments `given`."""
        end = self._end_of_options(given)
        options, rest = given[:end], given[end:]
        if rest[:1] == ["--"]:
            rest = rest[1:]
        script = []
        if rest:
            script = ["--", rest[0]]
        found, unknown = super().parse_known_args([*options, *script], namespace)
        found.arguments = rest[1:]
        return found, unknown

    def _meant(self, unknown: list[str]) -> str:
        """Return a question that proposes known options in place of the unknown ones, or ""."""
        alike = []
        for argument in unknown:
            name = argument.partition("=")[0]
            if name.startswith("--"):
                alike += difflib.get_close_matches(name, self._option_string_actions, 1, ALIKE)
        return f". Did you mean {' '.join(alike)}?" if alike else ""

    def _end_of_options(self, given: list[str]) -> int:
        """Return the index of the script's name in the arguments `given`.

        It is the first argument that is no option and no option's value.
        """
        index = 0
        while index < len(given):
            argument = given[index]
            if argument in ("-", "--") or not argument.startswith("-"):
                break
            declared = self._option_string_actions.get(argument)
            index += 1
            if declared is not None and declared.nargs is None:
                index += 1
            elif declared is not None and isinstance(declared.nargs, int):
                index += declared.nargs
        return index
