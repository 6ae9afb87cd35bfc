"""`labkit run` runs a script on virtual GPUs as Python would. Bad arguments get one clear line."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import labkit
import virtualgpu
from gputrace.fit.outcome import Outcome
from labkit import cli
from virtualgpu import commands


@pytest.fixture
def script(tmp_path):
    """A function that writes a script beside a module that it may import."""
    (tmp_path / "neighbour.py").write_text("word = 'found'\n")

    def write(code: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    """Remove CUDA_VISIBLE_DEVICES, which would hide virtual GPUs, too."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TIMES = "Times in the script are this computer's, not the model's."
WHERE = f"labkit run: 1 virtual GPU, modelled on NVIDIA Tesla T4, 14.6 GiB each. {TIMES}\n"
TWO = f"labkit run: 2 virtual GPUs, modelled on NVIDIA H200, 16.0 GiB each. {TIMES}\n"
TRACED = (
    WHERE.replace("run", "trace")
    .replace(
        TIMES, "Times on the page are modelled. The script itself runs at this computer's speed."
    )
    .strip()
)


def python(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=280
    )


def run(*arguments: object) -> subprocess.CompletedProcess:
    return python("-m", "labkit", "run", *arguments)


def same(path: Path, *arguments: str) -> None:
    """Check that `labkit run` prints what Python prints, after a line about the GPUs."""
    expected, got = python(path, *arguments), run(path, *arguments)
    assert (got.returncode, got.stdout, got.stderr) == (
        expected.returncode,
        expected.stdout,
        WHERE + expected.stderr,
    )


@pytest.mark.slow
def test_arguments_path_and_main(script):
    path = script("""
        import inspect, pickle, sys
        from neighbour import word
        class Point: pass
        def here(): return 1
        print(sys.argv, sys.path[0], __name__, __file__, word, __spec__, __package__, __doc__)
        module = type(pickle.loads(pickle.dumps(Point()))).__module__
        print(module, sys.modules["__main__"].word, inspect.getsource(here))
        sys.stderr.write("to stderr")
    """)
    same(path, "--", "--m", "--gpus", "7", "-x", "--", "--help", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit('a message')",
        "import os; os._exit(5)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "1 +",
        "def f(): return 1 / 0\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    raise ValueError('second') from error",
        "import sys\n"
        "sys.excepthook = "
        "lambda kind, error, trace: print(kind, trace.tb_lineno, trace.tb_next)\n"
        "raise ValueError",
        "import atexit, threading\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: "
        "(threading.main_thread().join(), print('thread', __name__))).start()\n"
        "print('main')",
    ],
    ids=[
        "exit",
        "message",
        "_exit",
        "signal",
        "interrupt",
        "syntax",
        "error",
        "cause",
        "excepthook",
        "threads",
    ],
)
def test_ends_as_python_ends_it(script, code):
    same(script(code), "argument")


@pytest.mark.slow
def test_multiprocessing_spawn_finds_the_main_module(script):
    path = script("""
        import multiprocessing, sys
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]), sys.argv)
    """)
    same(path, "a")


@pytest.mark.slow
def test_the_script_sees_the_gpus_it_was_given(script):
    path = script("""
        import torch
        print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(1))
        x = torch.arange(4.0, device="cuda:1")
        print((x @ x).item(), x.device, torch.cuda.mem_get_info(1)[1] >> 30)
    """)
    result = run("--gpus", 2, "--like", "H200", "--memory", "16GiB", path)
    assert result.stderr == TWO
    assert result.stdout.splitlines() == ["True 2 NVIDIA H200", "14.0 cuda:1 16"]


@pytest.mark.slow
def test_a_virtual_gpu_lasts_until_the_scripts_last_word(script):
    path = script("""
        import atexit, torch
        atexit.register(lambda: print(torch.ones(3, device="cuda").sum().item()))
    """)
    result = run(path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3.0\n", WHERE)


@pytest.mark.slow
def test_no_values_reaches_the_machine(script):
    path = script("""
        import torch
        x = torch.ones(1000, 1000, device="cuda")
        print(x.shape, torch.cuda.memory_allocated() >= 4_000_000)
        print(x.sum().item())
    """)
    result = run("--no-values", path)
    assert (result.returncode, result.stdout) == (0, "torch.Size([1000, 1000]) True\nnan\n")


@pytest.mark.slow
def test_virtual_time_is_the_same_in_every_run_and_lasts_until_the_scripts_last_word(script):
    path = script("""
        import atexit, time, torch
        x = torch.ones(2000, 2000, device="cuda")
        start = time.perf_counter()
        y = x @ x
        torch.cuda.synchronize()
        print(time.perf_counter() - start)
        time.sleep(3600)
        atexit.register(lambda: print(time.perf_counter(), time.time()))
    """)
    first, second = (run("--virtual-time", path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    product, end, _ = map(float, first.stdout.split())
    assert 1e-3 < product < 1e-2 and 3600 < end < 3601


@pytest.mark.slow
def test_without_values_copies_to_the_host_take_place_and_numbers_are_known(script):
    path = script("""
        import torch
        count, x = torch.zeros(1, device="cuda"), torch.randn(1000, device="cuda")
        y = torch.zeros(1000)
        for _ in range(3):
            count.add_(1)
            y.copy_(x)
        print(count.item(), y.isnan().all().item())
    """)
    result = run("--no-values", path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3.0 True\n", WHERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "--gpus 0: choose a whole number from 1 to 16"),
        (["--gpus", "-1"], "--gpus -1: choose"),
        (["--gpus", "two"], "invalid int value: 'two'"),
        (["--like", "T5"], "T5"),
        (["--memory", "banana"], "banana"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_options_get_one_clear_line(script, options, said):
    result = run(*options, script("print('ran')"))
    assert result.returncode == 2 and result.stdout == ""
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
    assert "None" not in result.stderr  # which no command line can say


def test_without_a_script_its_arguments_are_not_asked_for():
    result = run()
    assert result.returncode == 2 and result.stderr.splitlines()[-1].endswith(
        "the following arguments are required: script"
    )


def test_no_such_script(tmp_path):
    result = run(tmp_path / "absent.py")
    assert (
        result.returncode == 2
        and "no such script" in result.stderr
        and "absent.py" in result.stderr
    )
    result = run(tmp_path)
    assert (
        result.returncode == 2 and f"{tmp_path} is a folder. Give the script in it" in result.stderr
    )


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0 and {"doctor", "run", "trace"} < set(capsys.readouterr().out.split())
    assert commands.main([]) == 0 and "run" in capsys.readouterr().out.split()


@pytest.fixture
def package(tmp_path):
    """A package that can be run, with a module that can be run."""
    code = (
        "import sys, torch\nfrom . import word\n"
        "print(sys.argv, __name__, __package__, __spec__.name, word, 'SIZE' in globals())\n"
    )
    (tmp_path / "lessons").mkdir()
    for name, text in (("__init__", "word = 'own'"), ("__main__", code), ("train", code + "1 / 0")):
        (tmp_path / "lessons" / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lessons", "lessons.train"])
def test_a_module_runs_as_after_python_m(package, name):
    def within(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=package, capture_output=True, text=True, timeout=280
        )

    # The installed command `labkit` is this program.
    installed = "import sys; from labkit.cli import main; sys.path[0] = '/'; sys.exit(main())"
    expected, got = (
        within("-m", name, "--gpus", "3"),
        within("-c", installed, "run", "-m", name, "--gpus", "3"),
    )
    assert (got.returncode, got.stdout) == (expected.returncode, expected.stdout)
    assert got.stderr.splitlines()[-1:] == (
        [WHERE.strip()] if name == "lessons" else expected.stderr.splitlines()[-1:]
    )


@pytest.mark.parametrize("name", ["absent", "absent.part", "no name", ""])
def test_a_module_that_is_not_there_is_refused(name, capsys):
    assert cli.main(["run", "-m", name]) == 2
    assert capsys.readouterr().err == f"labkit run: no module named {name}\n"


def test_a_script_that_computes_for_long_is_told_once_that_it_need_not(capsys, monkeypatch):
    monkeypatch.setattr(commands, "LONG", 0)
    for values in (True, False):
        with virtualgpu.use(values=values) as gpus:
            commands.tell_machine(gpus, "labkit run", TIMES)
            for _ in range(3):
                torch.ones(1 << 22, device="cuda")
        assert (
            capsys.readouterr().err.count("With --no-values it keeps only memory and times")
            == values
        )


def test_a_process_s_time_is_asked_for_once_a_second(monkeypatch):
    # With many threads, the system needs as long for the answer as for an operator.
    asked = []
    monkeypatch.setattr(commands, "process_time", lambda: asked.append(None) or 0.0)
    monkeypatch.setattr(
        commands, "monotonic", iter([0.0, 0.0, 0.5, 0.9, 1.1, *[1.5] * 100]).__next__
    )
    with virtualgpu.use() as gpus:
        commands.tell_machine(gpus, "labkit run", TIMES)
        for _ in range(20):
            torch.ones(1, device="cuda")
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_started_child_has_the_same_machine(script, method):
    path = script(f"""
        import multiprocessing, torch
        from concurrent.futures import ProcessPoolExecutor
        here = torch.cuda.get_device_name(0), torch.cuda.device_count()
        def work(x):
            y = torch.full((2,), x, device="cuda:1")
            memory = torch.cuda.mem_get_info(1)[1] >> 30
            return here, memory, torch.cuda.memory_allocated(1), y.sum().item()
        if __name__ == "__main__":
            torch.ones(1, device="cuda")
            with ProcessPoolExecutor(1, multiprocessing.get_context("{method}")) as pool:
                print(*pool.map(work, [1.0, 2.0]), sep="\\n")
    """)
    result = run("--gpus", 2, "--like", "H200", "--memory", "16GiB", path)
    assert result.stderr == TWO
    assert result.stdout.splitlines() == [
        f"(('NVIDIA H200', 2), 16, 512, {total})" for total in (2.0, 4.0)
    ]


@pytest.mark.slow
def test_python_that_the_script_starts_has_the_same_machine(script):
    path = script("""
        import os, subprocess, sys
        def run(code, environment):
            command = [sys.executable, "-c", code]
            print(subprocess.check_output(command, env=environment, text=True), end="")

        code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(), "
        code += "torch.ones(2, device='cuda').sum().item())"
        for environment in (os.environ, os.environ | {"CUDA_VISIBLE_DEVICES": "1"}):
            run(code, environment)
        run("import sys; print('torch' in sys.modules)", os.environ)
    """)
    result = run("--gpus", 2, "--like", "H200", "--memory", "16GiB", path)
    assert (result.stdout, result.stderr) == ("2 NVIDIA H200 2.0\n1 NVIDIA H200 2.0\nFalse\n", TWO)


def trace(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "labkit", "trace", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=cwd,
        env=os.environ | {"LABKIT_VIRTUAL": "1"},
    )


@pytest.mark.slow
def test_trace_runs_the_script_as_python_does_and_writes_a_page(script, tmp_path):
    path = script("""
        import os, sys, torch
        from neighbour import word
        x = torch.ones(1 << 20, device="cuda")
        print(sys.argv[1:], word, __name__)
        os.chdir("/")
        sys.exit(3)
    """)
    result = trace(path, "--gpus", "7", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (3, "['--gpus', '7'] found __main__\n"), (
        result.stderr
    )
    assert result.stderr.splitlines() == [
        TRACED,
        f"labkit trace: wrote {(tmp_path / 'script-memory.html').as_uri()}",
    ]
    page = (tmp_path / "script-memory.html").read_text("utf-8")
    assert "4 MiB allocated on cuda:0" in page and "script.py:4" in page and "--gpus 7" in page


@pytest.mark.slow
def test_trace_shows_the_scripts_own_traceback(script, tmp_path):
    path = script("import torch\ntorch.ones(3, device='cuda')\n1 / 0")
    expected = python(script("import torch\ntorch.ones(3)\n1 / 0")).stderr.splitlines()
    path = script("import torch\ntorch.ones(3, device='cuda')\n1 / 0")
    result = trace("--gpus", 2, "--like", "H200", "--output", "page.html", path, cwd=tmp_path)
    where, said, *traceback = result.stderr.splitlines()
    assert "2 virtual GPUs, modelled on NVIDIA H200" in where
    assert result.returncode == 1 and said.endswith("page.html") and traceback == expected
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "by ZeroDivisionError: division by zero" in page and "NVIDIA H200" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output", "."], "got a directory"),
        (["--output", "absent/page.html"], "there is no directory"),
        (["--max-events", "0"], "--max-events 0"),
        (["--like", "T5"], "T5"),
        (["--gpus", "0"], "--gpus 0: choose a whole number from 1 to 16"),
    ],
)
def test_trace_refuses_before_the_script_runs(script, tmp_path, options, said):
    result = trace(*options, script("print('ran')"), cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("labkit trace: ") and said in result.stderr
    assert list(tmp_path.glob("*.html")) == []


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"labkit {labkit.__version__}\n"


def test_fit_tells_its_progress_beside_the_page(script, capsys, monkeypatch):
    outcome = Outcome(
        16 << 30, used=1 << 30, steps=4, step=0.5, changed=True, changes=["half the batch"]
    )
    monkeypatch.setattr(
        "gputrace.fit.processes.Runner.run_all",
        lambda runner, wishes: [(wish, outcome) for wish in wishes],
    )
    assert cli.main(["fit", "--like", "T4", str(script("pass"))]) == 0
    page, progress = capsys.readouterr()
    assert (
        page.count("half the batch") == 1
        and progress.count("labkit fit: T4, half the batch: needs 1 GiB") == 1
    )
    # the script runs, on the T4, with that change, on two GPUs
    assert len(progress.splitlines()) == 4


def test_fit_gives_the_script_several_gpus(script, capsys, monkeypatch):
    outcome = Outcome(16 << 30, used=1 << 30, steps=4, step=0.5)
    asked = []

    def run_all(runner, wishes):
        asked.extend(wishes)
        return [(wish, outcome) for wish in wishes]

    monkeypatch.setattr("gputrace.fit.processes.Runner.run_all", run_all)
    path = str(script("pass"))
    assert cli.main(["fit", "--like", "T4", "--gpus", "4", path]) == 0
    assert {wish.gpus for wish in asked} == {4}
    assert "It has 4 GPUs of each model." in capsys.readouterr().out
    assert cli.main(["fit", "--gpus", "17", path]) == 2
    assert capsys.readouterr().err == "labkit fit: --gpus 17: choose a whole number from 1 to 16\n"


@pytest.mark.parametrize(
    ("failed", "hinted"),
    [
        (
            "ValueError: Error initializing torch.distributed: environment variable RANK "
            "expected, but not set",
            True,
        ),
        ("train.py:3 rank = int(os.environ['LOCAL_RANK']): KeyError: 'LOCAL_RANK'", True),
        ("train.py:3 model(x): ValueError: no such rank", False),
    ],
)
def test_fit_points_a_script_of_ranks_to_the_command_for_it(
    script, capsys, monkeypatch, failed, hinted
):
    outcome = Outcome(16 << 30, failed=failed)
    monkeypatch.setattr(
        "gputrace.fit.processes.Runner.run_all",
        lambda runner, wishes: [(wish, outcome) for wish in wishes],
    )
    assert cli.main(["fit", "--like", "T4", str(script("pass"))]) == 1
    said = capsys.readouterr().err
    assert failed in said and ("`labkit torchrun --simulate 8 SCRIPT`" in said) == hinted
