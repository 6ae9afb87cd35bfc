"""Commands `python -m labkit course release`, `collect` and `grade`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labcourse.assignment import Course
    from labcourse.collect import Problem
    from virtualgpu.options import CommandParser

COURSE_FILE = "course.toml"
BAR = 24  # characters
LONGEST_LINE = 10_000  # characters


def add_to(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `course`, which has three commands of its own, to those of `labkit`.

    `labkit` finds this function by its name.
    """
    text = "Hand out, collect and grade the lessons' exercises in a course."
    parser = subparsers.add_parser("course", help=text, description=text)
    parser.epilog = (
        "The course is described in a file, course.toml, in the folder from which the commands are "
        "called. docs/teaching.md explains it. Each command has --help."
    )
    parser.examples = {
        "release --to labs": "Write the notebooks of all labs into the folder labs.",
        "collect downloads.zip --to submitted": "Sort what the students handed in.",
        "grade submitted --out results": "Grade it, and write tables and pages into results.",
    }
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str) -> "CommandParser":
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=_run, does=run)
        made.add_argument(
            "--course",
            default=COURSE_FILE,
            metavar="FILE",
            help=f"the file that describes the course (default: {COURSE_FILE} in this folder)",
        )
        return made

    _add_release(
        command("release", _release, "Write notebooks for students, and for you with solutions.")
    )
    text = (
        "Find each student's notebooks in what was handed in. Report what is missing, handed in "
        "twice, renamed, too large, or not a notebook."
    )
    _add_collect(command("collect", _collect, text))
    text = (
        "Grade what was handed in, each submission in a sandbox. If grading was interrupted, the "
        "same command goes on where it stopped."
    )
    _add_grade(command("grade", _grade, text))


def _add_release(parser: "CommandParser") -> None:
    """Add the options of the command `release` to a parser."""
    parser.add_argument(
        "labs",
        nargs="*",
        metavar="LESSON",
        help="lessons, by number or name (default: all labs of the course)",
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder for the notebooks")
    parser.add_argument(
        "--format", default="labkit", help="labkit, nbgrader or gradescope (default: labkit)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and fail if DIR differs from what would be written",
    )
    parser.examples = {
        "--to labs": "Write all labs of course.toml into the folder labs.",
        "02 --to labs --course exam.toml": "Write one lab of another course file.",
        "02 03 --to labs --format nbgrader": "Write two labs for nbgrader.",
        "--to labs --format gradescope": "Also write an autograder of each lab.",
        "--check --to labs": "Say which notebooks in labs are out of date.",
    }


def _add_collect(parser: "CommandParser") -> None:
    """Add the options of the command `collect` to a parser."""
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder, a platform's zip file, or nbgrader's exchange"
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder for the submissions")
    _add_students(parser)
    parser.examples = {
        "downloads.zip --to submitted": "Sort a platform's zip file by lab and student.",
        "downloads.zip --to submitted --students students.csv": "Also report who is missing.",
        "exchange/inbound --to submitted": "Take the newest submissions from nbgrader.",
    }


def _add_grade(parser: "CommandParser") -> None:
    """Add the options of the command `grade` to a parser."""
    parser.add_argument(
        "source", metavar="SUBMISSIONS", help="what `collect` wrote, or any SOURCE of `collect`"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the folder for records, tables and pages"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="number of sandboxes that run at the same time (default: 1)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="tcp://…",
        help="address of a Dask scheduler whose workers grade the submissions",
    )
    parser.add_argument(
        "--sandbox",
        metavar="NAME",
        help="bubblewrap, unshare or none (default: bubblewrap). With unshare or none, "
        "submissions can READ and WRITE your files",
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="LAB/STUDENT",
        help="grade this submission again (may be repeated)",
    )
    parser.add_argument(
        "--dates",
        metavar="FILE",
        help="a CSV file that says when submissions arrived: columns student, lab and received",
    )
    _add_students(parser)
    parser.examples = {
        "submitted --out results --workers 4": "Grade four submissions at a time.",
        "submitted --out results --students students.csv": "Also list who is missing.",
        "submitted --out results --again 02/s017": "Grade one submission again.",
    }


def _add_students(parser: "CommandParser") -> None:
    """Add the option `--students` to a parser."""
    parser.add_argument(
        "--students",
        metavar="FILE",
        help="a CSV file with the students of the course, in a column `student`",
    )


def _run(options: argparse.Namespace) -> int:
    """Run a command, and return its exit status.

    An error that the user can correct is printed on one line.
    """

    from labcourse import assignment
    from labcourse.sandbox import SandboxError

    try:
        return options.does(options, assignment.read(Path(options.course)))
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"labkit course: {message}", file=sys.stderr)
        return 2
    except (ValueError, SandboxError, RuntimeError) as error:
        print(f"labkit course: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        line = "interrupted. Finished results are kept. The same command goes on from there."
        print(f"labkit course: {line}", file=sys.stderr)
        return 130  # the exit status that shells use for an interrupt


def _release(options: argparse.Namespace, course: "Course") -> int:
    """Write the notebooks of a release, or compare them with a folder."""
    from labcourse import gradescope, release

    labs = [course.lab(name) for name in options.labs] or list(course.labs)
    files: dict[str, str | bytes] = {}
    for count, lab in enumerate(labs, 1):
        if options.format == "gradescope":
            files |= gradescope.files(course, [lab])
        else:
            files |= release.files(course, [lab], options.format)
        _progress(f"read {lab.name}", count / len(labs))
    folder = Path(options.to)
    if options.check:
        drifted = release.drifted(files, folder)
        for line in drifted:
            print(line)
        unchanged = len(files) - len(drifted)
        print(f"{unchanged} of {len(files)} files are as a release would write them")
        return int(bool(drifted))
    release.write(files, folder)
    for name in files:
        print(f"wrote {folder / name}")
    if not course.install:
        print(
            "The notebooks do not say how to install the kit. To change that, give `install` in "
            'the course file, such as install = "git+https://…" with the address of the kit'
        )
    return 0


def _students(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the rows of the table of students, by their ids.

    The columns hold the names under which platforms know a student.
    """
    from labcourse import platforms, tables

    if not options.students:
        return {}
    rows = tables.read(Path(options.students), ["student"])
    return {platforms.normal(row["student"]): row for row in rows if row["student"].strip()}


def _collect(options: argparse.Namespace, course: "Course") -> int:
    """Collect submissions into a folder, and print what is wrong with them."""
    from labcourse import collect

    source, target = Path(options.source), Path(options.to)
    if target.exists() and target.resolve().is_relative_to(source.resolve()):
        reason = f"is inside {source} and would be collected too"
        raise ValueError(f"--to {target} {reason}. Choose a folder outside")
    submissions, problems = collect.collect(source, course, _students(options), report=_progress)
    collect.write(submissions, problems, target)
    _print(problems)
    print(f"{len(submissions)} submissions in {options.to}, {len(problems)} problems")
    return 0


def _print(problems: "list[Problem]") -> None:
    """Print the problems, with one line for all students who have the same problem."""
    from labcourse import sources

    students: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        key = (problem.kind, problem.lab, problem.detail)
        students.setdefault(key, []).append(problem.student)
    for (kind, lab, detail), names in students.items():
        about = " of ".join(part for part in (lab, ", ".join(filter(None, names))) if part)
        print(sources.shown(f"{kind}: {about}: {detail}", LONGEST_LINE))


def _grade(options: argparse.Namespace, course: "Course") -> int:
    """Grade the submissions that have no result yet, and write all tables and pages."""
    from labcourse import collect, grading, marks, results

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: expected 1 or more")
    students = _students(options)
    dates = {}
    if options.dates:
        if not Path(options.dates).exists():
            raise ValueError(f"--dates {options.dates}: there is no such file")
        dates = marks.read_dates(Path(options.dates))
    source, target = Path(options.source), Path(options.out)
    submissions, problems = collect.collect(source, course, students, report=_progress)
    store = grading.Store(target)
    count = grading.grade_all(
        course,
        submissions,
        store,
        options.workers,
        options.scheduler,
        options.sandbox,
        _progress,
        options.again,
    )
    results.write(course, submissions, problems, store, students, dates, _progress)
    kept = len(submissions) - count
    counts = f"{count} graded now, {kept} graded before, {len(problems)} problems"
    print(f"{counts}. See {target / 'index.html'}")
    return 0


def _progress(line: str, done: float | None = None) -> None:
    """Print a line for each step, or draw one progress bar in a terminal.

    `done` is the finished share, from 0 to 1.
    """
    if done is None or not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    bar = ("█" * int(BAR * done)).ljust(BAR, "░")
    end = "\n" if done == 1 else ""
    print(f"\r{bar} {line[:100]}\x1b[K", end=end, file=sys.stderr, flush=True)
