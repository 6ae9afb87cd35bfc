"""`%%gpu_memory` and `%%gpu_timeline`: run a notebook's cell and show what it did on the GPUs."""

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

_AWAITS = "cannot run a cell that awaits at its top level: put `with record() as trace:` around that code instead"


class _HelpShown(Exception):  # noqa: N818
    """The line asked for the help, which is printed."""


class MagicParser(CommandParser):
    """Parser of a cell magic's line. `--help` prints the help; a mistake is a UsageError."""

    def read(self, line: str, cell: str | None) -> Namespace | None:
        """Parse the line. Returns None if the line asked for help.

        Raises UsageError for a mistake, and for a magic without a cell.
        """
        try:
            options = self.parse_args(shlex.split(line))
        except _HelpShown:
            return None
        except ValueError as error:
            self.error(f"{error}")
        if cell is None:
            self.error(f"write two percent signs, {self.prog}, above the lines that it runs")
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown


def unreadable(magic: str, error: SyntaxError) -> UsageError:
    """Return an error that shows the mistake in the cell, without the calls of the magic."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    return UsageError(f"{magic}: the cell cannot be read\n{text}")


def documented(parser: CommandParser) -> Callable[[Callable], Callable]:
    """Decorate a magic: its docstring is the parser's help."""

    def add(magic: Callable) -> Callable:
        magic.__doc__ = parser.format_help()
        return magic

    return add


_NAME = option("name", nargs="?", help="a variable for the trace")
_MEMORY = MagicParser(
    prog="%%gpu_memory",
    description="Run the cell, then show the memory of its GPUs over time and the allocations of "
    "each line. If memory ran out, the reason is shown too.",
)
_MEMORY.add(_NAME, MAX_EVENTS_OPTION)
_TIMELINE = MagicParser(
    prog="%%gpu_timeline",
    description="Run the cell, then show what ran when on the host, the streams and the copy "
    "engines. If memory ran out, the reason is shown too.",
)
_TIMELINE.add(_NAME, MAX_EVENTS_OPTION)
_TIMELINE.add_argument(
    "--memory",
    action="store_true",
    help="also draw the memory of a GPU, above the timeline and on the same axis of time",
)


@magics_class
class GpuMagics(Magics):
    """The cell magics."""

    shell: Any  # IPython's

    @no_var_expand
    @line_cell_magic
    @documented(_MEMORY)
    def gpu_memory(self, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = "__ipython_bottom__"  # as IPython's own run_code: a traceback begins at the cell's line
        options = _MEMORY.read(line, cell)
        if options is None:
            return None
        return self._run(_MEMORY.prog, options, cell or "", show, timeline=False)

    @no_var_expand
    @line_cell_magic
    @documented(_TIMELINE)
    def gpu_timeline(self, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        options = _TIMELINE.read(line, cell)
        if options is None:
            return None
        shown = partial(show_timeline, memory=options.memory)
        return self._run(_TIMELINE.prog, options, cell or "", shown, timeline=True)

    def _run(self, magic: str, options: Namespace, cell: str, shown: Callable[[Trace], None], timeline: bool) -> Any:
        """Run a cell under a recording and show it, also when an error ends the cell; gives the value of its last expression."""
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
        trace = None
        try:
            with record(options.max_events, timeline=timeline) as trace:
                exec(body, self.shell.user_global_ns, self.shell.user_ns)
                value = eval(last, self.shell.user_global_ns, self.shell.user_ns) if last is not None else None
        finally:
            if trace is not None:
                if name is not None:
                    self.shell.user_ns[name] = trace
                shown(trace)
        return None if _ends_in_semicolon(cell) else value  # IPython displays it

    def _compiled(self, magic: str, cell: str) -> tuple[Any, Any]:
        """The cell's code, and that of its last expression, None if it ends in a statement."""
        __tracebackhide__ = "__ipython_bottom__"
        shell = self.shell
        running = shell.displayhook.exec_result
        number = shell.execution_count if running is None else running.execution_count
        source = "\n" + shell.transform_cell(cell)  # the magic's own line is the first that the reader counts
        filename = shell.compile.cache(source, number, raw_code=source)
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename=filename))
        whole = compile(tree, filename, "exec", shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if whole.co_flags & inspect.CO_COROUTINE:
            raise UsageError(f"{magic} {_AWAITS}")
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        return shell.compile(tree, filename, "exec"), last and shell.compile(last, filename, "eval")


def show(trace: Trace) -> None:
    """Display a trace in a notebook: for each device that held memory, the plot and the lines; then why the memory ran out, if it did."""
    peaks = trace.peaks
    for device in [device for device in trace.devices if peaks[device]] or [trace.device]:
        display(trace.plot_memory(device))
        display(trace.lines(device))
    if trace.oom is not None:
        display(trace.oom)


def show_timeline(trace: Trace, memory: bool = False) -> None:
    """Display in a notebook what ran when, or why that is not known; then why the memory ran out, if it did."""
    if trace.no_timeline:
        print(f"There is no timeline to show: {trace.no_timeline}.")
    else:
        display(trace.plot_timeline(memory=memory))
    if trace.oom is not None:
        display(trace.oom)


def _variable(name: str | None) -> str | None:
    """The variable that the trace goes to."""
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"{name!r} is no name of a variable: give one such as trace")
    return name


def _ends_in_semicolon(cell: str) -> bool:
    """A semicolon at the end of a cell keeps its value from being shown."""
    ignored = {token.ENDMARKER, token.NL, token.NEWLINE, token.COMMENT, token.DEDENT, token.INDENT}
    try:
        code = [t for t in tokenize.generate_tokens(io.StringIO(cell).readline) if t.type not in ignored]
    except (tokenize.TokenError, SyntaxError):  # IPython's own syntax
        return False
    return bool(code) and code[-1].string == ";"
