"""Break one rule of the kit at a time, and report which tests notice the fault.

    python tools/planted_faults.py [NUMBER, ROOM or part of a NAME …]

The default is all faults. --list names them. planted_faults.toml has the faults by room and by
file. A fault has a name, a text that is in the file once, and its replacement. Each fault is
planted in a copy of the tracked files. There the fast tests of the fault's room run. If they notice
nothing, the fast tests of all rooms run, and then the slow tests of the room. At the end, the tests
that noticed a fault run once more without any fault, and must pass. A fault that keeps a test file
from being imported is unfair, because it breaks more than a rule. The exit status is 1 unless the
fast tests notice every fault.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
FAST: tuple[str, ...] = ()  # `make unit` and `make unit-packages`
SLOW = ("--everything", "-m", "not browser and not platform")  # `make unit-all`
ONE_TEST = 60  # seconds: a fault may make a test wait for ever
OF_A_ROOM, OF_ALL = 300, 1200  # seconds for its tests
# where the packages lie
PLACES = (
    ".",
    *(f"packages/{name}/src" for name in ("virtualgpu", "gputrace", "labcourse")),
)
EVERY_TEST = ("tests", "packages")
# This test compares the table with the code, so it would notice every fault.
OWN_TEST = "tests/test_planted_faults.py"
SAID = "said.txt"  # what pytest prints
# Imported once, for all runs of the tests.
SLOW_TO_IMPORT = (
    "torch",
    "IPython",
    "hypothesis",
    "ipywidgets",
    "jupyter_client",
    "matplotlib.figure",
    "nbformat",
    "psutil",
)
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"


@dataclass(frozen=True)
class Fault:
    """A fault to plant: `wrong` replaces `right`, which is in `file` once, and breaks a rule.

    `tests` are the files and folders that test the room.
    """

    number: int
    room: str
    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises ValueError if the table is out of date.
        """
        if text.count(self.right) != 1 or self.right == self.wrong:
            raise ValueError(
                f"{self.name!r}: {self.right!r} stands {text.count(self.right)} times in "
                f"{self.file}, not once: mend {TABLE.name}"
            )
        return text.replace(self.right, self.wrong)


@dataclass(frozen=True)
class Found:
    """The tests that noticed a fault, and the one that failed first.

    `by` is "the fast tests", "the slow tests", "nothing", or why this is not known.
    """

    by: str
    test: str = ""


def faults() -> list[Fault]:
    """Return all faults of the table, numbered from 1."""
    found: list[Fault] = []
    for room, content in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        tests = tuple(content.pop("tests"))
        for file, planted in content.items():
            for name, (right, wrong) in planted.items():
                found.append(Fault(len(found) + 1, room, name, file, right, wrong, tests))
    return found


def chosen(wanted: list[str]) -> list[Fault]:
    """Return the faults with these numbers and names. Raises SystemExit for anything else."""
    listed = faults()
    for text in wanted:
        if not any(meant(text, fault) for fault in listed):
            raise SystemExit(
                f"no fault has the number, the room or the name {text!r}; --list shows them"
            )
    return [f for f in listed if not wanted or any(meant(text, f) for text in wanted)]


def meant(text: str, fault: Fault) -> bool:
    if text.isdecimal():
        return int(text) == fault.number
    return text == fault.room or text.lower() in fault.name.lower()


def copy_tree(folder: Path) -> None:
    """Copy the tracked files, in their current state, to a folder."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(
    tree: Path, tests: tuple[str, ...], which: tuple[str, ...], seconds: float, *options: str
) -> tuple[list[str], str]:
    """Return the tests that fail, and why the result is not known, if so.

    It is not known if tests cannot be imported or take too long.
    """
    told = tree / ".faults"  # pytest's cache, which names the tests that failed
    shutil.rmtree(told, ignore_errors=True)
    how = [
        "-q",
        "-W",
        IMPORTED,
        f"--timeout={ONE_TEST}",
        "-o",
        f"cache_dir={told}",
        f"--ignore={OWN_TEST}",
        *which,
    ]
    status = forked(tree, [*how, *options, *tests], seconds)
    last = told / "v" / "cache" / "lastfailed"
    failed = []
    if last.exists():
        failed = list(json.loads(last.read_text()))
    if status is None:
        return [], f"the tests took longer than {seconds:g} s"
    if unread := [test for test in failed if "::" not in test]:
        return [], f"not a fair fault: {unread[0]} cannot be imported"
    if not failed and status not in (0, 5):  # 5: there are no such tests
        return [], f"pytest ended with status {status}: {last_line(tree / SAID)}"
    return failed, ""


def forked(tree: Path, arguments: list[str], seconds: float) -> int | None:
    """Run pytest in a fork of this process. Return its exit status, or None if it took too long.

    This process has imported torch, but nothing of the kit.
    """
    pid = os.fork()
    if not pid:
        status = 70
        try:
            status = _pytest(tree, arguments)
        finally:
            os._exit(status)
    status, until = None, time.monotonic() + seconds
    try:
        while status is None and time.monotonic() < until:
            ended, how = os.waitpid(pid, os.WNOHANG)
            status = None
            if ended:
                status = os.waitstatus_to_exitcode(how)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what it has started
    if status is None:
        os.waitpid(pid, 0)
    return status


def _pytest(tree: Path, arguments: list[str]) -> int:
    os.setsid()
    os.chdir(tree)
    with open(SAID, "wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    places = [str(tree / place) for place in PLACES]
    sys.path[:1] = places
    # of what tests start
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*places, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    try:
        return int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
        raise


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip() or "it said nothing").splitlines()[-1]


def tried(fault: Fault, tree: Path, room_only: bool) -> Found:
    """Plant a fault, run the tests, and take it out again."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(text), encoding="utf-8")
    parallel = ("-n", "auto", "--maxprocesses", "4")
    runs = (
        ("the fast tests", fault.tests, FAST, OF_A_ROOM, ("-n", "0")),
        ("the fast tests", EVERY_TEST, FAST, OF_ALL, parallel),
        ("the slow tests", fault.tests, SLOW, OF_ALL, parallel),
    )
    try:
        for by, tests, which, seconds, options in runs[:1] if room_only else runs:
            failed, trouble = run(tree, tests, which, seconds, "-x", *options)
            if failed or trouble:
                return Found(trouble or by, failed[0] if failed else "")
        return Found("nothing")
    finally:
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "wanted", nargs="*", metavar="FAULT", help="a number, a room, or a part of a name"
    )
    parser.add_argument("--list", action="store_true", help="name the faults and try none")
    parser.add_argument(
        "--room-only",
        action="store_true",
        help="run the fast tests of each fault's room, and no others",
    )
    options = parser.parse_args(arguments)
    listed = chosen(options.wanted)
    width = max(len(fault.name) for fault in listed)
    for fault in listed:
        # all of them, before the first one runs
        fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
    if options.list:
        print(*(f"{fault.number:3}  {fault.room:10}  {fault.name}" for fault in listed), sep="\n")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in SLOW_TO_IMPORT:
        import_module(name)
    found: dict[Fault, Found] = {}
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        for fault in listed:
            found[fault] = tried(fault, tree, options.room_only)
            seen = found[fault]
            print(
                f"{fault.number:3}  {fault.room:10}  {fault.name:{width}}  "
                f"{seen.by:13}  {seen.test}".rstrip(),
                flush=True,
            )
        noticing = tuple(dict.fromkeys(seen.test for seen in found.values() if seen.test))
        failing, trouble = run(tree, noticing, FAST, OF_ALL, "-n", "0") if noticing else ([], "")
    missed = [
        fault
        for fault, seen in found.items()
        if seen.by != "the fast tests" or seen.test in failing
    ]
    for test in failing:
        print(f"fails without any fault: {test}")
    if trouble:
        print(f"without any fault: {trouble}")
    print(f"\nThe fast tests notice {len(listed) - len(missed)} of {len(listed)} faults.")
    return int(bool(missed or trouble))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
