"""Run one submission inside the sandbox, in a copy of the fork server.

First the submission's cells run in an IPython shell. Then each of its answers is observed.

This code shares a process with the submission, and Python hides nothing within a process. So the
grader believes only what it judges itself. It asks one question at a time, with inputs that this
process has not seen, and accepts only plain data as the answer.
"""

import ast
import base64
import contextlib
import ctypes
import dis
import io
import linecache
import os
import pickle
import random
import resource
import signal
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy
import psutil
import torch
import torch.distributed
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

import labkit
from labcourse import server_of_children, system_calls
from labkit import checks, courses, labs, machine, puzzles
from labkit.checks import checking
from labkit.checks.checking import Verdict
from labkit.checks.limits import NO_EXIT
from labkit.processes import messages
from labkit.processes.time_limits import TimeLimit
from labkit.puzzles import definitions, outcome
from virtualgpu import machines

FIGURES, FIGURE_BYTES = 12, 400_000  # how many figures a submission may show, and bytes of each
DUMPABLE = 4  # the option of prctl that lets other processes read this one's memory
LARGEST, ENTRIES = 12 << 20, 1_000_000  # the most characters and entries of an observation


class OutOfTime(BaseException):
    """Exception that interrupts code whose time is over. `except Exception` does not catch it."""


class Figures(DisplayPublisher):
    """Display publisher that keeps the PNG images of cells while `on` is true."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.on = False
        self.kept: list[str] = []

    def publish(self, data: dict[str, Any], *args: Any, **keywords: Any) -> None:
        """Keep the image in the data that a cell displays. IPython calls this method."""
        image = data.get("image/png")
        if self.on and image is not None:
            if isinstance(image, str):
                image = base64.b64decode(image)
            self.keep(image)

    def keep(self, png: bytes) -> None:
        """Keep a PNG image of a cell, unless it is too large or there are too many images."""
        if len(self.kept) < FIGURES and len(png) <= FIGURE_BYTES:
            self.kept.append(base64.b64encode(png).decode())

    def clear_output(self, wait: bool = False) -> None:
        pass


class Shell(InteractiveShell):
    """IPython shell like that of a kernel, but without the window loop of `%matplotlib inline`.

    A cell goes on after an error, because a student's computer has modules, files and a network
    that this one lacks. Only a `raise` at the top level of a cell ends the cell.

    Attributes:
        undefined: the statements that needed a name which was not defined yet.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.undefined: list[types.CodeType] = []

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def ask_exit(self) -> None:
        """Raise SystemExit where `exit()` or `quit()` would end a kernel."""
        raise SystemExit(NO_EXIT)

    async def run_ast_nodes(self, nodelist: list[ast.stmt], *args: Any, **keywords: Any) -> Any:
        """Run the statements of a cell, up to the first `raise`. IPython calls this."""
        for place, statement in enumerate(nodelist):
            if isinstance(statement, ast.Raise):
                nodelist = nodelist[: place + 1]
                break
        return await super().run_ast_nodes(nodelist, *args, **keywords)

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run one statement. Return whether the cell must end. IPython calls this."""
        result = result or ExecutionResult(None)
        first = result.error_in_exec
        if not await super().run_code(code_obj, result, async_=async_):
            return False
        error = result.error_in_exec
        if isinstance(error, NameError):
            self.undefined.append(code_obj)
        if first is not None:
            result.error_in_exec = first  # the others often follow from it
        return not isinstance(error, Exception)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run a cell magic. If it is not installed here, only run the cell. IPython calls this."""
        if self.find_cell_magic(magic_name) is None:
            return self.run_cell(cell).raise_error()
        return super().run_cell_magic(magic_name, line, cell)

    def define_late(self) -> None:
        """Run definitions again that needed a name from a later cell.

        A definition is left out if the notebook defines its name elsewhere.
        """
        for code in self.undefined:
            found = dis.get_instructions(code)
            stored = {item.argval for item in found if item.opname == "STORE_NAME"}
            if stored and not stored & self.user_ns.keys():
                with contextlib.suppress(Exception):
                    exec(code, self.user_ns)


@dataclass
class Prepared:
    """The shell and the checks, with which every copy of the fork server starts."""

    shell: Shell
    checks: dict[str, checking.Check]


def prepare() -> Prepared:
    """Import the modules that lessons use, and do some GPU work, which imports more modules.

    The children that answers start are copies of this process, so it imports what they need, too.
    """
    import matplotlib.font_manager
    import matplotlib.pyplot  # noqa: F401

    from gputrace import record  # noqa: F401

    server_of_children.load_for_children()
    for name in dir(labs):
        getattr(labs, name)
    for package, folder in courses.lessons().values():
        if (folder / "labs").is_dir() or (folder / "labs.py").is_file():
            import_module(f"{package}.labs")
    torch.set_num_threads(1)
    known = checks.with_variants()
    definitions.puzzles()  # imports the modules of all puzzles
    checks.check = _checked_later
    puzzles.puzzle = _scored_later
    with labkit.use(gpus=2, virtual=True, quiet=True):
        layer = torch.nn.Linear(8, 8).cuda()
        layer(torch.ones(8, 8, device="cuda")).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        torch.cuda.synchronize()
    return Prepared(_shell(), known)


@dataclass
class Checked:
    """Answer that a notebook passed to `labkit.check`, and what its names meant at that time.

    A later cell may define the same names for another purpose.

    Attributes:
        values: the modules, functions, classes and plain values, by name. Other objects are left
            out, because they may hold GPU memory that the notebook frees.
        ids: the identities of all values, by name.
    """

    answer: Any
    values: dict[str, Any]
    ids: dict[str, int]


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype)
DEFINED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_checked: dict[str, Checked] = {}  # the last call of `labkit.check` for each exercise


def _checked_later(number: str, answer: Any) -> Verdict:
    """Replace `labkit.check` while cells run. Only the grader judges answers.

    The verdict is "passed", so that cells which assert it go on.
    """
    names = dict(Shell.instance().user_ns)
    values = {name: value for name, value in names.items() if _is_kept(value)}
    ids = {name: id(value) for name, value in names.items()}
    _checked[str(number)] = Checked(answer, values, ids)
    return Verdict(True, "is checked when this notebook is graded", exercise=number)


def _is_kept(value: Any) -> bool:
    """Return whether a value holds no GPU memory that a notebook could free."""
    if type(value) in (tuple, list):
        return len(value) <= 1000 and all(type(item) in PLAIN for item in value)
    return type(value) in PLAIN or issubclass(type(value), DEFINED)  # asks the value nothing


# The pickled function that `labkit.puzzle` last got for each puzzle, or why it cannot be pickled.
_functions: dict[str, dict[str, Any]] = {}


def _scored_later(name: str, function: Callable[..., Any]) -> outcome.Outcome:
    """Replace `labkit.puzzle` while cells run, and keep the function, which is scored later."""
    try:
        data = puzzles.copied(function)
        if len(data) > LARGEST // 2:
            most = f"{LARGEST >> 21} MiB"
            raise ValueError(f"your function uses more than {most} of the notebook's variables")
        code = getattr(function, "__code__", None)
        file = code.co_filename if code else ""
        _functions[str(name)] = {
            "function": base64.b64encode(data).decode(),
            "file": file,
            "lines": linecache.getlines(file),  # messages about errors quote a line
        }
    except Exception as error:
        _functions[str(name)] = {"raised": str(error)}
    verdict = Verdict(True, "is scored when this notebook is graded", exercise=str(name))
    return outcome.Outcome(verdict)


def _shell() -> Shell:
    """Make an IPython shell that keeps no history and collects figures."""
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "NoColor"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shell = Shell.instance(config=settings, display_pub_class=Figures)
    shell.run_cell("None", silent=True)
    shell.reset(new_session=True)
    shell.user_module.__spec__ = None  # as in a kernel, because multiprocessing reads it
    return shell


def serve(fds: list[int], request: dict[str, Any], prepared: Prepared) -> None:
    """Run one submission, and answer the grader's questions until it closes the connection.

    This function ends the process.

    Args:
        fds: the connection to the grader, and the file for output.
        request: the limits.
    """
    end = os._exit
    try:
        _set_limits(fds, request)
        with contextlib.suppress(EOFError):
            _Session(socket.socket(fileno=fds[0]), prepared, request).run()
    except BaseException:
        traceback.print_exc()
    finally:
        end(0)


def _set_limits(fds: list[int], request: dict[str, Any]) -> None:
    """Set the system's limits for this process and those that it starts.

    All files are closed, except the connection and the output.
    """
    connection, output = fds
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    names: Iterable[str] = map(str, range(3, 256))
    if os.path.isdir("/dev/fd"):
        names = os.listdir("/dev/fd")
    for name in names:
        if name.isdigit() and int(name) > 2 and int(name) != connection:
            with contextlib.suppress(OSError):
                os.close(int(name))
    sys.path.insert(0, "")  # the notebook may import modules that it wrote, as in a kernel
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: request["scratch"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CPU: request["seconds"],
    }
    if sys.platform == "linux":
        # The fork server hides its memory, but lessons read the memory of their own process.
        ctypes.CDLL(None).prctl(DUMPABLE, 1, 0, 0, 0)
        limits[resource.RLIMIT_AS] = _address_space() + request["memory"]
    if request["own_processes"]:  # otherwise all processes of this user would count
        limits[resource.RLIMIT_NPROC] = request["threads"]
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))
    if not system_calls.forbid(shared=request["counted"]) and request["filtered"]:
        raise RuntimeError("the filter of system calls cannot be installed")


def _address_space() -> int:
    """Return the address space of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class _Session:
    """Session of one submission, which runs its cells and then answers questions."""

    def __init__(
        self,
        connection: socket.socket,
        prepared: Prepared,
        request: dict[str, Any],
    ) -> None:
        self._connection, self._prepared = connection, prepared
        self._shell, self._names = prepared.shell, prepared.shell.user_ns
        self._alarm = Alarm(os._exit, request["late_status"])
        self._own_processes = request["own_processes"]
        # Before the cells run, so that a child has nothing of what they change.
        self._server = server_of_children.fork_server(closing=[connection.fileno()])

    def run(self) -> None:
        """Run the cells, and answer questions until the grader closes the connection."""
        receive, packed = messages.receive, messages.packed
        recv, send = socket.socket.recv, socket.socket.sendall  # a notebook may replace these
        message = receive(self._connection, recv)
        send(self._connection, packed({"nonce": message["nonce"], **self._run_cells(message)}))
        self._end_programs()
        while True:
            question = receive(self._connection, recv)
            send(self._connection, packed({"nonce": question["nonce"], **self._answer(question)}))

    def _end_programs(self) -> None:
        """End the programs that the cells left running, because they would slow down answers.

        The server that forks the children of answers goes on.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's loaders would raise an error
        if self._own_processes:  # -1 means all processes except this one and the first one
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # at once, so that none can fork in the meantime
            others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        else:
            others = []
            with contextlib.suppress(psutil.Error):
                others = [child.pid for child in psutil.Process().children(recursive=True)]
        for pid in set(others) - {1, os.getpid(), self._server}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._server, signal.SIGCONT)

    def _run_cells(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the cells in order, and continue after errors.

        An error is reported as [number of the cell, class of the error, message].
        """
        _seed(message["random"])
        figures, errors = self._shell.display_pub, []
        for number, cell in enumerate(message["cells"], 1):
            figures.on = cell["figures"]
            try:
                with self._alarm.after(message["seconds"]):
                    done = self._shell.run_cell(cell["source"], store_history=True)
                error = done.error_before_exec or done.error_in_exec
            except BaseException as raised:  # the alarm may ring outside of the cell's own code
                error = raised
            if error is not None:
                errors.append([number, type(error).__name__, str(checking.quote(error))[:500]])
            self._collect_figures(figures)
        with contextlib.suppress(OutOfTime), self._alarm.after(message["seconds"]):
            self._shell.define_late()
        return {"errors": errors, "figures": figures.kept}

    def _collect_figures(self, figures: Figures) -> None:
        """Keep the figures that a cell drew with matplotlib and did not display itself."""
        from matplotlib import pyplot

        with contextlib.suppress(Exception):
            if figures.on:
                for number in pyplot.get_fignums():
                    with io.BytesIO() as file:
                        figure = pyplot.figure(number)
                        figure.savefig(file, format="png", dpi=72, metadata={"Software": None})
                        figures.keep(file.getvalue())
            pyplot.close("all")

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to the grader's question about an exercise or a puzzle."""
        if "called" in question:
            return _functions.get(question["called"], {})
        if "puzzle" in question:
            return self._scored(question)
        return self._observed(question)

    def _scored(self, question: dict[str, Any]) -> dict[str, Any]:
        """Score the function of a puzzle. In this process no cell has run.

        The function has the variables of its notebook, but not what the notebook did to PyTorch.
        """
        name, data = question["puzzle"], base64.b64decode(question["function"])
        draw = random.Random(question["random"]).getrandbits
        file, lines = question["file"], question["lines"]
        linecache.cache[file] = sum(map(len, lines)), None, lines, file
        _seed(question["random"])
        try:
            with self._alarm.after(question["seconds"]):
                labkit.use(None)
                machines.put_in_use(puzzles.request(definitions.find(name)), machines.VirtualGPUs)
                judgement = puzzles.judged_here(name, lambda: pickle.loads(data), draw)
        except OutOfTime:
            return {"late": True}
        except BaseException as error:
            raised = f"Not yet: your function raised {checking.quote(error)}"
            judgement = outcome.Judgement(outcome.NOT_RUN, raised)
        return {"judgement": asdict(judgement)}

    def _observed(self, question: dict[str, Any]) -> dict[str, Any]:
        """Observe the submission's answer to an exercise, or the control that the grader sends."""
        check = self._prepared.checks[question["exercise"]]
        _seed(question["random"])
        try:
            with self._alarm.after(question["seconds"]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _use_gpus(check.gpus)
                if question["wrong_answer"]:
                    answer = answer_in(question["wrong_answer"])
                    observation = checking.observe(check, answer, question["inputs"])
                else:
                    with self._handed_in(check, question["name"]) as answer:
                        observation = checking.observe(check, answer, question["inputs"])
                text = messages.written(observation)
                if len(text) > LARGEST or text.count(",") > ENTRIES:
                    raise ValueError("your answer returned more data than can be judged")
        except OutOfTime:
            return {"late": True}
        except BaseException as error:
            return {"observation": {"raised": str(checking.quote(error))}}
        return {"observation": observation}

    @contextlib.contextmanager
    def _handed_in(self, check: checking.Check, name: str) -> Iterator[Any]:
        """Give the submission's answer to an exercise.

        The answer is what `name` means at the end of the notebook. If the name has not changed
        since the last check, or has no answer, it is the answer that was checked. A checked answer
        runs with the names as they were at the check.

        Args:
            name: the name that the exercise asks for.
        """
        answer, checked = self._names.get(name), _checked.get(check.number)
        if checked is None or checking.is_stub(checked.answer, check.script):
            yield answer
            return
        has_changed = checked.ids.get(name) != id(answer)
        if has_changed and not checking.is_stub(answer, check.script):
            yield answer
            return
        now = dict(self._names)
        self._names.update(checked.values)
        try:
            yield checked.answer
        finally:
            for changed in checked.values:
                if changed in now:
                    self._names[changed] = now[changed]
                else:
                    self._names.pop(changed, None)


def answer_in(source: str) -> Any:
    """Return the function or class that the source of an answer defines.

    The source can use the modules that notebooks import.
    """
    names: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "dist": torch.distributed,
        "labkit": labkit,
        "__name__": "__main__",
    }
    known = set(names) | {"__builtins__"}
    exec(source, names)
    return next(value for name, value in names.items() if callable(value) and name not in known)


def _use_gpus(count: int) -> None:
    """Use at least `count` GPUs. Keep those that the notebook has chosen if they are enough."""
    used = machine.current()
    if used is None or used.count < count:
        labkit.use(None)
        labkit.use(gpus=count, virtual=True, quiet=True)


def _seed(seed: int) -> None:
    """Seed all random generators, so that every run draws the same numbers."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


class Alarm:
    """Timer that interrupts code which takes too long.

    It raises `OutOfTime`, up to three times. If the code goes on, it ends the process.

    Args:
        end: ends the process with an exit status.
        status: this exit status.
    """

    def __init__(self, end: Callable[[int], Any], status: int) -> None:
        self._end, self._status, self._rung = end, status, 0
        self._limit = TimeLimit(0)
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, number: int, frame: Any) -> None:
        """Interrupt the running code, or end the process after three interrupts.

        The arguments are those of a signal handler.
        """
        remaining = self._limit.remaining()
        if remaining > 0:  # time spent waiting for a processor core does not count
            signal.setitimer(signal.ITIMER_REAL, remaining, 1.0)
            return
        self._rung += 1
        if self._rung > 3:
            self._end(self._status)
        raise OutOfTime("the time is over")

    @contextlib.contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Interrupt the `with` block after this time."""
        self._rung, self._limit = 0, TimeLimit(seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
