"""`python -m labkit run` runs a script as Python would, on virtual GPUs; bad arguments get one clear line."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path):
    """A function that writes a script beside a module that it may import."""
    (tmp_path / "neighbour.py").write_text("word = 'found'\n")

    def write(code: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return path

    return write


def python(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def run(*arguments: object) -> subprocess.CompletedProcess:
    return python("-m", "labkit", "run", *arguments)


def same(path: Path, *arguments: str) -> None:
    """What Python does with the script is what `labkit run` does with it."""
    expected, got = python(path, *arguments), run(path, *arguments)
    assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_arguments_path_and_main(script):
    path = script("""
        import inspect, pickle, sys
        from neighbour import word
        class Point: pass
        def here(): return 1
        print(sys.argv, sys.path[0], __name__, __file__, word, __spec__, __package__, __doc__)
        print(type(pickle.loads(pickle.dumps(Point()))).__module__, sys.modules["__main__"].word, inspect.getsource(here))
        sys.stderr.write("to stderr")
    """)
    same(path, "--gpus", "7", "-x", "--", "--help", "")


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
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('second') from error",
        "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno, trace.tb_next)\nraise ValueError",
        "import atexit, threading, time\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', __name__))).start()\nprint('main')",
    ],
    ids=["exit", "message", "_exit", "signal", "interrupt", "syntax", "error", "cause", "excepthook", "threads"],
)
def test_ends_as_python_ends_it(script, code):
    same(script(code), "argument")


def test_multiprocessing_spawn_finds_the_main_module(script):
    path = script("""
        import multiprocessing, sys
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]), sys.argv)
    """)
    same(path, "a")


def test_the_script_sees_the_gpus_it_was_given(script):
    path = script("""
        import torch
        print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(1))
        x = torch.arange(4.0, device="cuda:1")
        print((x @ x).item(), x.device, torch.cuda.mem_get_info(1)[1] >> 30)
    """)
    result = run("--gpus", 2, "--like", "H200", "--memory", "16GiB", path)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["True 2 NVIDIA H200", "14.0 cuda:1 16"]


def test_a_virtual_gpu_lasts_until_the_scripts_last_word(script):
    path = script("""
        import atexit, torch
        atexit.register(lambda: print(torch.ones(3, device="cuda").sum().item()))
    """)
    result = run(path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3.0\n", "")


def test_no_values_reaches_the_machine(script):
    path = script("""
        import torch
        x = torch.ones(1000, 1000, device="cuda")
        print(x.shape, torch.cuda.memory_allocated() >= 4_000_000)
        x.sum().item()
    """)
    result = run("--no-values", path)
    assert result.returncode == 1 and "torch.Size([1000, 1000]) True" in result.stdout
    assert "values" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "gpus=0"),
        (["--gpus", "-1"], "gpus=-1"),
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


def test_no_such_script(tmp_path):
    result = run(tmp_path / "absent.py")
    assert result.returncode == 2 and "no such script" in result.stderr and "absent.py" in result.stderr


def test_no_command_names_the_commands():
    result = python("-m", "labkit")
    assert result.returncode == 2 and "COMMAND" in result.stderr
    listed = python("-m", "labkit", "--help").stdout
    assert "doctor" in listed and "run" in listed
