"""Sphinx extension that writes the command-line reference from the commands' own parsers.

In a page, the comment `<!-- options of NAME -->` stands for the commands of one program. `PROGRAMS`
has the names.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any

import pytest_virtual_gpus
from gputrace import commands as gputrace_commands
from gputrace import magics
from labkit import cli, ipython
from virtualgpu import commands as virtualgpu_commands


class PytestOptions(argparse.ArgumentParser):
    """Parser that a pytest plugin can add its options to."""

    def getgroup(self, name: str) -> Any:
        """Return a group of options, with the method that pytest's groups have."""
        group: Any = self.add_argument_group(name)
        group.addoption = group.add_argument
        return group


def pytest_options() -> PytestOptions:
    """Return a parser with the options that the kit adds to pytest."""
    parser = PytestOptions(
        prog="pytest", description="Run a test suite on virtual GPUs.", add_help=False
    )
    pytest_virtual_gpus.pytest_addoption(parser)  # type: ignore[arg-type]
    return parser


PROGRAMS: dict[str, list[argparse.ArgumentParser]] = {
    "labkit": [cli._parser()],
    "magics": [magics.GPU_MEMORY, magics.GPU_TIMELINE, ipython.TORCHRUN],
    "pytest": [pytest_options()],
    "gputrace": [gputrace_commands.parser()],
    "virtualgpu": [virtualgpu_commands.parser()],
}


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands that do something, in the order of the help."""
    choices = [action.choices for action in parser._actions if action.nargs == argparse.PARSER]
    if not choices:
        yield parser
    for each in choices:
        for below in dict(each or {}).values():
            yield from commands(below)


def section(parser: argparse.ArgumentParser) -> str:
    """Return the section about one command, in Markdown."""
    name = parser.prog.replace("python -m labkit", "labkit")
    parts = [f"### `{name}`", parser.description or ""]
    examples = getattr(parser, "examples", {})
    if examples:
        lines = [f"# {what}\n{name} {given}".rstrip() for given, what in examples.items()]
        parts.append("```text\n" + "\n\n".join(lines) + "\n```")
    if parser.epilog:
        parts.append(parser.epilog)
    parts.append(f"```{{program}} {name}\n```")
    for action in parser._actions:
        if action.dest != "help":
            parts.append(option(action, parser))
    return "\n\n".join(parts)


def option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return the description of one option or argument, in Markdown."""
    value = action.metavar or action.dest
    signatures = [value]
    if action.option_strings:
        signatures = list(action.option_strings)
    if action.option_strings and action.nargs != 0:
        signatures = [f"{each} {value}" for each in action.option_strings]
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"```{{option}} {', '.join(map(str, signatures))}\n{text[:1].upper()}{text[1:]}.\n```"


def write(app: Any, docname: str, source: list[str]) -> None:
    """Replace the comments in a page with the sections about the programs."""

    def sections(found: re.Match[str]) -> str:
        parsers = [each for parser in PROGRAMS[found[1]] for each in commands(parser)]
        return "\n\n".join(map(section, parsers))

    source[0] = re.sub(r"<!-- options of (\w+) -->", sections, source[0])


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", write)
    return {"parallel_read_safe": True}
