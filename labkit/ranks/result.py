"""The result of a job: what the ranks returned and printed, or an error that names the rank that failed first."""

import linecache
import re
from typing import TYPE_CHECKING

from labkit.ranks.job import TorchrunJob
from labkit.ranks.rank_process import RankProcess

if TYPE_CHECKING:
    from gputrace import Trace

LINES = 10  # of the last output, shown with an error


class Ranks:
    """The result of ranks that all ended well. Lists are in the order of the ranks.

    Attributes:
        results: the plain data that each rank's script left in its variable `result`, or None.
        outputs: all that each printed to stdout and stderr, in order; of very much, the first and the last part.
        restarts: why torchrun started all ranks again, a sentence each time.
        trace: what the ranks' virtual GPUs did, a `gputrace.Trace`, where that was asked for; else None.
    """

    def __init__(self, job: TorchrunJob) -> None:
        last = job.attempts()[-1]
        self.results = [(process.report or {})["result"] for process in last]
        self.outputs = [process.text for process in last]
        self.restarts = _restarts(job)
        self.trace = trace_of(job)

    def __repr__(self) -> str:
        count, again = len(self.results), len(self.restarts)
        return f"<Ranks: {count} ended well{f', after {again} restart' + 's' * (again > 1) if again else ''}>"


class TorchrunError(Exception):
    """The ranks did not all end well. The note shows the traceback, or the last lines, of the rank that failed first.

    Attributes:
        kind: "exception", "exit", "signal", "crash", "result", "timeout" or "start".
        rank: the rank that failed first, or None.
        outputs: as in `Ranks`, each with the traceback that ended it; "" for a rank that never came to its script.
        exit_codes: None for a rank that never ended by itself, or never came to its script; negative: by that signal. torchrun ends the
            others with SIGTERM (-15).
        restarts, trace: as in `Ranks`; the trace is that of the ranks that were not killed.
    """

    def __init__(
        self, message: str, kind: str = "", rank: int | None = None, job: TorchrunJob | None = None
    ) -> None:
        super().__init__(message)
        last = _last(job) if job is not None and job.processes else []
        self.kind, self.rank = kind, rank
        self.outputs = ["" if process is None else process.text for process in last]
        self.exit_codes = [None if process is None else _exit_code(process) for process in last]
        self.restarts = [] if job is None else _restarts(job)
        self.trace = None if job is None else trace_of(job)

    def _render_traceback_(self) -> list[str]:
        """A notebook shows what the ranks did, without the kit's own part of the traceback."""
        return [f"TorchrunError: {self}", *getattr(self, "__notes__", [])]


def _last(job: TorchrunJob) -> list[RankProcess | None]:
    """The ranks in the last attempt, in order; None for one that was not there yet when another had failed."""
    by_rank = {process.rank: process for process in job.attempts()[-1]}
    return [by_rank.get(rank) for rank in range(job.expected)]


def _exit_code(process: RankProcess) -> int | None:
    return 0 if process.succeeded else process.exit_code


def trace_of(job: TorchrunJob) -> "Trace | None":
    """The traces that the ranks of the last attempt left, as one; None if none did."""
    if not job.request["trace"] or not job.processes:
        return None
    from gputrace import (
        Trace,
    )  # torch comes with it, for which a call without a trace does not wait
    from gputrace.ranks import together

    traces = {
        process.rank: Trace.load(file)
        for process in job.attempts()[-1]
        if (file := job.trace_file(process)).exists()
    }
    return together(traces, job.request["ranks_of_node"]) if traces else None


def _restarts(job: TorchrunJob) -> list[str]:
    first = [job.first_failed(attempt) for attempt in range(len(job.attempts()) - 1)]
    return ["a rank failed." if process is None else process.failure()[1] for process in first]


def result(job: TorchrunJob, timeout: float | None) -> Ranks:
    """Raises TorchrunError unless all ranks ended well."""
    attempts = job.attempts()
    if job.refused is not None and not job.failed:
        kind, why = job.refused
        raise TorchrunError(f"{why.rstrip('.')}.", kind, job=job)
    if job.late:
        raise _too_late(job, timeout)
    if (
        attempts
        and len(attempts[-1]) == job.expected
        and all(process.succeeded for process in attempts[-1])
    ):
        return Ranks(job)
    first = job.first_failed(len(attempts) - 1)
    if first is None:
        error = TorchrunError("torchrun ended before its ranks did.", "start", job=job)
        _add_lines(error, "torchrun", job.agent_output.text())
        raise error
    raise _failed(job, first)


def _failed(job: TorchrunJob, first: RankProcess) -> TorchrunError:
    kind, message = first.failure()
    if first.ended_before:
        message += f" By then {_listed(first.ended_before)} had ended."
    if (
        job.devices == "cpu"
        and job.request["virtual"] is None
        and re.search("cuda|nccl", message, re.IGNORECASE)
    ):
        message += " No rank has a GPU here: --like T4, or like='T4', gives each a virtual one."
    for process in first.waited_for(job.attempts()[-1]):
        if process.rank in job.stacks:
            message += f" Rank {process.rank} {_last_line(job, process)}."
    error = TorchrunError(message, kind, first.rank, job)
    traceback = (first.report or {}).get("traceback")
    if traceback:
        error.add_note(f"In rank {first.rank}:\n{traceback.rstrip()}")
    else:
        _add_lines(error, f"rank {first.rank}", first.text)
    return error


def _add_lines(error: TorchrunError, who: str, text: str) -> None:
    lines = text.rstrip().splitlines()[-LINES:]
    if lines:
        error.add_note(f"The last that {who} printed:\n" + "\n".join(lines))


def _too_late(job: TorchrunJob, timeout: float | None) -> TorchrunError:
    if not job.processes:
        return TorchrunError("torchrun did not start the ranks in time.", "start", job=job)
    lines: dict[str, list[int]] = {}
    for process in job.attempts()[-1]:
        lines.setdefault(_last_line(job, process), []).append(process.rank)
    last = "; ".join(f"{_listed(ranks)} {line}" for line, ranks in lines.items())
    return TorchrunError(
        f"the ranks took longer than {timeout:g} s and were stopped. Then {last}.",
        "timeout",
        job=job,
    )


def _last_line(job: TorchrunJob, process: RankProcess) -> str:
    """What this rank did when the time was over: its innermost line in the script."""
    if process.rank not in job.stacks:
        return "had ended"
    script = re.escape(job.request["script"])
    found = re.search(rf'^  File "{script}", line (\d+) in', job.stacks[process.rank], re.MULTILINE)
    if found is None:
        return "ran"
    return (
        f"ran line {found[1]}, `{linecache.getline(job.request['script'], int(found[1])).strip()}`"
    )


def _listed(ranks: list[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1 and 3"."""
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
