"""The result of a job: what the ranks returned, or an error that names the first failure."""

import linecache
import re
from typing import TYPE_CHECKING

from labkit.ranks.job import TorchrunJob
from labkit.ranks.rank_process import RankProcess

if TYPE_CHECKING:
    from gputrace import Trace

LINES = 10  # how many lines of the last output an error shows


class Ranks:
    """The result of ranks that all ended well. Lists are in the order of the ranks.

    Attributes:
        results: the plain data that each rank's script left in its variable `result`, or None.
        outputs: what each rank printed to stdout and stderr, in order. The middle of a very long
            output is left out.
        restarts: a sentence for each time that torchrun started all ranks again, with the reason.
        trace: the `gputrace.Trace` of the ranks' virtual GPUs, or None if none was asked for.
    """

    def __init__(self, job: TorchrunJob) -> None:
        last = job.attempts()[-1]
        self.results = [(process.report or {})["result"] for process in last]
        self.outputs = [process.text for process in last]
        self.restarts = _restarts(job)
        self.trace = trace_of(job)

    def __repr__(self) -> str:
        text = f"{len(self.results)} ended well"
        count = len(self.restarts)
        if count:
            text += f", after {count} restart{'s' * (count > 1)}"
        return f"<Ranks: {text}>"


class TorchrunError(Exception):
    """Error of a job in which not all ranks ended well.

    A note shows the traceback, or the last lines, of the rank that failed first.

    Attributes:
        kind: how the first rank failed. "exception", "exit" and "signal" say what ended it.
            "crash" is a signal of its own, such as SIGSEGV. "result" is a `result` that is not
            plain data. "timeout" means that the ranks took too long, and "start" that they could
            not be started.
        rank: the rank that failed first, or None.
        outputs: the output of each rank as in `Ranks`, with the traceback that ended the rank. It
            is "" for a rank that never reached its script.
        exit_codes: the exit status of each rank. A negative number is the signal that ended the
            rank: torchrun ends the other ranks with SIGTERM (-15). The status is None for a rank
            that did not end by itself or never reached its script.
        restarts: a sentence for each restart, as in `Ranks`.
        trace: the trace as in `Ranks`, of the ranks that were not killed.
    """

    def __init__(
        self, message: str, kind: str = "", rank: int | None = None, job: TorchrunJob | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.rank = kind, rank
        self.outputs: list[str] = []
        self.exit_codes: list[int | None] = []
        self.restarts: list[str] = []
        self.trace: Trace | None = None
        if job is None:
            return
        self.restarts = _restarts(job)
        self.trace = trace_of(job)
        if job.processes:
            last = {process.rank: process for process in job.attempts()[-1]}
            for rank_of_output in range(job.expected):
                process = last.get(rank_of_output)
                if process is None:
                    self.outputs.append("")
                    self.exit_codes.append(None)
                else:
                    self.outputs.append(process.text)
                    self.exit_codes.append(_exit_code(process))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the error without the traceback of the kit's own code."""
        return [f"TorchrunError: {self}", *getattr(self, "__notes__", [])]


def _exit_code(process: RankProcess) -> int | None:
    if process.succeeded:
        return 0
    return process.exit_code


def trace_of(job: TorchrunJob) -> "Trace | None":
    """Join the traces of the last attempt into one. Return None if there are none."""
    if not job.request["trace"] or not job.processes:
        return None
    # Imports of torch, for which a call without a trace need not wait.
    from gputrace import Trace
    from gputrace.ranks import together

    traces = {}
    for process in job.attempts()[-1]:
        file = job.trace_file(process)
        if file.exists():
            traces[process.rank] = Trace.load(file)
    if not traces:
        return None
    return together(traces, job.request["ranks_of_node"])


def _restarts(job: TorchrunJob) -> list[str]:
    """Return a sentence for each attempt of a job but the last one, which says why it failed."""
    sentences = []
    for attempt in range(len(job.attempts()) - 1):
        process = job.first_failed(attempt)
        if process is None:
            sentences.append("a rank failed.")
        else:
            sentences.append(process.failure()[1])
    return sentences


def result(job: TorchrunJob, timeout: float | None) -> Ranks:
    """Return the result of a job that is over. Raise TorchrunError unless all ranks ended well."""
    if job.refused is not None and not job.failed:
        kind, why = job.refused
        raise TorchrunError(f"{why.rstrip('.')}.", kind, job=job)
    if job.late:
        raise _too_late(job, timeout)
    attempts = job.attempts()
    if attempts:
        last = attempts[-1]
        if len(last) == job.expected and all(process.succeeded for process in last):
            return Ranks(job)
    first = job.first_failed(len(attempts) - 1)
    if first is None:
        error = TorchrunError("torchrun ended before its ranks did.", "start", job=job)
        _add_last_lines(error, "torchrun", job.agent_output.text())
        raise error
    raise _failed(job, first)


def _failed(job: TorchrunJob, first: RankProcess) -> TorchrunError:
    """Return the error for a job in which this rank failed first."""
    kind, message = first.failure()
    if first.ended_before:
        message += f" By then {_listed(first.ended_before)} had ended."
    without_gpus = job.devices == "cpu" and job.request["virtual"] is None
    if without_gpus and re.search("cuda|nccl", message, re.IGNORECASE):
        message += (
            " The ranks have no GPUs here. Give each one a virtual GPU with --like T4 or like='T4'."
        )
    for process in first.waited_for(job.attempts()[-1]):
        if process.rank in job.stacks:
            message += f" Rank {process.rank} {_last_line(job, process)}."
    error = TorchrunError(message, kind, first.rank, job)
    traceback = (first.report or {}).get("traceback")
    if traceback:
        error.add_note(f"In rank {first.rank}:\n{traceback.rstrip()}")
    else:
        _add_last_lines(error, f"rank {first.rank}", first.text)
    return error


def _add_last_lines(error: TorchrunError, who: str, output: str) -> None:
    lines = output.rstrip().splitlines()[-LINES:]
    if lines:
        error.add_note(f"The last lines that {who} printed:\n" + "\n".join(lines))


def _too_late(job: TorchrunJob, timeout: float | None) -> TorchrunError:
    """Return the error for a job that was stopped. It says where each rank was."""
    if not job.processes:
        return TorchrunError("torchrun did not start the ranks in time.", "start", job=job)
    ranks_at: dict[str, list[int]] = {}
    for process in job.attempts()[-1]:
        ranks_at.setdefault(_last_line(job, process), []).append(process.rank)
    places = "; ".join(f"{_listed(ranks)} {line}" for line, ranks in ranks_at.items())
    message = f"the ranks took longer than {timeout:g} s and were stopped. At that time {places}."
    return TorchrunError(message, "timeout", job=job)


def _last_line(job: TorchrunJob, process: RankProcess) -> str:
    """Return in words which line of the script a rank's process ran when it was stopped."""
    if process.rank not in job.stacks:
        return "had ended"
    script = job.request["script"]
    pattern = rf'^  File "{re.escape(script)}", line (\d+) in'
    found = re.search(pattern, job.stacks[process.rank], re.MULTILINE)
    if found is None:
        return "still ran"
    number = int(found[1])
    return f"ran line {number}, `{linecache.getline(script, number).strip()}`"


def _listed(ranks: list[int]) -> str:
    """Return a list of ranks in words, such as "rank 2" or "ranks 0, 1 and 3"."""
    *first, last = map(str, sorted(ranks))
    if not first:
        return f"rank {last}"
    return f"ranks {', '.join(first)} and {last}"
