"""Run PyTorch's own tests and databases on virtual GPUs, and count how many pass and why not.

    python benchmarks/conformance.py PATH … [--gpus 2] [--like H200]
    [--seconds 30] [-k WORDS] [--list FILE]

A path is a file of PyTorch's tests, such as test/test_cuda.py of its repository. It may also be the
recorded output of a real GPU for the program of the same name in the same folder (nnopt.json for
nnopt.py, or opdb_memory.json for opdb.py memory).

If a child process that runs tests crashes, or prints nothing for --seconds, it is ended, and
another child runs the remaining tests. Tests that need nvcc, Triton, NCCL's library or a network
are counted separately. Tests that take over 30 s are listed with their seconds.
"""

import argparse
import collections
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REFUSED = "is not supported by the virtual GPU"
APART = {
    "nvcc": r"nvcc|CUDA_HOME|\bninja\b|libcudart|nvrtc|cuda_runtime|C\+\+ compiler",
    "Triton": r"[Tt]riton",
    "NCCL's library": r"libnccl|is_nccl_available|built with NCCL",
    "a network": r"URLError|ConnectionError|getaddrinfo|Name or service not known",
}
COLUMNS = ("passed", "failed", "refused", "skipped", "apart")
PHASE = re.compile(r" (built|forward|backward|first step|second step)\b")
FINISHED = "finished"
SLOW = 30.0  # seconds
NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--gpus", default="2")
    parser.add_argument("--like", default="H200")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds after which a silent test is ended"
    )
    parser.add_argument(
        "-k",
        default="",
        metavar="WORDS",
        help="run only tests whose names contain one of these words, separated by commas",
    )
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="write each test's outcome to this file, with the tracebacks of failures",
    )
    parser.add_argument("--child", type=Path, metavar="DONE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run_tests(options.paths[0], options.k, options.child)
        return
    rows, reasons, listed, slow = [], {}, [], []
    for path in options.paths:
        database = path.suffix == ".json"
        outcomes = list((of_database if database else of_file)(path, options))
        # The files of a database, by phase (forward, backward).
        parts: dict[str, collections.Counter[str]] = {}
        for case, outcome, *_ in outcomes:
            phase = PHASE.search(case) if database else None
            parts.setdefault(path.name + (phase[0] if phase else ""), collections.Counter())[
                outcome
            ] += 1
        rows += [(part, *(counts[column] for column in COLUMNS)) for part, counts in parts.items()]
        reasons[path.name] = collections.Counter(
            (outcome, kind_of(text))
            for _, outcome, text, _ in outcomes
            if outcome in ("failed", "refused", "apart")
        )
        listed += [
            f"{outcome:8s} {path.name} {name} {seconds:.1f} s\n{text}\n"
            for name, outcome, text, seconds in outcomes
        ]
        slow += [
            f"{path.name}: {seconds:4.0f} s: {name} ({outcome})"
            for name, outcome, _, seconds in outcomes
            if seconds > SLOW
        ]
    print(f"{'':32s}" + "".join(f"{column:>9s}" for column in COLUMNS))
    for name, *numbers in rows:
        print(f"{name:32s}" + "".join(f"{count:9d}" for count in numbers))
    for name, kinds in reasons.items():
        for (outcome, kind), count in kinds.most_common():
            print(f"{name}: {count:4d} {outcome}: {kind}")
    print(*slow, sep="\n", end="\n" if slow else "")
    if options.list is not None:
        options.list.write_text("\n".join(listed))


def kind_of(text: str) -> str:
    """Return an error's last line without its numbers, for counting similar errors."""
    lines = [
        line
        for line in text.splitlines()
        if re.match(r"\w[\w.]*(Error|Exception|Warning|Interrupt|Exit)\b|crash|hang", line)
    ]
    if not lines:
        lines = text.strip().splitlines() or ["no words"]
    return NUMBER.sub("#", lines[-1])[:160]


# Files of tests


def of_file(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, str, float]]:
    """Yield (test, outcome, text, seconds) for each test of a file.

    The tests run in child processes, one after the other.
    """
    done: set[str] = set()
    while True:
        before = len(done)
        ended, rest, seconds = yield from in_child(path, options, done)
        if rest is not None:
            done.add(rest)
            yield rest, "failed", ended, seconds
        elif ended == FINISHED:
            return
        elif len(done) == before:
            raise SystemExit(f"{path}: a child ended between tests ({ended})")


def in_child(path: Path, options: argparse.Namespace, done: set[str]) -> Any:
    """Run a file's tests in a child, and yield the child's messages.

    Return how it ended, the test that was running, and for how long.
    """
    heard, said = os.pipe()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as known:
        json.dump({"done": sorted(done), "to": said}, known)
        known.flush()
        run = [
            sys.executable,
            "-m",
            "virtualgpu",
            "run",
            "--gpus",
            options.gpus,
            "--like",
            options.like,
            __file__,
        ]
        child = subprocess.Popen(
            [*run, "--child", known.name, str(path), "-k", options.k],
            pass_fds=[said],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("CONFORMANCE_ERRORS") else subprocess.DEVNULL,
        )
        os.close(said)
        under_way, ended, started = None, "", time.monotonic()
        # unbuffered, because select does not see lines that are in a buffer
        with os.fdopen(heard, "rb", 0) as lines:
            while True:
                if not select.select([lines], [], [], options.seconds if under_way else 300)[0]:
                    ended = f"hang: over {options.seconds:.0f} s"
                    break
                if not (line := lines.readline()):
                    break
                name, outcome, text = json.loads(line)
                if outcome == FINISHED:
                    ended = FINISHED
                    break
                seconds, started = time.monotonic() - started, time.monotonic()
                under_way = name if outcome == "starts" else None
                if outcome != "starts":
                    done.add(name)
                    yield name, outcome, text, seconds
        if ended:
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        ended = (
            ended
            or f"crash: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
        )
        return ended, under_way, time.monotonic() - started


class Told(unittest.TestResult):
    """A test result that sends each test's outcome at once."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self.to = os.fdopen(to, "w", buffering=1)
        self.told: tuple[str, str] = ("passed", "")

    def tell(self, test: Any, outcome: str, text: str = "") -> None:
        self.to.write(json.dumps([test.id(), outcome, text[-6000:]]) + "\n")

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.told = ("passed", "")
        self.tell(test, "starts")

    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        self.tell(test, *self.told)

    def addSkip(self, test: Any, reason: str) -> None:
        self.told = ("skipped", reason)

    def addError(self, test: Any, error: Any) -> None:
        text = "".join(traceback.format_exception(*error))
        needs = next(
            (need for need, words in APART.items() if re.search(words, text.splitlines()[-1])), None
        )
        self.told = (
            ("apart", f"needs {needs}")
            if needs
            else ("refused" if REFUSED in text else "failed", text)
        )

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.told = ("failed", "a GPU fails here")

    def addFailure(self, test: Any, error: Any) -> None:
        self.addError(test, error)

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self.addError(test, error)


def run_tests(path: Path, words: str, known: Path) -> None:
    """Import the file in a child and run its tests, except those that are done."""
    import torch

    told = json.loads(known.read_text())
    torch.manual_seed(0)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = Told(told["to"])
    os.set_inheritable(told["to"], False)

    cases = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, unittest.TestCase) and x.__module__ == path.stem
    ]
    # not the module's own protocol, which needs to be the running script
    load: Any = unittest.defaultTestLoader.loadTestsFromTestCase
    chosen = [
        test
        for case in cases
        for test in iter(load(case))
        if test.id() not in told["done"] and any(word in test.id() for word in words.split(","))
    ]
    unittest.TestSuite(chosen).run(result)
    result.to.write(json.dumps(["", FINISHED, ""]) + "\n")
    os._exit(0)  # what a failed test left behind must not keep this process alive


# Databases


def of_database(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, str, float]]:
    """Yield (case, outcome, text, 0 seconds) for each recorded figure of a real GPU.

    The program that recorded them runs again on virtual GPUs.
    """
    program, _, what = path.stem.partition("_")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        run = [
            sys.executable,
            "-m",
            "virtualgpu",
            "run",
            "--like",
            options.like,
            str(path.with_name(f"{program}.py")),
            str(out),
        ]
        subprocess.run(
            [*run, *filter(None, [what])],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        there, here = json.loads(path.read_text()), json.loads(out.read_text())
    real, virtual = answers(there), answers(here)
    for case, answer in real.items():
        yield (
            case,
            *compared(case, answer, virtual.get(case, virtual.get(PHASE.sub("", case)))),
            0.0,
        )


def answers(database: dict[str, Any]) -> dict[str, Any]:
    """Return the samples by name, each with a peak of memory or the first line of an error."""
    found: dict[str, Any] = {}
    if "results" in database:
        for operator, (_, samples) in database["results"].items():
            for number, sample in enumerate(samples if isinstance(samples, list) else ()):
                phase = "backward" if sample[0] == "grad" else "forward"
                figure = (
                    " ".join(sample[:2]).splitlines()[0]
                    if isinstance(sample[0], str) and sample[0] != "grad"
                    else sample
                )
                found[f"{operator} {phase} {number}"] = (
                    figure if isinstance(figure, str) else sample[2 if phase == "backward" else 1]
                )
        return found
    for kind, phases in (
        ("modules", ("built", "forward", "backward")),
        ("optimizers", ("first step", "second step")),
    ):
        for name, samples in database.get(kind, {}).items():
            for number, sample in enumerate(samples if isinstance(samples, list) else ()):
                if len(sample) == 2:
                    found[f"{name} {number}"] = sample[1]
                else:
                    found |= {
                        f"{name} {number} {phase}": x[1]
                        for phase, x in zip(phases, sample[1:], strict=False)
                        if x
                    }
    return found


def compared(case: str, real: Any, virtual: Any) -> tuple[str, str]:
    if virtual is None:
        return "skipped", ""
    if isinstance(virtual, str) and not isinstance(real, str):
        return "refused", virtual
    raised = isinstance(real, str) and isinstance(virtual, str)
    # errors of the same class
    same = re.split(r"\W", real)[0] == re.split(r"\W", virtual)[0] if raised else real == virtual
    return (
        ("passed", "")
        if same
        else ("failed", f"{case.rpartition(' ')[0]}: {real} on a GPU, {virtual} here")
    )


if __name__ == "__main__":
    main()
