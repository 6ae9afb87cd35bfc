"""`labkit top`: what the scripts and notebooks with GPUs do now, and what NVML measures.

Each process with GPUs of the kit has a socket on which it answers who asks, as for the virtual
GPUs' nvidia-smi (`virtualgpu.driver.smi`). Nothing is written or counted while nobody asks.
"""

import os
import socket
import sys
import tempfile
import textwrap
from typing import Any

from gputrace.units import byte_text
from labkit import nvidia
from labkit.ranks import short_folder
from virtualgpu.driver import smi

PATIENCE = 2.0  # seconds for a process to answer
REFRESH = 1000  # milliseconds between two pictures
BAR = 20  # characters
# The report of each process by its id, and sentences about those that gave none.
Answers = tuple[dict[int, dict[str, Any]], list[str]]
NOTHING = (
    "Nothing with GPUs of the kit runs. Start a script in another terminal, for example with "
    "`labkit run train.py`."
)
WHOSE = (
    "Start a script with labkit run, trace or torchrun, or call labkit.use in it, to see it here."
)


def main(pid: int | None, once: bool) -> int:
    """Show the state of processes with GPUs until the user ends the view. Return the exit status.

    Args:
        pid: the process to show. None shows all.
        once: print the state once instead.
    """
    if not hasattr(socket, "AF_UNIX"):
        print("labkit top: this system has no local sockets, which it needs", file=sys.stderr)
        return 1
    smi.remove_abandoned()
    answers = ask_all()
    trouble = missing(pid, answers)
    if trouble:
        print(f"labkit top: {trouble}", file=sys.stderr)
        return 1
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print(picture(pid, answers=answers))
    try:
        return _watch(pid)
    except KeyboardInterrupt:
        return 0


def _print(lines: list[str]) -> int:
    """Print lines to a program that may end early, such as `head`. Return the exit status."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # When Python ends, it writes what is left. This must go elsewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def missing(pid: int | None, answers: Answers) -> str:
    """Return why the process `pid` cannot be shown, or "".

    The text is "" if the process answers, or if `pid` is None.
    """
    reports, remarks = answers
    if pid is None or pid in reports:
        return ""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return f"there is no process {pid}. {WHOSE}"
    except PermissionError:
        return f"process {pid} belongs to another user. Only your own processes can be shown."
    return " ".join([f"process {pid} shows no GPUs of the kit. {WHOSE}", *remarks])


def _has_ended(pid: int | None, answers: Answers) -> bool:
    """Return whether the process `pid` has ended.

    A missing answer is not enough, because a busy process does not answer, either.
    """
    reports, remarks = answers
    if pid is None or pid in reports:
        return False
    if not remarks:  # all processes have answered
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ask_all() -> Answers:
    """Return the report of each process by its id, and sentences about those that gave none."""
    reports: dict[int, dict[str, Any]] = {}
    silent = others = 0
    for address in smi.addresses(short_folder() or tempfile.gettempdir()):
        try:
            report = smi.ask(address, PATIENCE)
        except TimeoutError:
            silent += 1
            continue
        except smi.MistakeError:
            continue  # it has just ended
        if "process" not in report:
            others += 1
            continue
        pid = report["process"]["pid"]
        if report["virtual"] or pid not in reports:  # virtual GPUs hide the real ones
            reports[pid] = report
    remarks = []
    if silent:
        remarks.append(f"Processes that do not answer, because they are stopped or busy: {silent}.")
    if others:
        remarks.append(f"Processes with another version of the kit, not shown: {others}.")
    return dict(sorted(reports.items())), remarks


def picture(pid: int | None, width: int | None = None, answers: Answers | None = None) -> list[str]:
    """Return the state of all processes, or of one, as lines of at most `width` characters.

    The processes are asked, unless their answers are given.
    """
    if answers is None:
        answers = ask_all()
    reports, remarks = answers
    lines = []
    for number, report in reports.items():
        if pid in (None, number):
            lines += [*described(report), ""]
    measured = nvidia.readings()
    if measured:
        lines.append("GPUs of this computer, measured by NVML")
        lines += [_measured(index, reading) for index, reading in enumerate(measured)]
    if pid is not None and pid not in reports:
        lines.append(f"Process {pid} does not answer now.")
    elif not reports:
        lines.append(NOTHING)
    lines += remarks
    while not lines[-1]:
        lines.pop()
    return _wrapped(lines, width)


def described(report: dict[str, Any]) -> list[str]:
    """Return the lines of text about one process, given its report."""
    process, virtual = report["process"], report["virtual"]
    title = f"{process['program']} (process {process['pid']})"
    if process["rank"]:
        title += ", rank {} of {}".format(*process["rank"])
    line = "  no line of yours runs at this moment"
    if process["line"]:
        line = "  runs {}: {}".format(*process["line"])
    lines = [title, line]
    for gpu in report["gpus"]:
        holders = {holder: nbytes for holder, _, nbytes in gpu.get("processes", ())}
        if process["rank"] and holders and process["pid"] not in holders:
            continue  # a GPU of another rank
        if virtual:
            lines += _virtual(gpu)
            for holder, nbytes in holders.items():
                if holder != process["pid"]:
                    lines.append(f"    process {holder} holds {byte_text(nbytes)} of it, too")
        elif gpu["reserved"]:
            lines += _real(gpu)
    if len(lines) == 2:
        lines.append("  no memory on a GPU")
    return lines


def _virtual(gpu: dict[str, Any]) -> list[str]:
    """Return the lines of text about a virtual GPU, given the report about it."""
    busy = ", ".join(gpu["streams"]) or "none"
    return [
        f"  cuda:{gpu['index']} {gpu['name']} (virtual)",
        f"    {_bar(gpu['used'], gpu['total'])}",
        f"    tensors {byte_text(gpu['allocated'])}, reserved {byte_text(gpu['reserved'])}",
        f"    busy streams: {busy}",
    ]


def _real(gpu: dict[str, Any]) -> list[str]:
    """Return the lines of text about a real GPU, given the report about it."""
    return [
        f"  cuda:{gpu['index']} {gpu['name']} (measured)",
        f"    tensors {byte_text(gpu['allocated'])}, reserved {byte_text(gpu['reserved'])}",
    ]


def _measured(index: int, reading: nvidia.Reading) -> str:
    """Return the line of text about NVML's reading of the GPU with this index."""
    parts = [f"  GPU {index} {reading.name}"]
    if reading.used is not None and reading.total:
        parts.append(_bar(reading.used, reading.total))
    if reading.busy is not None:
        parts.append(f"{reading.busy}% busy")
    return "  ".join(parts)


def _bar(used: int, total: int) -> str:
    """Return a bar for the used share of a GPU's memory, followed by the bytes."""
    full = min(BAR, round(BAR * used / total))
    return f"[{'#' * full}{'.' * (BAR - full)}] {byte_text(used)} of {byte_text(total)} in use"


def _wrapped(lines: list[str], width: int | None) -> list[str]:
    """Return the lines without characters that would control a terminal, wrapped to the width."""
    found = []
    for line in lines:
        safe = "".join(letter if letter.isprintable() else "?" for letter in line)
        indent = " " * (len(safe) - len(safe.lstrip()) + 4)
        if width is None:
            found.append(safe)
        else:
            indent = indent[: max(0, width - 8)]
            found += textwrap.wrap(safe, max(1, width), subsequent_indent=indent) or [""]
    return found


def _watch(pid: int | None) -> int:
    """Draw the state every second, until the user ends this or the process `pid` has ended.

    Return the exit status.
    """
    try:
        import curses
    except ImportError:  # Python on Windows
        return _print(picture(pid))
    try:
        screen = curses.initscr()  # not `curses.wrapper`, which also sets colours
        try:
            curses.noecho()
            curses.cbreak()
            screen.keypad(True)
            screen.timeout(REFRESH)
            key = -1
            while key not in (ord("q"), ord("Q")):
                answers = ask_all()
                if _has_ended(pid, answers):
                    break
                height, width = screen.getmaxyx()
                _draw(screen, picture(pid, width - 1, answers), height, width - 1)
                key = screen.getch()
        finally:
            curses.endwin()
    except curses.error as error:  # TERM names no terminal that can be drawn on
        print(f"labkit top: {error}. --once prints the state as plain text.", file=sys.stderr)
        return 1
    if _has_ended(pid, answers):
        print(f"Process {pid} has ended.")
    return 0


def _draw(screen: Any, lines: list[str], height: int, width: int) -> None:
    """Draw the lines on the screen, and below them the keys that the user can press."""
    room = max(1, height - 1)
    keys = "q: quit"
    if len(lines) > room:
        keys += f"; {len(lines) - room} more lines: enlarge the window, or name one process"
    screen.erase()
    for row, line in enumerate(lines[:room]):
        screen.addnstr(row, 0, line, width)
    if height > 1:
        screen.addnstr(height - 1, 0, keys, width)
    screen.refresh()
