"""A Dask cluster grades as one machine does, over a network of two, and when a worker is lost."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import pytest

from labcourse import assignment

from .handed_in import COURSE, notebook
from .test_grading import CLASS, LAB, RIGHT, WRONG, grade, graded_files, hand_in

PORT = 38786
NAMES = ("labkit-a", "labkit-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
MANY = CLASS | {
    f"s{number:02d}": notebook(
        RIGHT if number % 3 else WRONG, f"# {number}", RIGHT if number % 3 else WRONG
    )
    for number in range(8)
}

pytest.importorskip("distributed", reason="Dask is not installed: run `make test-cluster`")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def two_machines():
    """Two network namespaces with a cable between them. Tests are skipped if they are forbidden."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need root and iproute2")
    try:
        for name in NAMES:
            if ip("netns", "add", name).returncode:
                pytest.skip("network namespaces cannot be made here")
        ip(
            "link",
            "add",
            "labkit0",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "name",
            "labkit1",
            "netns",
            NAMES[1],
        )
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            for words in (
                ("addr", "add", f"{address}/24", "dev", f"labkit{number}"),
                ("link", "set", f"labkit{number}", "up"),
                ("link", "set", "lo", "up"),
            ):
                assert ip("-n", name, *words).returncode == 0
        yield NAMES
    finally:
        for name in NAMES:
            ip("netns", "delete", name)


@contextlib.contextmanager
def started(*command):
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def worker(namespace, number):
    """Start a Dask worker with one thread on one of the machines."""
    dask = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        f"tcp://{ADDRESSES[0]}:{PORT}",
        "--nthreads",
        "1",
        "--no-dashboard",
    ]
    return started(
        "ip",
        "netns",
        "exec",
        namespace,
        *dask,
        "--name",
        f"worker-{number}",
        "--death-timeout",
        "120",
    )


@pytest.fixture
def course_file(tmp_path):
    path = tmp_path / "course.toml"
    path.write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', ""))
    return path


def test_two_machines_give_the_bytes_of_one_and_losing_a_worker_loses_nothing(
    two_machines, course_file, borrowing, tmp_path
):
    with borrowing():
        assert grade(
            assignment.read(course_file), hand_in(tmp_path / "in", MANY), tmp_path / "alone"
        ) == len(MANY)
    inside = ["ip", "netns", "exec", NAMES[0]]
    scheduler = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        ADDRESSES[0],
        "--port",
        str(PORT),
        "--no-dashboard",
    ]
    command = [
        *inside,
        sys.executable,
        "-m",
        "labkit",
        "course",
        "grade",
        str(tmp_path / "in"),
        "--course",
        str(course_file),
    ]
    command += [
        "--scheduler",
        f"tcp://{ADDRESSES[0]}:{PORT}",
        "--sandbox",
        "bubblewrap",
        "--out",
        str(tmp_path / "two"),
    ]
    with started(*inside, *scheduler), worker(NAMES[0], 1), worker(NAMES[1], 2) as second:
        grading = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while f"of {len(MANY)}" not in grading.stderr.readline():
            assert grading.poll() is None
        os.killpg(second.pid, 9)
        said, errors = grading.communicate(timeout=500)
    assert grading.returncode == 0, errors
    assert f"{len(MANY)} graded" in said
    assert graded_files(tmp_path / "two") == graded_files(tmp_path / "alone")
    assert (tmp_path / "alone" / "records" / LAB / "ada.json").exists()


def test_no_scheduler_is_said_in_one_line(course_file, tmp_path):
    hand_in(tmp_path / "in", {"ada": CLASS["ada"]})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    arguments = [
        "course",
        "grade",
        "in",
        "--out",
        "out",
        "--course",
        str(course_file),
        "--scheduler",
        f"tcp://127.0.0.1:{port}",
    ]
    impatient = (
        f"import sys; from labkit import cli; from labcourse import grading; "
        f"grading.PATIENCE = 1; sys.exit(cli.main({arguments}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", impatient], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("labkit course: ")
