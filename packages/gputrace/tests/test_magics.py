"""`%%gpu_memory` and `%%gpu_timeline` in a shell of this process, as IPython runs them."""

import textwrap
import traceback

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import virtualgpu
from gputrace import Trace
from gputrace.magics import GpuMagics
from gputrace.sources.clock import ClockSource
from gputrace.spans import Execution
from virtualgpu import front_end


@pytest.fixture
def shell():
    """A notebook's shell, with a virtual GPU in use."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.user_ns["torch"] = torch
    shell.register_magics(GpuMagics)
    with virtualgpu.use(gpus=1, memory="2GiB"):
        yield shell
    InteractiveShell.clear_instance()


def run(shell, cell):
    """Run one cell. Return IPython's result, and what was displayed, as text."""
    with capture_output() as captured:
        result = shell.run_cell(textwrap.dedent(cell).strip("\n"), store_history=True)
    shown = [output.data.get("text/plain", "") for output in captured.outputs]
    return result, shown, captured.stdout + captured.stderr


def test_the_lines_of_the_cell_are_the_readers(shell):
    """The magic's own line counts as line 1, as in JupyterLab."""
    result, shown, _ = run(
        shell,
        """
        %%gpu_memory trace
        x = torch.zeros(1 << 20, device="cuda")
        y = (x + 1
             + x)
        """,
    )
    assert result.success and result.result is None
    trace = shell.user_ns["trace"]
    assert type(trace) is Trace and [entry.line.location for entry in trace.lines()] == [
        "line 2",
        "line 3",
    ]
    assert [entry.delta for entry in trace.lines()] == [4 << 20, 4 << 20]
    assert trace.peak == 12 << 20 and trace.peak_line.text == "y = (x + 1"
    figure, words, table = shown
    assert "12 MiB" in figure and words == "(the figure in words)" and table == repr(trace.lines())


def test_names_and_the_last_expression(shell):
    result, _, _ = run(
        shell, "%%gpu_memory told\nkept = torch.ones(3, device='cuda')\nkept.sum().item()"
    )
    assert result.result == 3.0 and shell.user_ns["kept"].is_cuda and shell.user_ns["_"] == 3.0
    assert type(shell.user_ns["told"]) is Trace


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        *((cell, False) for cell in ("5;", "5;  # quiet", "5;\n\n# quiet", "x = 5")),
        *(
            (cell, True)
            for cell in ("5", "print(';')\n5", "'a;'", "def f(): pass;\n5", "'''a\n;'''")
        ),
        ("async def f():\n    await x\n7", True),
    ],
)
def test_a_semicolon_at_the_end_hides_the_value(shell, cell, shown):
    assert (run(shell, "%%gpu_memory\n" + cell)[0].result is not None) == shown


def test_ipythons_own_syntax_works_inside(shell, monkeypatch):
    monkeypatch.setenv("LABKIT_NO_SUCH", "0")  # taken back after the test
    result, _, printed = run(
        shell, "%%gpu_memory\n%env LABKIT_NO_SUCH=1\nhere = !echo word\nhere[0]"
    )
    assert result.result == "word" and "LABKIT_NO_SUCH" in printed


def test_future_statements_and_later_cells(shell):
    run(
        shell,
        "%%gpu_memory\nfrom __future__ import annotations\ndef f(x: undefined): return x\n"
        "class A: y = [f(i) for i in range(3)]",
    )
    assert run(shell, "f(A.y)")[0].result == [0, 1, 2]


def test_an_error_is_the_cells_error(shell):
    result, shown, printed = run(
        shell,
        """
        %%gpu_memory trace
        x = torch.zeros(1000, device="cuda")
        def divide():
            return 1 / 0
        divide()
        """,
    )
    assert not result.success and type(result.error_in_exec) is ZeroDivisionError
    assert "return 1 / 0" in printed and "gputrace/magics" not in printed
    assert shell.user_ns["trace"].peak == 4096 and len(shown) == 3
    frames = traceback.walk_tb(result.error_in_exec.__traceback__)
    lines = [line for frame, line in frames if "trace" in frame.f_globals]
    assert lines[-2:] == [5, 4]


def test_running_out_of_memory_is_explained(shell):
    result, shown, printed = run(shell, "%%gpu_memory\nx = torch.zeros(1 << 30, device='cuda')")
    assert type(result.error_in_exec) is torch.OutOfMemoryError and "OutOfMemoryError" in printed
    assert shown[-1].startswith(
        "Out of memory on cuda:0: larger than the GPU.\n"
        "line 2 asked for 4 GiB: x = torch.zeros(1 << 30"
    )


@pytest.mark.parametrize("magic", ["gpu_memory", "gpu_timeline"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1x", "expected the name of a variable, such as trace, got '1x'"),
        ("class", "expected the name of a variable, such as trace, got 'class'"),
        ("--fast", "unrecognized arguments: --fast"),
        ("a b", "unrecognized arguments: b"),
        ("--max-events 0", "--max-events 0: expected a whole number"),
        ("--max-events many", "invalid int value: 'many'"),
    ],
)
def test_bad_options_get_one_clear_line(shell, magic, line, said):
    result, shown, printed = run(shell, f"%%{magic} {line}\nran = True")
    assert not result.success and shown == [] and "ran" not in shell.user_ns
    assert printed.startswith("UsageError: ") and said in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize("magic", ["gpu_memory", "gpu_timeline"])
@pytest.mark.parametrize(
    "cell", ["await x", "async with x: pass", "[y async for y in x]", "print((await x) + 1)"]
)
def test_a_cell_that_awaits_is_refused_by_name(shell, magic, cell):
    result, _, printed = run(shell, f"%%{magic}\n{cell}")
    assert (
        not result.success
        and f"%%{magic} cannot run a cell that uses `await`" in printed
        and "`with record() as trace:`" in printed
    )


def test_a_mistake_in_the_syntax(shell):
    result, shown, printed = run(shell, "%%gpu_memory\nx = 1\ny = = 2")
    assert type(result.error_in_exec) is UsageError and "y = = 2" in printed and shown == []


def test_without_a_gpu(shell):
    virtualgpu.use(None)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to record")
    result, _, _ = run(shell, "%%gpu_memory\nran = True")
    assert (
        f"{front_end.name()}.use(gpus=1)" in str(result.error_in_exec)
        and "ran" not in shell.user_ns
    )


def test_a_timeline_of_a_cell(shell):
    result, shown, _ = run(
        shell, "%%gpu_timeline trace\nx = torch.ones(1 << 20).cuda()\n(x + x).sum().item()"
    )
    assert result.result == 1 << 21
    figure, words = shown
    trace = shell.user_ns["trace"]
    assert figure == trace.plot_timeline().alt and words == "(the figure in words)"
    assert trace.busy(0, "h2d") > 0 and trace.line(int(trace.spans.stack[-1])).location == "line 3"


def test_a_timeline_with_memory(shell):
    _, shown, _ = run(shell, "%%gpu_timeline --memory told\nx = torch.ones(1 << 20).cuda()")
    assert shown[0] == shell.user_ns["told"].plot_timeline(memory=True).alt


def test_gpu_memory_leaves_the_timeline_out(shell):
    run(shell, "%%gpu_memory trace\nx = torch.ones(8, device='cuda')")
    with pytest.raises(RuntimeError, match="%%gpu_timeline"):
        shell.user_ns["trace"].plot_timeline()


def test_an_error_under_gpu_timeline_is_the_cells_error(shell):
    result, shown, printed = run(
        shell, "%%gpu_timeline trace\nx = torch.zeros(1000, device='cuda')\n1 / 0"
    )
    assert (
        type(result.error_in_exec) is ZeroDivisionError
        and "gputrace/magics" not in printed
        and len(shown) == 2
    )
    result, shown, _ = run(shell, "%%gpu_timeline\nx = torch.zeros(1 << 30, device='cuda')")
    assert type(result.error_in_exec) is torch.OutOfMemoryError and shown[-1].startswith(
        "Out of memory on cuda:0"
    )


def test_a_timeline_that_is_not_known_is_said(shell, monkeypatch):
    monkeypatch.setattr(ClockSource, "finish", lambda source, origin: Execution.none("no clock"))
    result, shown, printed = run(shell, "%%gpu_timeline\nx = torch.ones(8, device='cuda')")
    assert result.success and shown == [] and printed == "There is no timeline to show: no clock.\n"
