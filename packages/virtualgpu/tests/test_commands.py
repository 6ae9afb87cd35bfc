"""The command `run` parses its options and makes a machine for a script."""

import subprocess
import sys

import pytest

from virtualgpu import commands

STEP = """
import torch, virtualgpu
x = torch.ones(4, device="cuda")
start = virtualgpu.host_time()
for _ in range(10):
    x.add_(1)
print(virtualgpu.host_time() - start)
"""


@pytest.mark.slow
def test_a_slower_host_takes_longer_and_children_have_it_too(tmp_path):
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "parent.py").write_text(
        f"{STEP}\nimport subprocess, sys\nsubprocess.run([sys.executable, 'step.py'])\n"
    )

    def seconds(*options: str) -> list[float]:
        command = [sys.executable, "-m", "virtualgpu", "run", *options, "parent.py"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stderr)
        return [float(line) for line in ran.stdout.split()]

    said: list[str] = []
    usual, slow = seconds(), seconds("--host", "2.5")
    assert slow == pytest.approx([2.5 * usual[0]] * 2)
    assert "2.5 times as long" in said[1] and "times as long" not in said[0]


@pytest.mark.parametrize(("given", "host"), [("2", 2.0), ("0.5", 0.5)])
def test_a_host_is_a_number(given, host):
    assert commands.checked_host(given) == host


def test_here_measures_this_computer(monkeypatch):
    monkeypatch.setattr("virtualgpu.host_speed.measure_host", lambda: 1.23456)
    assert commands.checked_host("here") == 1.23


def test_a_host_that_is_no_number_is_refused_with_what_is_allowed(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit")
    assert commands.main(["run", "--host", "fast", str(script)]) == 2
    assert (
        capsys.readouterr().err
        == "virtualgpu run: --host fast: give a number, such as 2, or 'here'\n"
    )
    assert commands.main(["run", "--host", "1000", str(script)]) == 2
    assert "from 0.01 to 100" in capsys.readouterr().err
