"""Memory that several processes map, and its files after the processes have ended."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from virtualgpu.processes import shared_file
from virtualgpu.processes.shared_file import WORD, SharedFile

OTHER = """
import os, sys
from virtualgpu.processes.shared_file import SharedFile
file = SharedFile(address=sys.argv[1])
"""


def other(file: SharedFile, code: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER + code, file.address],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_another_process_writes_and_this_one_reads():
    file = SharedFile(4 * WORD)
    assert list(file.words) == [0] * 4
    file.words[0] = 5
    process = other(file, "file.words[1] = -file.words[0]; print(len(file.words))")
    assert process.communicate()[0] == "4\n"
    assert list(file.words) == [5, -5, 0, 0]
    file.close()
    file.close()


def test_a_process_that_is_killed_leaves_the_lock():
    file = SharedFile(WORD)
    with other(
        file,
        "context = file.locked(); context.__enter__(); print('in', flush=True); sys.stdin.read()",
        stdin=subprocess.PIPE,
    ) as it:
        assert it.stdout.readline() == "in\n"
        entered = threading.Event()

        def enter() -> None:
            with file.locked():
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.1)
        it.kill()
        assert entered.wait(30)
        thread.join()
    file.close()


def test_a_block_within_a_block_leaves_the_lock_to_the_outer_one():
    file = SharedFile(WORD)
    with file.locked():
        with file.locked():
            pass
        with other(
            file,
            "print('ready', flush=True); context = file.locked(); context.__enter__(); "
            "file.words[0] = 1",
        ) as it:
            it.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                it.wait(timeout=0.3)
            assert file.words[0] == 0
            it.kill()
    file.close()


def test_an_address_ends_with_its_process():
    file = SharedFile(WORD)
    address = file.address
    file.close()
    with pytest.raises(OSError):
        SharedFile(address=address)


def test_a_number_that_another_file_has_by_now_is_not_opened(tmp_path):
    """Check this because a descriptor's number is reused at once.

    Its old owner must not write into the new file.
    """
    file = SharedFile(WORD)
    address = file.address
    file.close()
    path = tmp_path / "precious"
    path.write_bytes(bytes(WORD))
    with path.open("r+b") as reused:
        assert f"/fd/{reused.fileno()}:" in address
        with pytest.raises(FileNotFoundError):
            SharedFile(address=address)


@pytest.mark.skipif(
    not shared_file.has_proc(), reason="only Linux has files without a name that others can open"
)
def test_no_name_is_taken_anywhere(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    file = SharedFile(WORD)
    assert not list(tmp_path.iterdir()) and not {
        name for name in set(os.listdir("/dev/shm")) - before if "labkit" in name
    }
    file.close()


def test_where_there_is_no_proc_its_maker_removes_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared_file, "has_proc", lambda: False)
    file = SharedFile(2 * WORD)
    again = SharedFile(address=file.address)
    again.words[1] = 3
    assert file.words[1] == 3 and Path(file.address).parent == tmp_path
    again.close()
    assert len(list(tmp_path.iterdir())) == 1
    file.close()
    assert not list(tmp_path.iterdir())
