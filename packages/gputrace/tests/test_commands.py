"""`python -m gputrace trace` and `fit`, without the packages that build on gputrace."""

import subprocess
import sys
from pathlib import Path

import pytest

from gputrace import commands

SCRIPT = """
import torch
from torch import nn

net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    net(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def python(*arguments: object, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gputrace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)


@pytest.mark.slow
def test_an_interrupt_while_fit_imports_torch_shows_no_traceback(script, capsys, monkeypatch):
    def interrupt(*about: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_answer", interrupt)
    assert commands.main(["fit", str(script)]) == 130
    assert capsys.readouterr().err.endswith("fit: interrupted.\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["trace", "run"])
def test_a_script_that_expects_torchrun_gets_advice(tmp_path, command):
    (tmp_path / "ddp.py").write_text("import os\nrank = int(os.environ['LOCAL_RANK'])\n")
    package = {"trace": "gputrace", "run": "virtualgpu"}[command]
    arguments = [sys.executable, "-m", package, command, "ddp.py"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "If the script expects torchrun, use `labkit " in done.stderr.splitlines()[-1]


def test_trace_writes_a_page_and_speaks_in_its_own_name(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(commands.__file__).parents[1]), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ended = python("trace", "--like", "T4", "--output", "page.html", script, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "page.html").is_file()
    lines = ended.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("gputrace trace: ") for line in lines)


@pytest.mark.slow
def test_fit_answers_for_a_model(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(commands.__file__).parents[1]), prepend=":")
    ended = python("fit", "--like", "T4", script, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "T4" in ended.stdout


def test_mistakes_get_one_line(script, capsys):
    assert commands.main(["trace", "--gpus", "17", str(script)]) == 2
    assert commands.main(["fit", "--host", "fast", str(script)]) == 2
    assert commands.main(["trace", "--chrome", "a.json", "--no-timeline", str(script)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "gputrace trace",
        "gputrace fit",
        "gputrace trace",
    ]
