"""`labkit.torchrun` runs a module as `torchrun -m` does, and reports errors as for a script."""

import subprocess
import sys
from collections import Counter

import pytest

import labkit
from labkit import cli

pytestmark = [pytest.mark.usefixtures("nothing_left", "on_cpus"), pytest.mark.slow]

CODE = """
import os, sys
from . import word
result = [sys.argv, __name__, __package__, __spec__.name, word, sys.path[0]]
# In one call, because under torchrun both ranks write to one pipe.
os.write(1, (" ".join(map(str, result)) + "\\n").encode())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a package and modules that can be run. Nothing imports them here."""
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    (lessons / "__init__.py").write_text(
        "import sys\nassert 'pytest' not in sys.modules\nword = 'own'\n"
    )
    (lessons / "__main__.py").write_text(CODE)
    (lessons / "train.py").write_text(CODE)
    (lessons / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no')\n"
        "time.sleep(100)\n"
    )
    (lessons / "hangs.py").write_text("import time\ntime.sleep(100)\n")
    (lessons / "unfinished.py").write_text("x = 1\nif x\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["lessons", "lessons.train"])
def test_a_module_runs_as_after_pytorchs_torchrun(folder, name):
    ranks = labkit.torchrun(name, "--epochs", 2, module=True, quiet=True)
    options = f"--log-dir {folder} --standalone --nproc-per-node=2 -m {name} --epochs 2"
    theirs = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    expected = subprocess.run(theirs, capture_output=True, text=True, timeout=280)
    assert expected.returncode == 0, expected.stderr
    assert Counter(ranks.outputs) == Counter(expected.stdout.splitlines(keepends=True))


def test_what_goes_wrong_is_told_with_the_modules_lines(folder):
    path = folder / "lessons"
    with pytest.raises(
        labkit.TorchrunError, match=r"^rank 1 raised ValueError: no \(line 3\)\."
    ) as raised:
        labkit.torchrun("lessons.fails", module=True, quiet=True)
    assert (
        f"In rank 1:\nTraceback (most recent call last):\n"
        f'  File "{path / "fails.py"}", line 3, in <module>' in raised.value.__notes__[0]
    )
    with pytest.raises(
        labkit.TorchrunError, match=r"At that time ranks 0 and 1 ran line 2, `time.sleep\(100\)`\.$"
    ):
        labkit.torchrun("lessons.hangs", module=True, quiet=True, timeout=20)
    with pytest.raises(SyntaxError) as unfinished:
        labkit.torchrun("lessons.unfinished", module=True)
    assert (unfinished.value.filename, unfinished.value.lineno) == (str(path / "unfinished.py"), 2)


def test_the_commands(folder):
    """The commands are `torchrun`, with several ranks and with a simulated one, and `trace`."""

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "labkit", *arguments],
            capture_output=True,
            text=True,
            timeout=280,
        )

    there = command("torchrun", "--in-order", "-m", "lessons", "--x")
    said = (
        f"['{folder / 'lessons' / '__main__.py'}', '--x'] __main__ lessons lessons.__main__ own "
        f"{folder}"
    )
    assert (there.returncode, there.stderr) == (0, "")
    assert (
        there.stdout == f"labkit: 2 ranks: CPU tensors, gloo.\n[rank 0] {said}\n[rank 1] {said}\n"
    )
    alone = command("torchrun", "--simulate", "8", "--module", "lessons", "--x")
    assert (alone.returncode, alone.stdout) == (0, f"{said}\n")
    traced = command("trace", "--ranks", "2", "--output", "page.html", "-m", "lessons", "--x")
    assert traced.returncode == 0 and sorted(traced.stdout.splitlines())[:2] == [
        f"[rank {rank}] {said}" for rank in (0, 1)
    ]
    assert "--ranks=2 -m lessons --x" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "no module named absent"),
        ("no name", "no module named no name"),
        ("lessons.absent", "lessons.absent is not a module that can be run"),
        ("sys", "sys is not a module that can be run"),
    ],
)
def test_a_module_that_is_not_there_is_refused(folder, capsys, name, why):
    assert cli.main(["torchrun", "-m", name]) == 2
    assert capsys.readouterr().err == f"labkit torchrun: {why}\n"
