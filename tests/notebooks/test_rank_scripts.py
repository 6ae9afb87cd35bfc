"""The scripts of ranks in the lessons are plain PyTorch, and run under PyTorch's own torchrun."""

import ast
import os
import re
import subprocess
import sys

import pytest

from benchmarks.lesson_runs import lessons
from benchmarks.notebooks import cells
from labkit.reading_time import tags

MAGIC, FILE = "%%torchrun", "%%writefile"
OF_THE_KIT = {"labkit", "gpulessons", "gputrace", "labcourse", "virtualgpu"}
WHOLE = ("10_ddp_from_the_inside", "whole")
SECONDS = 300


def scripts():
    """Return each cell of ranks in all lessons by its lesson and its name."""
    found = {}
    for path in lessons():
        for cell in cells(path):
            if cell.cell_type == "code" and cell.source.startswith(MAGIC):
                found[path.stem, cell.id] = cell
    return found


def files():
    """Return each cell that writes a script by its lesson and the name of the file."""
    found = {}
    for path in lessons():
        for cell in cells(path):
            if (
                cell.cell_type == "code"
                and cell.source.startswith(FILE)
                and "init_process_group" in cell.source
            ):
                found[path.stem, cell.source.split(maxsplit=2)[1]] = cell
    return found


SCRIPTS, FILES = scripts(), files()
ARGUMENTS = {"fsdp_step.py": ["2", "256", "512"]}  # for two ranks


def program(key):
    """Return the script in a cell, without the line of the magic."""
    return (SCRIPTS | FILES)[key].source.partition("\n")[2]


def options(key):
    """Return the first line of the cell, the magic with its options."""
    return SCRIPTS[key].source.partition("\n")[0]


def ranks(key):
    """Return the number of ranks that a cell starts."""
    asked = re.search(r"--(?:ranks|simulate) (\d+)", options(key))
    return int(asked[1]) if asked else 2


def runs_on_cpus(key):
    """Return whether the ranks of a cell compute on the CPU, as its options say."""
    return "--devices cpu" in options(key)


def imported(source):
    """Return the names of the packages that a script imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def torchrun(folder, source, count, on_cpus, arguments=(), **environment):
    """Return the lines that the ranks of a script print under PyTorch's own torchrun.

    `count` is the number of ranks. With `on_cpus`, the ranks see no GPU.
    """
    (folder / "train.py").write_text(source)
    start = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CHECKPOINT")
    }
    if on_cpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ""
    ended = subprocess.run(
        [*start, f"--nproc-per-node={count}", "train.py", *arguments],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def named(keys):
    """Return the cells as parameters of a test. Cells that need GPUs have a mark."""
    parameters = []
    for key in keys:
        marks = [] if runs_on_cpus(key) else [pytest.mark.gpu(ranks(key))]
        parameters.append(pytest.param(key, id="-".join(key), marks=marks))
    return parameters


@pytest.mark.parametrize("key", [pytest.param(key, id="-".join(key)) for key in SCRIPTS | FILES])
def test_a_script_of_ranks_imports_nothing_of_the_kit(key):
    assert not imported(program(key)) & OF_THE_KIT


def test_imports_are_found_wherever_they_are():
    source = "import os.path\ndef main():\n    from labkit.ranks import torchrun\n"
    assert imported(source) == {"os", "labkit"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", named(key for key, cell in SCRIPTS.items() if "raises-exception" not in tags(cell))
)
def test_a_script_of_ranks_runs_under_plain_torchrun(key, tmp_path):
    torchrun(tmp_path, program(key), ranks(key), runs_on_cpus(key))


@pytest.mark.slow
@pytest.mark.gpu(2)
@pytest.mark.parametrize("key", [pytest.param(key, id="-".join(key)) for key in FILES])
def test_a_script_that_a_cell_writes_runs_under_plain_torchrun(key, tmp_path):
    torchrun(tmp_path, program(key), 2, False, ARGUMENTS.get(key[1], []))


def without_options(line):
    """Return the epoch and the loss that a line of the whole script tells."""
    return re.search(r"epoch (\d+): .* mean loss ([\d.]+)", line).groups()


@pytest.mark.slow
@pytest.mark.parametrize("on_cpus", [True, pytest.param(False, marks=pytest.mark.gpu(2))])
def test_the_whole_script_goes_on_where_it_stopped(tmp_path, on_cpus):
    source = program(WHOLE)
    three, five = "EPOCHS, ROWS, PARTS, CHECKPOINT = 3,", "EPOCHS, ROWS, PARTS, CHECKPOINT = 5,"
    longer = source.replace(three, five)
    assert longer != source
    first = torchrun(tmp_path, source, 2, on_cpus)
    assert [path.name for path in tmp_path.glob("*.pt*")] == ["checkpoint.pt"]
    again = torchrun(tmp_path, longer, 2, on_cpus)
    assert [without_options(line)[0] for line in first + again] == ["0", "1", "2", "3", "4"]
    assert torchrun(tmp_path, longer, 2, on_cpus, CHECKPOINT="other.pt") == first + again


@pytest.mark.slow
def test_more_ranks_make_the_effective_batch_and_the_learning_rate_larger_and_the_steps_fewer(
    tmp_path,
):
    lines = torchrun(tmp_path, program(WHOLE), 4, on_cpus=True)
    told = "4 steps of 128 rows (0 skipped), learning rate 0.2,"
    assert all(told in line for line in lines) and len(lines) == 3


@pytest.mark.slow
def test_training_goes_on_with_the_learning_rate_of_its_own_number_of_ranks(tmp_path):
    source = (
        program(WHOLE) + '\nprint(f"trained with {optimizer.param_groups[0][\'lr\']}\\n", end="")'
    )
    lines = torchrun(tmp_path, source, 2, on_cpus=True)  # rank 1 may end before rank 0 prints
    assert [line for line in lines if "trained" in line] == ["trained with 0.1"] * 2
    assert torchrun(tmp_path, source, 4, on_cpus=True) == ["trained with 0.2"] * 4
