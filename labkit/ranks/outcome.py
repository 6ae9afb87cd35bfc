"""What comes of a job: the ranks' results and output, or an error that names the rank that failed first."""

import linecache
import re

from labkit.isolation import endings
from labkit.ranks.job import Job, Life

LINES = 10  # of the last output, shown with an error


class Ranks:
    """What came of ranks that all ended well. Lists are in the order of the ranks; of several machines, this one's.

    Attributes:
        results: the plain data that each rank's script left in its variable `result`, or None.
        outputs: all that each printed to stdout and stderr, in order; of very much, the first and the last part.
        exit_codes: 0 each.
        restarts: why torchrun started all ranks again, a sentence each time.
        command: what does the same in a terminal, without this kit; on several machines, the same on each.
    """

    def __init__(self, job: Job, command: str) -> None:
        last = job.attempts()[-1]
        self.results = [(life.report or {})["result"] for life in last]
        self.outputs = [life.text for life in last]
        self.exit_codes = [0 for _ in last]
        self.restarts = _restarts(job)
        self.command = command

    def __repr__(self) -> str:
        count, again = len(self.results), len(self.restarts)
        return f"<Ranks: {count} ended well{f', after {again} restart' + 's' * (again > 1) if again else ''}>"


class TorchrunError(Exception):
    """The ranks did not all end well. The note shows the traceback, or the last lines, of the rank that failed first.

    Attributes:
        kind: "exception", "exit", "signal", "crash", "result", "timeout", "join", "port" or "start".
        rank: the rank that failed first, or None.
        outputs: as in `Ranks`, each with the traceback that ended it; "" for a rank that never came to its script.
        exit_codes: None for a rank that never ended by itself, or never came to its script; negative: by that signal. torchrun ends the
            others with SIGTERM (-15).
        restarts: as in `Ranks`.
    """

    def __init__(self, message: str, kind: str = "", rank: int | None = None, job: Job | None = None) -> None:
        super().__init__(message)
        last = _last(job) if job is not None and job.lives else []
        self.kind, self.rank = kind, rank
        self.outputs = ["" if life is None else life.text for life in last]
        self.exit_codes = [None if life is None else _exit_code(life) for life in last]
        self.restarts = [] if job is None else _restarts(job)


def _last(job: Job) -> list[Life | None]:
    """The ranks of this machine in the last attempt, in order; None for one that was not there yet when another had failed."""
    lives = {life.rank: life for life in job.attempts()[-1]}
    first = min(lives) // job.expected * job.expected
    return [lives.get(rank) for rank in range(first, first + job.expected)]


def _exit_code(life: Life) -> int | None:
    return 0 if life.well else life.exit_code


def _restarts(job: Job) -> list[str]:
    first = [job.first_failed(attempt) for attempt in range(len(job.attempts()) - 1)]
    return ["a rank elsewhere failed." if life is None else ended(life)[1] for life in first]


def ended(life: Life) -> tuple[str, str]:
    """The kind and the message for a rank that failed."""
    name, report = f"rank {life.rank}", life.report
    if report is not None and report["ended"] == "raised":
        said = _first_sentence(report["text"]).rstrip(".")
        line = f" (line {report['line']})" if report["line"] else ""
        return "exception", f"{name} raised {report['type']}{': ' * bool(said)}{said}{line}."
    if report is not None and report["ended"] == "exit":
        return "exit", f"{name} called sys.exit({report['text']})."
    if report is not None and report["ended"] == "result":
        return "result", (
            f"{name}'s variable `result` cannot be sent ({report['text']}): leave plain data in it (numbers, strings, lists, dicts, "
            "tensors), or give it another name."
        )
    if life.exit_code is None:
        return "exit", f"{name} ended without a word: it was killed, or called os._exit."
    return endings.died(name, life.exit_code)


def _first_sentence(text: str) -> str:
    """Of a message's first line, where that is long. PyTorch's C++ begins with its own file and line."""
    line = re.sub(r"^\[\S+:\d+\] ", "", text.strip().split("\n")[0])
    return line if len(line) <= 120 else line.split(". ")[0]


def outcome(job: Job, command: str, timeout: float | None) -> Ranks:
    """Raises TorchrunError unless all ranks ended well."""
    attempts = job.attempts()
    if job.refused is not None and not job.failed:
        kind, why = job.refused
        raise TorchrunError(f"{why.rstrip('.')}." if why else _not_come(job), kind, job=job)
    if job.late:
        raise _too_late(job, timeout)
    if attempts and len(attempts[-1]) == job.expected and all(life.well for life in attempts[-1]):
        return Ranks(job, command)
    first = job.first_failed(len(attempts) - 1)
    if first is None:
        error = TorchrunError("torchrun ended before its ranks did.", "start", job=job)
        _add_lines(error, "torchrun", job.said.text())
        raise error
    raise _failed(job, first)


def _failed(job: Job, first: Life) -> TorchrunError:
    kind, message = ended(first)
    if first.left:
        message += f" By then {_listed(first.left)} had ended."
    elif job.request["nodes_here"] < job.request["nodes"] and first.complains:
        message += " Perhaps a rank on another machine ended first: look there."
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


def _too_late(job: Job, timeout: float | None) -> TorchrunError:
    if not job.lives:
        return TorchrunError("torchrun did not start the ranks in time.", "start", job=job)
    places: dict[str, list[int]] = {}
    for life in job.attempts()[-1]:
        places.setdefault(_place(job, life), []).append(life.rank)
    told = "; ".join(f"{_listed(ranks)} {place}" for place, ranks in places.items())
    return TorchrunError(f"the ranks took longer than {timeout:g} s and were stopped. Then {told}.", "timeout", job=job)


def _not_come(job: Job) -> str:
    request = job.request
    limit = f"within {request['join_timeout']:g} s: start the same command on"
    if not job.met:
        return f"nobody answered at {request['endpoint']} {limit} the machine with that address."
    return f"not all of the {request['nodes']} nodes came {limit} the other machines."


def _place(job: Job, life: Life) -> str:
    """What this rank did when the time was over: its innermost line in the script."""
    if life.rank not in job.stacks:
        return "had ended"
    script = re.escape(job.request["script"])
    found = re.search(rf'^  File "{script}", line (\d+) in', job.stacks[life.rank], re.MULTILINE)
    if found is None:
        return "ran"
    return f"ran line {found[1]}, `{linecache.getline(job.request['script'], int(found[1])).strip()}`"


def _listed(ranks: list[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1 and 3"."""
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
