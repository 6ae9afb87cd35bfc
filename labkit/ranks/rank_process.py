"""One process of a rank, and what is known of its end."""

import re
from dataclasses import dataclass, field
from typing import Any

from labkit.processes import exit_status
from labkit.processes.supervision import KeptOutput

# Parts of the errors of a rank that has lost another one. They come from the virtual NCCL, from
# gloo's pair.cc, from NCCL and from the stores.
_LOST = (
    "will never start|by peer|remote process|remote error"
    "|Connection (was )?(closed|reset)|Broken pipe"
)
_LONG = 120  # characters. Only the first sentence of a longer line goes into a message.


@dataclass(eq=False)
class RankProcess:
    """One process of a rank. A rank has a new process in each attempt.

    Attributes:
        rank, pid: the numbers of the rank and of the process.
        attempt: the number of the attempt. torchrun starts all ranks again if one fails.
        report: what the process reported about its end.
        exit_code: the exit status as subprocess gives it, or None while it is unknown.
        disconnected: whether its connection for reports is closed.
        ended_before: the ranks that had ended well when this one failed.
        output: what the process printed.
    """

    rank: int
    attempt: int
    pid: int
    report: dict[str, Any] | None = None
    exit_code: int | None = None
    disconnected: bool = False
    ended_before: list[int] = field(default_factory=list)
    output: KeptOutput = field(default_factory=KeptOutput)

    @property
    def succeeded(self) -> bool:
        """Whether the script ran to its end."""
        return self.report is not None and self.report["ended"] == "returned" and not self.exit_code

    @property
    def lost_another(self) -> bool:
        """Whether the process failed because it lost another rank."""
        return self.report is not None and re.search(_LOST, self.report.get("text", "")) is not None

    def waited_for(self, processes: "list[RankProcess]") -> "list[RankProcess]":
        """Return the running processes for which this one waited in vain.

        They are processes of the same attempt that never entered a collective of the virtual NCCL.
        """
        error = (self.report or {}).get("text", "")
        found = []
        for other in processes:
            is_running = other.attempt == self.attempt and other.report is None
            if is_running and f"rank {other.rank} never entered it" in error:
                found.append(other)
        return found

    @property
    def text(self) -> str:
        """The output, and the traceback that Python would have printed."""
        return self.output.text() + (self.report or {}).get("traceback", "")

    def failure(self) -> tuple[str, str]:
        """Return the kind and the message of the failure."""
        name, report = f"rank {self.rank}", self.report
        if report is not None and report["ended"] == "raised":
            message = f"{name} raised {report['type']}"
            text = _first_sentence(report["text"]).rstrip(".")
            if text:
                message += f": {text}"
            if report["line"]:
                message += f" (line {report['line']})"
            return "exception", f"{message}."
        if report is not None and report["ended"] == "exit":
            return "exit", f"{name} called sys.exit({report['text']})."
        if report is not None and report["ended"] == "result":
            return "result", (
                f"{name}'s variable `result` cannot be sent ({report['text']}). "
                "Store plain data in it (numbers, strings, lists, dicts, tensors), "
                "or rename the variable."
            )
        if self.exit_code is None:
            return "exit", f"{name} ended without a report. It was killed, or called os._exit."
        return exit_status.without_report(name, self.exit_code)


def _first_sentence(text: str) -> str:
    """Return the first line of an error's text, or the first sentence of the line if it is long.

    Errors of PyTorch's C++ begin with a file and a line, which are left out. Errors of NCCL end
    with NCCL's own text, which is used instead of PyTorch's.
    """
    _, _, nccl_text = text.partition("\nLast error:\n")
    first_line = (nccl_text or text).strip().split("\n")[0]
    first_line = re.sub(r"^\[\S+:\d+\] ", "", first_line)
    if len(first_line) <= _LONG:
        return first_line
    return first_line.split(". ")[0]
