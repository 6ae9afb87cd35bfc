"""Checks in a notebook: a check judges only the answer's cell, within limits."""

import io
import signal
import time
from contextlib import redirect_stdout

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit import cells
from labkit.checks import limits
from labkit.checks.checking import not_attempted, not_yet, right

CHECK = 'verdict = labkit.check("00.1", on_gpu)'
RIGHT = 'def on_gpu(numbers):\n    return torch.tensor(numbers, device="cuda")'
WRONG = "def on_gpu(numbers):\n    return torch.tensor(numbers)"


@pytest.fixture
def notebook(monkeypatch):
    """A function that runs the cell with an id, and returns the text of the last check."""
    monkeypatch.setattr(cells, "_cells", [])
    monkeypatch.setattr(cells, "_judged", {})
    monkeypatch.setenv("LABKIT_PROGRESS", "")
    shell = InteractiveShell.instance()
    shell.events.register("post_run_cell", cells.note)
    shell.user_ns.update(labkit=labkit, torch=torch)

    def run(source: str, identity: str | None = "answer") -> str:
        shell.run_cell(source, store_history=True, **({"cell_id": identity} if identity else {}))
        return repr(shell.user_ns.get("verdict"))

    with labkit.use(virtual=True, quiet=True):
        yield run
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            RIGHT.replace("):", ")"),
            "not checked: your last cell did not run: line 1, expected ':'. Fix that line",
        ),
        (RIGHT + "\n    return (", "your last cell did not run: line 3, incomplete input"),
        (
            f"import nothing_of_this_name\n{RIGHT}",
            "your last cell did not run: line 1, ModuleNotFoundError: No module named 'noth",
        ),
        (
            RIGHT.replace("on_gpu", "onto_gpu"),
            "your last cell defines `onto_gpu`, but not `on_gpu`.",
        ),
        ("# nothing yet", "your last cell defines nothing, but not `on_gpu`."),
        (f"{RIGHT}\non_gpu([1]).nonsense", "00.1 Right."),  # it raised below the answer
        (f"%%time\n{RIGHT}", "00.1 Right."),
        ("1 +\n", "did not run"),
    ],
)
def test_an_answer_that_its_cell_no_longer_shows_is_not_judged(notebook, cell, said, capsys):
    notebook(WRONG)
    assert "expected a tensor on a GPU, got one on cpu" in notebook(CHECK, "check")
    notebook(cell)
    assert said in notebook(CHECK, "check")
    notebook(RIGHT)
    assert "00.1 Right." in notebook(CHECK, "check")


def test_other_cells_are_no_matter_and_without_ids_a_broken_definition_is_known(notebook, capsys):
    for identity in ("answer", None):
        notebook(RIGHT, identity)
        for other in ("x = (", "on_gpu_too = (", "1 / 0", "print(on_gpu)"):
            notebook(other, "scratch" if identity else None)
            assert "00.1 Right." in notebook(CHECK, "check")
    notebook(RIGHT + " (", None)
    assert "your last cell did not run: line 2" in notebook(CHECK, None)
    assert "00.1 Right." in notebook(f"{RIGHT}\n{CHECK}", None)


def test_what_an_answer_prints_is_cut_with_its_count(notebook, capsys):
    notebook(
        "def on_gpu(numbers):\n    for n in range(20_000):\n        print(n)\n"
        "    return torch.tensor(numbers, device='cuda')"
    )
    assert "Right" in notebook(CHECK, "check")  # which calls it twice
    shown = capsys.readouterr().out.splitlines()
    assert (
        shown[: limits.MOST_LINES] == [str(n) for n in range(40)]
        and shown[40] == "… and 39,960 more lines, which labkit.check leaves out"
    )
    with redirect_stdout(io.StringIO()) as out, limits.a_screenful():
        print("x" * 1_000_000)
        print("y")
    assert out.getvalue() == "… and 2 more lines, which labkit.check leaves out\n"


def test_what_an_answer_warns_of_is_cut_too(notebook, capsys):
    notebook(
        "import sys\ndef on_gpu(numbers):\n    for n in range(100):\n"
        "        print(n, file=sys.stderr)"
    )
    assert "Not yet" in notebook(CHECK, "check")
    shown = capsys.readouterr()
    assert (
        shown.err.splitlines() == [str(n) for n in range(40)]
        and "… and 160 more lines" in shown.out
    )


def test_an_answer_asks_nobody(notebook):
    notebook("def on_gpu(numbers):\n    return torch.zeros(int(input('how many? ')))")
    assert "EOFError: input() is not available while labkit.check runs your answer" in notebook(
        CHECK, "check"
    )
    assert input.__name__ != "refused"


def test_an_answer_whose_cell_has_not_run_since_is_told(notebook):
    same = (
        "The cell of `on_gpu` has not run since the last check, so this verdict is about the same "
        "version."
    )
    for answer, told in ((WRONG, "expected a tensor on a GPU, got one on cpu"), (RIGHT, "Right.")):
        notebook(answer)
        assert same not in notebook(CHECK, "check")
        # its cell may be empty by now
        assert told in (again := notebook(CHECK, "check")) and same in again


def test_an_interrupt_says_where_the_answer_was(notebook, capsys):
    notebook("def on_gpu(numbers):\n    raise KeyboardInterrupt")
    notebook(CHECK, "check")
    assert (
        capsys.readouterr().out.strip().splitlines()[-1]
        == "KeyboardInterrupt: 00.1 was interrupted (line 2: raise KeyboardInterrupt)."
    )


@pytest.mark.slow
def test_an_answer_without_end_is_told_and_ended(monkeypatch, capsys, notebook):
    monkeypatch.setattr(limits, "PATIENCE", 0.5)
    monkeypatch.setattr(limits, "LIMIT", 1.5)
    monkeypatch.setattr(limits, "AGAIN", 0.5)
    before = signal.getsignal(signal.SIGALRM)
    for loop in ("while True:\n        print('x')", "import time\n    time.sleep(60)"):
        notebook(f"def on_gpu(numbers):\n    {loop}")
        assert "00.1 Not yet: your answer took longer than 1.5 s (line " in notebook(CHECK, "check")
        assert "00.1 has run for 0.5 s, and is in line " in capsys.readouterr().out
    # catches the first
    notebook(
        "import time\ndef on_gpu(numbers):\n    try:\n        time.sleep(60)\n    except:\n"
        "        time.sleep(60)"
    )
    assert "took longer than 1.5 s (line 6: time.sleep(60))" in notebook(CHECK, "check")
    assert signal.getsignal(signal.SIGALRM) == before
    with limits.in_time("00.1", None):
        time.sleep(0)


def test_verdicts_differ_by_mark_word_and_colour():
    shown = [
        verdict._repr_html_()
        for verdict in (right("Well\ndone."), not_yet("`x` < 3."), not_attempted())
    ]
    assert ["✔" in shown[0], "✘" in shown[1], "○" in shown[2]] == [True] * 3
    assert (
        "Right</span> Well<br>done." in shown[0]
        and "Not yet</span> <code>x</code> &lt; 3." in shown[1]
    )
    assert len({html.split("background: ")[1][:7] for html in shown}) == 3
