"""One start of a rank, and what is known of how it ended."""

import re
from dataclasses import dataclass, field
from typing import Any

from labkit.processes import exit_status
from labkit.processes.supervision import KeptOutput

# What is said in a rank that has lost another one (the virtual NCCL's words, gloo's pair.cc, NCCL's and the stores' errors).
_LOST = r"will never start|by peer|remote process|remote error|Connection (was )?(closed|reset)|Broken pipe"


@dataclass(eq=False)
class RankProcess:
    """One start of a rank.

    Attributes:
        report: what it reported of its end.
        exit_code: as subprocess gives it; None while it is unknown.
        disconnected: whether its connection for reports has closed.
        ended_before: the ranks that had ended well when this one failed.
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
        return self.report is not None and self.report["ended"] == "returned" and not self.exit_code

    @property
    def lost_another(self) -> bool:
        """Whether it failed because it lost another rank."""
        return self.report is not None and re.search(_LOST, self.report.get("text", "")) is not None

    def waited_for(self, processes: "list[RankProcess]") -> "list[RankProcess]":
        """Those of its attempt that still ran, and for which it waited in vain in a collective of the virtual NCCL."""
        said = (self.report or {}).get("text", "")
        missing = [
            other
            for other in processes
            if other.attempt == self.attempt and f"rank {other.rank} never entered it" in said
        ]
        return [other for other in missing if other.report is None]

    @property
    def text(self) -> str:
        """All that it printed, and the traceback that Python would have printed."""
        return self.output.text() + (self.report or {}).get("traceback", "")

    def failure(self) -> tuple[str, str]:
        """The kind and the message for a rank that failed."""
        name, report = f"rank {self.rank}", self.report
        if report is not None and report["ended"] == "raised":
            text = _first_sentence(report["text"]).rstrip(".")
            line = f" (line {report['line']})" if report["line"] else ""
            return "exception", f"{name} raised {report['type']}{': ' * bool(text)}{text}{line}."
        if report is not None and report["ended"] == "exit":
            return "exit", f"{name} called sys.exit({report['text']})."
        if report is not None and report["ended"] == "result":
            return "result", (
                f"{name}'s variable `result` cannot be sent ({report['text']}): leave plain data in it (numbers, strings, lists, dicts, "
                "tensors), or give it another name."
            )
        if self.exit_code is None:
            return "exit", f"{name} ended without a word: it was killed, or called os._exit."
        return exit_status.without_report(name, self.exit_code)


def _first_sentence(text: str) -> str:
    """The first sentence of a message's first line, where that is long. PyTorch's C++ begins with its own file and line, and its errors of
    NCCL end with what NCCL says."""
    _, _, of_nccl = text.partition("\nLast error:\n")
    text = of_nccl or text
    line = re.sub(r"^\[\S+:\d+\] ", "", text.strip().split("\n")[0])
    return line if len(line) <= 120 else line.split(". ")[0]
