"""Smoke test of each package below the kit. `make unit-packages` runs the packages' own tests."""

import pytest
import torch

import gputrace
import labkit
from labcourse import assignment, release
from labkit.lesson_copies import shipped


@pytest.fixture
def gpu():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


@pytest.mark.usefixtures("gpu")
def test_a_virtual_gpu_has_values_memory_and_a_time():
    before = torch.cuda.memory_allocated()
    x = torch.arange(4.0, device="cuda").reshape(2, 2)
    assert torch.cuda.memory_allocated() - before == 512
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    assert (x @ x).tolist() == [[2, 3], [6, 11]]
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0


@pytest.mark.usefixtures("gpu")
def test_a_recording_reports_the_peak():
    with gputrace.record() as trace:
        x = torch.ones(1 << 20, device="cuda")
        y = x + 1
        del x, y
    assert trace.peak == 8 << 20


def test_a_lab_is_handed_out_without_its_solutions(tmp_path):
    path = tmp_path / "course.toml"
    path.write_text(f'notebooks = "{shipped()}"\n[labs."00"]\n')
    course = assignment.read(path)
    [lab] = course.labs
    student = release.student_copy(course, lab)
    assert any("exercise" in cell.metadata.get("tags", []) for cell in student.cells)
    assert all("Solution of" not in cell.source for cell in student.cells)
    assert all(release.solutions(course, lab).values())
