"""A learner's progress file loses nothing when two kernels write it or the disk fails."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest

from labkit import progress_file, whole_files

MANY = 300
WRITER = f"""
import sys, time
from labkit import progress_file
print("ready", flush=True)
sys.stdin.readline()
for number in range({MANY}):
    progress_file.add("both", True)
    progress_file.add(sys.argv[1], number % 2 == 0)
"""
# The superuser may write everywhere, so the program first gives up that right.
IN_A_READ_ONLY_FOLDER = """
import os, sys, warnings
import filelock  # before the change of user, who may not read the installation
from labkit import progress_file
if os.getuid() == 0:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    progress_file.add("01.1", True)
    progress_file.add("01.1", False)
print(progress_file.tries["01.1"], *(str(warning.message) for warning in told), sep="\\n")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The progress file of a new kernel, in a folder of its own."""
    file = tmp_path / ".labkit" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(file))
    monkeypatch.setattr(progress_file, "tries", type(progress_file.tries)(list))
    file.parent.mkdir()
    return file


@pytest.mark.slow
def test_two_processes_lose_none_of_each_others_entries(file):
    environment = os.environ | {"LABKIT_PROGRESS": str(file)}
    command = [sys.executable, "-c", WRITER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], env=environment, **pipes) for name in ("a", "b")]
    for writer in writers:
        writer.stdout.readline()
    for writer in writers:
        writer.communicate("go\n")
    assert [writer.returncode for writer in writers] == [0, 0]
    kept = json.loads(file.read_text())
    assert {what: len(tried) for what, tried in kept.items()} == {
        "a": MANY,
        "b": MANY,
        "both": 2 * MANY,
    }
    assert kept["a"] == kept["b"] == [True, False] * (MANY // 2)
    assert not list(file.parent.glob("*.new"))


BROKEN = [
    "[",
    "",
    '{"01.1": [true]',
    "[" * 100_000,
    "[1, 2]",
    "3",
    '{"01.1": "yes"}',
    '{"01.1": [1, 0]}',
    '{"01.1": {"tries": 3}}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_record_is_kept_and_the_learner_hears_of_it(file, text):
    file.write_text(text)
    with pytest.warns(
        UserWarning,
        match=r"next check or prediction keeps the file under another name and begins a new one",
    ):
        progress_file.read()
    assert file.read_text() == text
    with pytest.warns(
        UserWarning, match=r"begins anew\. The old file is kept as .*progress\.unreadable-1\.json"
    ) as told:
        progress_file.add("01.1", True)
    assert len(told) == 1
    assert (file.parent / "progress.unreadable-1.json").read_text() == text
    assert json.loads(file.read_text()) == {"01.1": [True]}
    progress_file.add("01.1", False)
    assert json.loads(file.read_text()) == {"01.1": [True, False]}


def test_bytes_that_are_no_text_are_kept_too_and_no_copy_replaces_another(file):
    for number, content in enumerate((b"\xff\xfe\x00", b"\x80"), 1):
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=f"unreadable-{number}"):
            progress_file.add("01.1", True)
        assert (file.parent / f"progress.unreadable-{number}.json").read_bytes() == content
    assert json.loads(file.read_text()) == {"01.1": [True, True]}  # the kernel still knew the first


def test_what_could_not_be_written_is_written_later(file):
    progress_file.add("01.1", False)
    file.rename(file.parent / "aside")
    file.mkdir()  # whatever stands in the way
    with pytest.warns(
        UserWarning, match=r"your progress is kept in this kernel only: .*progress\.json"
    ):
        progress_file.add("01.1", True)
    file.rmdir()
    (file.parent / "aside").rename(file)
    progress_file.add("02.1", True)
    assert json.loads(file.read_text()) == {"01.1": [False, True], "02.1": [True]}


@pytest.mark.slow
def test_a_read_only_folder_is_told_of_and_left_as_it_is():
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "progress.json"
        file.write_text('{"01.1": [false]}')
        file.chmod(0o444)
        Path(name).chmod(0o555)
        command = [sys.executable, "-c", IN_A_READ_ONLY_FOLDER]
        environment = os.environ | {"LABKIT_PROGRESS": str(file)}
        told = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert told[0] == "[True, False]" and len(told) == 3
        assert "your progress is kept in this kernel only" in told[1] and name in told[1]
        assert os.listdir(name) == ["progress.json"] and file.read_text() == '{"01.1": [false]}'


def test_a_crash_while_writing_leaves_the_old_file(file, monkeypatch):
    progress_file.add("01.1", True)

    def crash(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.warns(UserWarning, match="No space left on device"):
        progress_file.add("01.1", False)
    assert json.loads(file.read_text()) == {"01.1": [True]} and not list(file.parent.glob("*.new"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_without_locks_is_written_all_the_same(file, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    progress_file.add("01.1", True)
    assert json.loads(file.read_text()) == {"01.1": [True]}


def test_a_lock_that_another_process_keeps_is_waited_for_and_then_told_of(file, monkeypatch):
    monkeypatch.setattr(whole_files, "PATIENCE", 0.05)
    with (
        whole_files.locked(file),
        pytest.warns(UserWarning, match=r"kept in this kernel only: .*lock"),
    ):
        progress_file.add("01.1", True)
    progress_file.add("01.1", False)
    assert json.loads(file.read_text()) == {"01.1": [True, False]}
