"""Cell magics `%%gpu_memory` and `%%gpu_timeline`, which run a cell and show what its GPUs did."""

import ast
import inspect
import io
import keyword
import shlex
import token
import tokenize
import traceback
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from gputrace.options import MAX_EVENTS_OPTION, check_max_events
from gputrace.recording import record
from gputrace.trace import Trace
from virtualgpu.options import CommandParser, option

_AWAITS = (
    "cannot run a cell that uses `await` outside a function. "
    "Put `with record() as trace:` around that code instead"
)


class _HelpShown(Exception):  # noqa: N818
    """Raised when a magic's line asks for the help, after the help was printed."""


class MagicParser(CommandParser):
    """Parser of a cell magic's line. It prints the help for `--help`."""

    def read(self, line: str, cell: str | None) -> Namespace | None:
        """Parse the line of a magic.

        Return None if the line asks for the help. Raise UsageError if the line has a mistake, or
        if the magic is used without a cell.
        """
        try:
            options = self.parse_args(shlex.split(line))
        except _HelpShown:
            return None
        except ValueError as error:
            self.error(f"{error}")
        if cell is None:
            self.error(
                f"expected a cell. Write {self.prog}, with two percent signs, above its lines"
            )
        return options

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which IPython shows without a traceback."""
        raise UsageError(f"{self.prog}: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise `_HelpShown` instead of ending the process, because the help was printed."""
        raise _HelpShown


def unreadable(magic: str, error: SyntaxError) -> UsageError:
    """Return an error that shows a syntax error in a cell without the traceback of the magic."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    return UsageError(f"{magic}: the cell cannot be read\n{text}")


def documented(parser: CommandParser) -> Callable[[Callable], Callable]:
    """Return a decorator that makes the parser's help the docstring of a magic."""

    def add(magic: Callable) -> Callable:
        magic.__doc__ = parser.format_help()
        return magic

    return add


_NAME = option("name", nargs="?", help="a variable for the trace")
GPU_MEMORY = MagicParser(
    prog="%%gpu_memory",
    description="Run the cell, then show the memory of its GPUs over time and the allocations of "
    "each line. If memory ran out, the reason is shown too.",
)
GPU_MEMORY.add(_NAME, MAX_EVENTS_OPTION)
GPU_MEMORY.examples = {"": "Show the cell's memory.", "trace": "Also keep the trace, as `trace`."}
GPU_TIMELINE = MagicParser(
    prog="%%gpu_timeline",
    description="Run the cell, then show what ran when on the host, the streams and the copy "
    "engines. If memory ran out, the reason is shown too.",
)
GPU_TIMELINE.add(_NAME, MAX_EVENTS_OPTION)
GPU_TIMELINE.add_argument(
    "--memory",
    action="store_true",
    help="also draw the memory of a GPU, above the timeline and on the same axis of time",
)
GPU_TIMELINE.examples = {
    "--memory": "Show what ran when, and the memory above it.",
    "trace": "Also keep the trace, as `trace`.",
}


@magics_class
class GpuMagics(Magics):
    """The cell magics.

    `__tracebackhide__` hides a magic's own calls, so that a traceback begins at the cell's line.
    """

    shell: Any  # IPython's interactive shell

    @no_var_expand
    @line_cell_magic
    @documented(GPU_MEMORY)
    def gpu_memory(self, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        options = GPU_MEMORY.read(line, cell)
        if options is None:
            return None
        return self._run(GPU_MEMORY.prog, options, cell or "", show, timeline=False)

    @no_var_expand
    @line_cell_magic
    @documented(GPU_TIMELINE)
    def gpu_timeline(self, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        options = GPU_TIMELINE.read(line, cell)
        if options is None:
            return None
        shown = partial(show_timeline, memory=options.memory)
        return self._run(GPU_TIMELINE.prog, options, cell or "", shown, timeline=True)

    def _run(
        self,
        magic: str,
        options: Namespace,
        cell: str,
        shown: Callable[[Trace], None],
        timeline: bool,
    ) -> Any:
        """Record a cell, show the recording, and return the value of the cell's last expression.

        Args:
            magic: the name of the magic.
            shown: displays the recording, also if an error ends the cell.
            timeline: whether to record kernels and copies.
        """
        __tracebackhide__ = "__ipython_bottom__"
        name = _variable(options.name)
        try:
            check_max_events(options.max_events)
        except ValueError as error:
            raise UsageError(str(error)) from None
        try:
            body, last = self._compiled(magic, cell)
        except SyntaxError as error:
            raise unreadable(magic, error) from None
        trace = value = None
        try:
            with record(options.max_events, timeline=timeline) as trace:
                exec(body, self.shell.user_global_ns, self.shell.user_ns)
                if last is not None:
                    value = eval(last, self.shell.user_global_ns, self.shell.user_ns)
        finally:
            if trace is not None:
                if name is not None:
                    self.shell.user_ns[name] = trace
                shown(trace)
        if _ends_in_semicolon(cell):
            return None
        return value  # IPython displays it

    def _compiled(self, magic: str, cell: str) -> tuple[Any, Any]:
        """Compile a cell. Return its code, and the code of its last expression or None."""
        __tracebackhide__ = "__ipython_bottom__"
        shell = self.shell
        running = shell.displayhook.exec_result
        number = shell.execution_count if running is None else running.execution_count
        source = "\n" + shell.transform_cell(cell)  # line 1 is the line of the magic
        filename = shell.compile.cache(source, number, raw_code=source)
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename=filename))
        flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        whole = compile(tree, filename, "exec", flags, dont_inherit=True)
        if whole.co_flags & inspect.CO_COROUTINE:
            raise UsageError(f"{magic} {_AWAITS}")
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            expression = ast.Expression(tree.body.pop().value)
            last = shell.compile(expression, filename, "eval")
        return shell.compile(tree, filename, "exec"), last


def show(trace: Trace) -> None:
    """Display the memory in a trace: for each device that was used, the figure and the lines.

    If memory ran out, also display why.
    """
    peaks = trace.peaks
    devices = [device for device in trace.devices if peaks[device]]
    for device in devices or [trace.device]:
        display(trace.plot_memory(device))
        display(trace.lines(device))
    if trace.oom is not None:
        display(trace.oom)


def show_timeline(trace: Trace, memory: bool = False) -> None:
    """Display what ran when, or why this is not known. If memory ran out, also display why."""
    if trace.no_timeline:
        print(f"There is no timeline to show: {trace.no_timeline}.")
    else:
        display(trace.plot_timeline(memory=memory))
    if trace.oom is not None:
        display(trace.oom)


def _variable(name: str | None) -> str | None:
    """Return the name of the variable for the trace. Raise an error if it is not a valid name."""
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"expected the name of a variable, such as trace, got {name!r}")
    return name


def _ends_in_semicolon(cell: str) -> bool:
    """Return whether a cell ends in a semicolon, which hides the value of its last expression."""
    ignored = {
        token.ENDMARKER,
        token.NL,
        token.NEWLINE,
        token.COMMENT,
        token.DEDENT,
        token.INDENT,
    }
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(cell).readline))
    except (tokenize.TokenError, SyntaxError):  # the cell has syntax of IPython's own
        return False
    code = [each.string for each in tokens if each.type not in ignored]
    return bool(code) and code[-1] == ";"
