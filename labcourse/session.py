"""What a copy of the sandbox's fork server does: run one submission's cells in an IPython shell, then observe its answers one by one.

Everything here shares a process with the submission, so the grader does not believe what it reports: it asks each question only
after the answer to the one before, with inputs that this process has not seen, and asks the same of answers that it knows to be wrong.
Each answer is signed with a key that came before the first cell ran and that only local variables hold: who looks for them is reported.
"""

import base64
import contextlib
import copy
import ctypes
import functools
import hashlib
import io
import itertools
import os
import random
import resource
import signal
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import psutil
import torch
import torch.distributed
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labcourse import redaction, system_calls
from labcourse.integrity import BUILT_IN, Originals
from labcourse.watching import Reports, Watch, plain, watch_calls
from labkit import checks, labs, machine
from labkit.checks import checking
from labkit.checks.checking import Verdict
from labkit.processes import messages

FIGURES, FIGURE_BYTES = 12, 400_000  # figures that a submission may show, and the bytes of each
DUMPABLE = 4
FORMULAS = ("labkit.labs.", "labkit.lab_parts.budget", "labkit.lab_parts.layers", "labkit.articles")  # modules
MOST_ELEMENTS = 100  # of a list that are looked at
LARGEST, ENTRIES = 12 << 20, 1_000_000  # characters of an observation, and what it holds


class OutOfTime(BaseException):
    """Raised wherever the code is when its time is over; `except Exception` does not hold it up."""


class Figures(DisplayPublisher):
    """Keeps the PNG images that a cell displays, while `on`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.on = False
        self.kept: list[str] = []

    def publish(self, data: dict[str, Any], *args: Any, **keywords: Any) -> None:
        image = data.get("image/png")
        if self.on and image is not None:
            self.keep(base64.b64decode(image) if isinstance(image, str) else image)

    def keep(self, png: bytes) -> None:
        if len(self.kept) < FIGURES and len(png) <= FIGURE_BYTES:
            self.kept.append(base64.b64encode(png).decode())

    def clear_output(self, wait: bool = False) -> None:
        pass


class Shell(InteractiveShell):
    """As a kernel's, which has no window to keep alive: `%matplotlib inline` asks for that."""

    def enable_gui(self, gui: str | None = None) -> None:
        pass


@dataclass
class Prepared:
    """What every copy starts with."""

    shell: InteractiveShell
    checks: dict[str, checking.Check]
    originals: Originals
    formulas: list[types.FunctionType]  # that no observation needs


def prepare() -> Prepared:
    """Import and warm what lessons use."""
    import ipywidgets  # noqa: F401
    import matplotlib.font_manager
    import matplotlib.pyplot  # noqa: F401

    from gputrace import record  # noqa: F401

    for name in dir(labs):
        getattr(labs, name)
    torch.set_num_threads(1)
    known = {
        number: replace(check, judge=_left_to_the_grader, draw=_left_to_the_grader, expect=None)
        for number, check in checks.exercises().items()
    }
    checks.check = _checked_later
    with labkit.use(gpus=2, virtual=True, quiet=True):  # the first use imports much
        layer = torch.nn.Linear(8, 8).cuda()
        layer(torch.ones(8, 8, device="cuda")).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()  # the first optimizer, which changes a few names of torch
        torch.cuda.synchronize()
    originals = Originals()
    with labkit.use(gpus=2, virtual=True, quiet=True) as used:
        originals.learn()
        with used.without_values():
            originals.learn()
    return Prepared(_shell(), known, originals, _formulas())


def _formulas() -> list[types.FunctionType]:
    """The functions of the labs and the articles, less those that observations need. Each tells of its calls from now on."""
    here = {name: vars(module) for name, module in list(sys.modules.items()) if name.startswith(("labkit.checks", *FORMULAS))}
    needed = redaction.needed(value for name, names in here.items() if name.startswith("labkit.checks") for value in names.values())
    values = [redaction.plain(value) for name, names in here.items() if name.startswith(FORMULAS) for value in names.values()]
    found = {id(value): value for value in values if isinstance(value, types.FunctionType) and not value.__code__.co_freevars}
    own = [function for function in found.values() if function.__module__.startswith(FORMULAS)]
    watch_calls(own, {id(redaction.plain(getattr(labs, name))): f"labkit.labs.{name}" for name in dir(labs)})
    return [function for function in own if id(function) not in needed]


def _take_away(formulas: list[types.FunctionType]) -> None:
    """While answers are tried, the labs compute nothing: none of them is needed for an answer, and some of them are one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about generators that are none any more
        for function in formulas:
            function.__code__ = _not_at_hand.__code__


def _not_at_hand(*arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError("the labs are not at hand while answers are tried")


def _left_to_the_grader(*arguments: Any) -> Any:
    raise NotImplementedError("answers are judged where they are graded")


def _checked_later(number: str, answer: Any) -> Verdict:
    """What `labkit.check` is here: judging is left to the grader."""
    return Verdict(False, "is checked when this notebook is graded", exercise=number)


def _shell() -> InteractiveShell:
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "NoColor"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shell = Shell.instance(config=settings, display_pub_class=Figures)
    shell.run_cell("None", silent=True)
    shell.reset(new_session=True)
    shell.user_module.__spec__ = None  # as in a kernel; who starts processes asks for it
    return shell


def serve(fds: list[int], request: dict[str, Any], prepared: Prepared) -> None:
    """Run one submission, answer the grader's questions until it closes the connection, and end.

    `fds`: the connection, where output goes, and where reports go.
    """
    end = os._exit
    try:
        _set_limits(fds, request)
        for name in [name for name in sys.modules if name.partition(".")[0] == "labcourse"]:
            del sys.modules[name]  # what is left of them is held by local variables
        with contextlib.suppress(EOFError):
            _Session(socket.socket(fileno=fds[0]), Reports(fds[2]), prepared, request).run()
    except BaseException:
        traceback.print_exc()
    finally:
        end(0)


def _set_limits(fds: list[int], request: dict[str, Any]) -> None:
    """The limits that the system keeps, for this process and each that it starts; of its files only these three stay open."""
    connection, output, reports = fds
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else map(str, range(3, 256)):
        if name.isdigit() and int(name) > 2 and int(name) not in (connection, reports):
            with contextlib.suppress(OSError):
                os.close(int(name))
    sys.path.insert(0, "")  # modules that the notebook wrote, as in a kernel
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
        ctypes.CDLL(None).prctl(DUMPABLE, 1, 0, 0, 0)  # the fork server hides its memory, but lessons look up their own
        limits[resource.RLIMIT_AS] = _address_space() + request["memory"]
    if request["own_processes"]:  # elsewhere the user's own processes count
        limits[resource.RLIMIT_NPROC] = request["threads"]
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    system_calls.forbid()


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class _Session:
    """One submission. What it needs it holds before the first cell runs; the key is in no attribute."""

    def __init__(self, connection: socket.socket, reports: Reports, prepared: Prepared, request: dict[str, Any]) -> None:
        self._connection, self._reports, self._prepared = connection, reports, prepared
        self._shell, self._names = prepared.shell, prepared.shell.user_ns
        self._alarm, self._alone = Alarm(os._exit, request["late_status"]), request["own_processes"]

    def run(self) -> None:
        receive, recv, connection, reply = messages.receive, socket.socket.recv, self._connection, _signed
        message = receive(connection, recv)
        sign, send = hashlib.blake2b, socket.socket.sendall
        key = bytes.fromhex(message.pop("key"))
        run_cells, answer, changed = self._run_cells, self._answer, self._prepared.originals.changed
        reports, watch = self._reports, Watch(self._reports, self._names)
        send(connection, reply(message["nonce"], run_cells(message, watch), changed(), reports.count, key, sign))
        _take_away(self._prepared.formulas)
        self._end_programs()
        watch.trying = True
        while True:
            question = receive(connection, recv)
            watch.renew()
            send(connection, reply(question["nonce"], answer(question), changed(), reports.count, key, sign))

    def _end_programs(self) -> None:
        """What the cells started and left behind: in another process, nobody sees what it computes for an answer."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's loaders would raise an error
        if self._alone:  # but for this process and the first, all are the cells'
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):
                process.kill()

    def _run_cells(self, message: dict[str, Any], watch: Watch) -> dict[str, Any]:
        """The cells in order, as a kernel told to go on after errors; the errors are [[cell's number, error's class, its text], …]."""
        _seed(message["random"])
        figures, errors = self._shell.display_pub, []
        for number, cell in enumerate(message["cells"], 1):
            figures.on = cell["figures"]
            watch.renew()
            try:
                with self._alarm.after(message["seconds"]):
                    done = self._shell.run_cell(cell["source"], store_history=True)
                error = done.error_before_exec or done.error_in_exec
            except BaseException as raised:  # the alarm, outside of the cell's own code
                error = raised
            if error is not None:
                errors.append([number, type(error).__name__, str(checking.quote(error))[:500]])
            self._collect_figures(figures)
        return {"errors": errors, "figures": figures.kept}

    def _collect_figures(self, figures: Figures) -> None:
        """What a cell drew with matplotlib and did not display itself."""
        from matplotlib import pyplot

        with contextlib.suppress(Exception):
            for number in pyplot.get_fignums() if figures.on else ():
                with io.BytesIO() as file:
                    pyplot.figure(number).savefig(file, format="png", dpi=72, metadata={"Software": None})
                    figures.keep(file.getvalue())
            pyplot.close("all")

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The observation of the submission's answer to an exercise, or of another answer that the grader sends."""
        check = self._prepared.checks[question["exercise"]]
        _seed(question["random"])
        try:
            with self._alarm.after(question["seconds"]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = answer_in(question["wrong_answer"]) if question["wrong_answer"] else self._names.get(question["name"])
                _use_gpus(check.gpus)
                watched = replace(check, observe=lambda answer, inputs: check.observe(self._guarded(answer), inputs))
                observation = checking.observe(watched, answer, question["inputs"])
                if len(text := plain(observation)) > LARGEST or text.count(",") > ENTRIES:
                    raise ValueError("your answer is too large to be looked at")
        except OutOfTime:
            return {"late": True}
        except BaseException as error:
            return {"observation": {"raised": str(checking.quote(error))}}
        return {"observation": observation}

    def _guarded(self, answer: Any) -> Any:
        return Guarded(answer, self._prepared.originals, self._reports) if callable(answer) else answer


class Guarded:
    """An answer, after each call of which is seen whether anything that it is measured with was replaced, and what it has returned."""

    def __init__(self, answer: Any, originals: Originals, reports: Reports) -> None:
        functools.update_wrapper(self, answer)
        self._answer, self._originals, self._reports = answer, originals, reports

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            result = self._answer(*arguments, **keywords)
        finally:
            for name in self._originals.changed():
                self._reports.add("changed", name)
        return self._seen(result)

    def _seen(self, value: Any, level: int = 0) -> Any:
        """What was returned, when it has been seen whether something in it poses as something else; what a function returns, later."""
        kind = type(value)
        if isinstance(value, BUILT_IN) and kind not in self._originals.kinds:
            self._reports.add("suspect", f"it returned a {kind.__name__}, which poses as something else")
        elif isinstance(value, torch.Tensor) and (own := [name for name in vars(value) if callable(getattr(kind, name, None))]):
            self._reports.add("suspect", f"it returned a tensor with a {own[0]} of its own")
        elif kind in (list, tuple, dict) and level < 4:
            for element in itertools.islice(value.values() if kind is dict else value, MOST_ELEMENTS):
                self._seen(element, level + 1)
        return Guarded(value, self._originals, self._reports) if kind is types.FunctionType and not level else value

    def __reduce__(self) -> Any:  # other processes get the answer itself
        return copy.copy, (self._answer,)


def _signed(nonce: str, message: dict[str, Any], changed: list[str], reported: int, key: bytes, sign: Any) -> bytes:
    text = plain({"nonce": nonce, **message, "changed": changed, "reported": reported}).encode()
    return (len(text) + 16).to_bytes(4, "big") + sign(text, key=key, digest_size=16).digest() + text


def answer_in(source: str) -> Any:
    """The function or class that an answer's source defines, with the names at hand that a notebook has."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "dist": torch.distributed, "labkit": labkit, "__name__": "__main__"}
    known = set(names) | {"__builtins__"}
    exec(source, names)
    return next(value for name, value in names.items() if callable(value) and name not in known)


def _use_gpus(count: int) -> None:
    """The notebook's own machine, if it has enough GPUs."""
    used = machine.current()
    if used is None or used.count < count:
        labkit.use(None)
        labkit.use(gpus=count, virtual=True, quiet=True)


def _seed(seed: int) -> None:
    """The same random numbers in every run."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


class Alarm:
    """Interrupts code that takes too long; ends the process, with this status, if it goes on all the same."""

    def __init__(self, end: Callable[[int], Any], status: int) -> None:
        self._end, self._status, self._rung = end, status, 0
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, number: int, frame: Any) -> None:
        self._rung += 1
        if self._rung > 3:
            self._end(self._status)
        raise OutOfTime("the time is over")

    @contextlib.contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        self._rung = 0
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
