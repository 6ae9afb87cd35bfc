"""The commands `python -m labkit course release`, `collect` and `grade`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labcourse.assignment import Course
    from labcourse.collect import Problem
    from virtualgpu.options import CommandParser

COURSE_FILE = "course.toml"
BAR = 24  # characters


def add_to(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """The command `course` of `python -m labkit`, which finds it by this function's name: three commands and their options."""
    text = "Hand out, collect and grade the lessons' exercises in a course."
    parser = subparsers.add_parser("course", help=text, description=text)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    texts = {
        "release": "Write the notebooks that students get, and the instructor's with the solutions.",
        "collect": "Bring together what was handed in, and say what is missing, twice there, renamed, no notebook, or too large.",
        "grade": "Grade what was handed in, each submission in a sandbox. Started again, it goes on where it was.",
    }
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in texts.items()}
    for name, command in made.items():
        command.set_defaults(command=_run, does={"release": _release, "collect": _collect, "grade": _grade}[name])
        command.add_argument(
            "--course", default=COURSE_FILE, metavar="FILE", help=f"the course's description (default: {COURSE_FILE}, here)"
        )
    made["release"].add_argument("labs", nargs="*", metavar="LESSON", help="lessons, by number or name (default: all labs of the course)")
    made["release"].add_argument("--to", required=True, metavar="DIR", help="where the notebooks go")
    made["release"].add_argument("--format", default="labkit", help="labkit, nbgrader or gradescope (default: labkit)")
    made["release"].add_argument("--check", action="store_true", help="write nothing; fail if DIR is not what would be written now")
    made["collect"].add_argument("source", metavar="SOURCE", help="a folder, a zip file of a platform, or nbgrader's exchange")
    made["collect"].add_argument("--to", required=True, metavar="DIR", help="where the submissions go")
    made["grade"].add_argument("source", metavar="SUBMISSIONS", help="what `collect` wrote, or any of its sources")
    made["grade"].add_argument("--out", required=True, metavar="DIR", help="where records, tables and pages go")
    made["grade"].add_argument("--workers", type=int, default=1, metavar="N", help="sandboxes at the same time (default: 1)")
    made["grade"].add_argument("--scheduler", metavar="tcp://…", help="a Dask scheduler, whose workers do the work")
    weaker = "bubblewrap; unshare or none, where submissions can READ and WRITE your files (default: bubblewrap)"
    made["grade"].add_argument("--sandbox", metavar="NAME", help=weaker)
    made["grade"].add_argument("--again", action="append", default=[], metavar="LAB/STUDENT", help="grade this one anew; may be repeated")
    made["grade"].add_argument("--dates", metavar="FILE", help="a CSV file with student, lab and received: when submissions came")
    for name in ("collect", "grade"):
        made[name].add_argument("--students", metavar="FILE", help="a CSV file with a column `student`: who is in the course")


def _run(options: argparse.Namespace) -> int:
    from labcourse import assignment
    from labcourse.sandbox import SandboxError

    try:
        return options.does(options, assignment.read(Path(options.course)))
    except OSError as error:
        print(f"labkit course: {error.filename}: {error.strerror}" if error.filename else f"labkit course: {error}", file=sys.stderr)
        return 2
    except (ValueError, SandboxError, RuntimeError) as error:
        print(f"labkit course: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("labkit course: interrupted. What was done stays; the same command goes on from there.", file=sys.stderr)
        return 130  # as a shell reports it


def _release(options: argparse.Namespace, course: "Course") -> int:
    from labcourse import gradescope, release

    labs = [course.lab(name) for name in options.labs] or list(course.labs)
    files: dict[str, str | bytes] = {}
    for count, lab in enumerate(labs, 1):
        is_gradescopes = options.format == "gradescope"
        files |= gradescope.files(course, [lab]) if is_gradescopes else release.files(course, [lab], options.format)
        _progress(f"{lab.name} is read", count / len(labs))
    folder = Path(options.to)
    if options.check:
        drifted = release.drifted(files, folder)
        for line in drifted:
            print(line)
        print(f"{len(files) - len(drifted)} of {len(files)} files are as they should be")
        return 1 if drifted else 0
    release.write(files, folder)
    for name in files:
        print(f"wrote {folder / name}")
    return 0


def _students(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The rows of the table of students by their ids: the columns are what platforms know them by."""
    from labcourse import platforms, tables

    rows = tables.read(Path(options.students), ["student"]) if options.students else []
    return {platforms.normal(row["student"]): row for row in rows if row["student"].strip()}


def _collect(options: argparse.Namespace, course: "Course") -> int:
    from labcourse import collect

    source, target = Path(options.source), Path(options.to)
    if target.exists() and target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"--to {target} lies inside {source} and would be collected too. Choose a folder beside it")
    submissions, problems = collect.collect(source, course, _students(options), report=_progress)
    collect.write(submissions, problems, target)
    _print(problems)
    print(f"{len(submissions)} submissions in {options.to}, {len(problems)} remarks")
    return 0


def _print(problems: "list[Problem]") -> None:
    from labcourse import sources

    for problem in problems:
        about = f"{problem.student} {problem.lab}".strip()
        print(sources.shown(f"{problem.kind}: {about}: {problem.detail}", 1000))


def _grade(options: argparse.Namespace, course: "Course") -> int:
    from labcourse import collect, grading, marks, results

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: choose 1 or more")
    students = _students(options)
    dates = marks.read_dates(Path(options.dates)) if options.dates else {}
    submissions, problems = collect.collect(Path(options.source), course, students, report=_progress)
    store = grading.Store(Path(options.out))
    count = grading.grade_all(course, submissions, store, options.workers, options.scheduler, options.sandbox, _progress, options.again)
    results.write(course, submissions, problems, store, students, dates, _progress)
    print(f"{count} graded, {len(submissions) - count} kept, {len(problems)} remarks: see {Path(options.out) / 'index.html'}")
    return 0


def _progress(line: str, done: float | None = None) -> None:
    """A line for each step; in a terminal one bar that grows."""
    if done is None or not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    bar = ("█" * int(BAR * done)).ljust(BAR, "░")
    print(f"\r{bar} {line[:100]}\x1b[K", end="\n" if done == 1 else "", file=sys.stderr, flush=True)
