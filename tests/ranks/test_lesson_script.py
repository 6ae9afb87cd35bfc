"""Lesson 10's script is made of what its cells have shown, and runs under PyTorch's own torchrun, without the kit."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.slow
LESSON = Path(__file__).parents[2] / "notebooks" / "10_ddp_from_the_inside.ipynb"


def script(cell: str) -> str:
    """Without the magic's line."""
    return next(c.source for c in nbformat.read(LESSON, as_version=4).cells if c.id == cell).partition("\n")[2]


def torchrun(folder: Path, **environment: str) -> list[str]:
    """The lines that two ranks print."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    without_kit = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CHECKPOINT")}
    ended = subprocess.run(command, cwd=folder, env=without_kit | environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_it_is_made_of_the_cells_before():
    first, second, whole = (script(cell) for cell in ("hello", "script", "whole"))
    assert first[first.index("on_gpu, local") : first.index("rank, ranks")] in whole
    for part in ("x = ", "rows = ", "torch.manual_seed(", "model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)"):
        [line] = [line for line in second.splitlines() if line.startswith(part)]
        assert line.removesuffix(")") in whole


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_it_runs_without_the_kit_and_goes_on_where_it_stopped(tmp_path, devices):
    environment = {"CUDA_VISIBLE_DEVICES": ""} if devices == "cpu" else {}
    program = tmp_path / "train.py"
    program.write_text(script("whole"))
    assert "labkit" not in program.read_text()
    assert [line.split(" loss")[0] for line in torchrun(tmp_path, **environment)] == [f"epoch {epoch}: mean" for epoch in range(3)]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".pt"] == ["checkpoint.pt"]
    program.write_text(script("whole").replace("EPOCHS, PARTS, CHECKPOINT = 3", "EPOCHS, PARTS, CHECKPOINT = 5"))
    again = torchrun(tmp_path, **environment)
    assert [line.split(":")[0] for line in again] == ["epoch 3", "epoch 4"]
    assert torchrun(tmp_path, **environment, CHECKPOINT="other.pt")[3:] == again  # as if it had never stopped
