"""How an isolated function can end: with a result, or with an error that names what went wrong."""

import re
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputrace import Trace

# The names of fatal signals in words. Other signals are named as they are.
_CRASHES = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "a bus error",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an illegal instruction",
    "SIGABRT": "an abort",
}
# The messages of PyTorch by which CUDA errors of a kind of their own are known.
_CUDA_ERRORS = {
    "device-side assert": r"device-side assert triggered",
    "illegal access": r"an illegal memory access was encountered",
    "out of memory": r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error": r"CUDA error: ",
}
_CALLER = "/labkit/isolation/worker.py"


@dataclass(frozen=True, repr=False, eq=False)
class Isolated:
    """The result of a function that returned.

    Attributes:
        value: what it returned.
        output: all that the process wrote to stdout and stderr, in order; of very much, the first and the last part.
        trace: the recording of its memory, or None.
        why_no_trace: the reason where there is no trace, else "".
        cut: whether part of the output is left out.
    """

    value: Any
    output: str
    trace: "Trace | None"
    why_no_trace: str = ""
    cut: bool = False

    def __repr__(self) -> str:
        lines = len(self.output.splitlines())
        return (
            f"<Isolated: returned {self.value!r}, {lines} line{'s' * (lines != 1)} of output{' kept, the middle was cut out' * self.cut}>"
        )


@dataclass(frozen=True)
class Original:
    """The exception of the other process, as text: its class, what it says, and the traceback there."""

    type: str
    text: str
    traceback: str


class IsolatedError(Exception):
    """An isolated function did not return.

    Attributes:
        kind: "out of memory", "device-side assert", "illegal access", "CUDA error", "exception", "exit", "timeout", "crash", "signal",
            "argument", "result" or "start".
        original: the exception that the function raised; of a crash or a timeout, where it was, without a text; or None.
        output, trace, why_no_trace: as in `Isolated`.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        original: Original | None = None,
        output: str = "",
        trace: "Trace | None" = None,
        why_no_trace: str = "",
    ) -> None:
        super().__init__(message)
        self.kind, self.original = kind, original
        self.output, self.trace, self.why_no_trace = output, trace, why_no_trace
        if original is not None and original.traceback:
            self.add_note("In the process of its own:\n" + original.traceback.rstrip())


def kind_of(error: BaseException) -> str:
    """The kind of an exception that a function raised."""
    torch = sys.modules.get("torch")
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return "out of memory"
    if isinstance(error, RuntimeError):
        return next((kind for kind, words in _CUDA_ERRORS.items() if re.search(words, str(error))), "exception")
    return "exception"


def raised(name: str, kind: str, error: Original, output: str) -> str:
    """The message for a function `name` that raised an error of this kind."""
    text = error.text.strip().split("\n")[0]
    if kind == "exit":
        return f"{name} called sys.exit({error.text}) instead of returning."
    if kind == "out of memory":
        return f"{name} ran out of memory: {_memory(error.type, text)}"
    if kind == "device-side assert":
        found = re.search(r"[Aa]ssertion `(.+?)` failed", output)
        return f"{name} failed in a device-side assert: a kernel met a value that it cannot work with{f' ({found[1]})' if found else ''}."
    if kind == "illegal access":
        return f"{name} made an illegal access: a kernel read or wrote memory that is not its own."
    return f"{name} raised {error.type}{': ' if text else ''}{text.rstrip('.')}."


def _memory(type_: str, text: str) -> str:
    if type_ == "MemoryError":
        return "this computer has no more for it."
    found = re.search(r"Tried to allocate (.+?)\. (GPU \d+) has a total capacity of (.+?) of which (.+?) is free", text)
    return f"it asked for {found[1]}, and {found[2]} has {found[4]} free of {found[3]}." if found else text.rstrip(".") + "."


def without_report(name: str, status: int) -> tuple[str, str]:
    """The kind and the message for a process that ended with this status (negative: by that signal) and reported nothing."""
    if status >= 0:
        return "exit", f"{name} ended with exit status {status} without returning."
    try:
        number = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return "signal", f"{name} was killed from outside, by signal {-status}."
    if number in _CRASHES:
        return "crash", f"{name} crashed with {_CRASHES[number]} ({number})."
    perhaps = ", perhaps by the system's out-of-memory killer because this computer's memory ran out" if number == "SIGKILL" else ""
    return "signal", f"{name} was killed from outside ({number}){perhaps}."


def is_whole_stack(text: str) -> bool:
    """Whether faulthandler has written all of it: the main thread comes last, down to its module or as deep as faulthandler goes."""
    return text.endswith((" in <module>\n", "  ...\n"))


def stack(text: str) -> str:
    """What faulthandler wrote as a traceback: where the function was when its process crashed or was stopped; "" if it could not.

    A crash has a current thread. A process that was stopped has none: the function's is the one in which the worker called it.
    """
    for head, thread in re.findall(r"^((?:Current t|T)hread .*)\n((?:  .*\n)*)", text, re.MULTILINE):
        frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE)
        called = next((i for i, (path, _, name) in enumerate(frames) if path.endswith(_CALLER) and name == "_call"), None)
        if frames and (head.startswith("Current") or called is not None):
            summary = traceback.StackSummary.from_list([(path, int(line), name, None) for path, line, name in reversed(frames[:called])])
            return "Traceback (most recent call last):\n" + "".join(summary.format())
    return ""
