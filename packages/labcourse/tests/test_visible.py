"""What a submission sees of this machine: what it needs, and nothing of the course."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labcourse import backends

from .handed_in import LIMITS

RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"
PACKAGES = Path(backends.PACKAGES[2]).parent


@pytest.mark.slow
def test_the_disk_is_empty_but_for_what_python_needs(tried):
    """Each folder above a visible one shows only the next folder on the way to it."""
    cell = (
        "import os\n"
        "for folder in ('/', '/root', '/home', '/etc', '/usr', '/usr/local', '/tmp', KIT):\n"
        "    if os.path.isdir(folder): print(folder, sorted(os.listdir(folder)))\n"
        "assert not os.path.exists(KIT + '/notebooks'), os.listdir(KIT)\n"
        "assert not os.path.exists(KIT + '/tests') and not os.path.exists(KIT + '/.git')\n"
        "try: assert open(KIT + '/gpulessons/lesson_00/wrong_answers.txt').read() == ''\n"
        "except PermissionError: pass\n"
        "assert not {'share', 'src'} & set(os.listdir('/usr/local'))\n"
        "assert not os.path.exists('/etc/passwd') and not os.path.exists('/var')\n"
    )
    examined = tried("00.1", f"KIT = {os.fspath(PACKAGES)!r}\n{cell}", RIGHT)
    assert (examined.points, examined.cell_errors) == (1, [])


@pytest.mark.slow
def test_a_submission_may_write_where_programs_usually_do(tried):
    cell = "import tempfile\nfor folder in ('/tmp', '.', tempfile.gettempdir(), '/dev/shm'):\n"
    cell += "    assert not open(f'{folder}/a', 'w').write('')"
    if any(backends._is_inside(path, "/tmp") for path in backends._visible()):
        pytest.skip("Python lies in the folder for temporary files here")
    for _ in range(2):
        examined = tried("00.1", cell + "\nimport os\nprint(os.listdir('/tmp'))", RIGHT)
        assert (examined.points, examined.cell_errors) == (1, [])


def test_a_course_among_what_python_needs_is_refused(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    course = packages / "course"
    course.mkdir(parents=True)
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(course)
    monkeypatch.setattr(backends, "_visible", lambda: [os.fspath(packages)])
    for private in (course, packages, elsewhere):
        with pytest.raises(RuntimeError, match=f"submissions would see {private}, because"):
            backends.best(LIMITS.scratch, "bubblewrap", [private])
    backends._require_hidden([tmp_path, tmp_path / "missing"])


def test_no_folder_is_shown_that_may_hold_other_things():
    whole = {
        "/",
        "/usr",
        "/usr/local",
        "/usr/share",
        "/etc",
        "/opt",
        "/home",
        os.path.expanduser("~"),
    }
    whole |= {sys.prefix, sys.base_prefix, os.fspath(PACKAGES), os.fspath(PACKAGES.parent)}
    assert not whole & set(backends._visible())


def test_packages_of_the_user_are_shown_where_python_uses_them(tmp_path, monkeypatch):
    folder = os.fspath(tmp_path / "site-packages")
    monkeypatch.setattr(backends.site, "getusersitepackages", lambda: folder)
    for enabled in (True, False):
        monkeypatch.setattr(backends.site, "ENABLE_USER_SITE", enabled)
        path = backends.environment("/submission")["PYTHONPATH"].split(os.pathsep)
        assert (folder in backends._visible(), folder in path) == (enabled, enabled)


@pytest.mark.parametrize("name", ["bin", "lib", "local/lib", "share/zoneinfo"])
def test_a_course_in_a_folder_of_the_system_is_refused(name):
    if not os.path.isdir(f"/usr/{name}"):
        pytest.skip(f"there is no /usr/{name} here")
    with pytest.raises(RuntimeError, match="Move the course"):
        backends._require_hidden([Path("/usr", name)])


def test_the_kits_own_lessons_are_hidden_where_a_package_holds_them(tmp_path, monkeypatch):
    """After `pip install`, the solutions are in the installed package."""
    lessons = tmp_path / "labkit" / "notebooks"
    lessons.mkdir(parents=True)
    monkeypatch.setattr(backends, "_kit_folders", lambda: [os.fspath(tmp_path)])
    monkeypatch.setattr(backends, "_visible", lambda: [os.fspath(tmp_path / "labkit")])
    assert os.fspath(lessons) in backends._with_answers()
    backends._require_hidden([lessons])


LOOK = (
    "import os, json\n"
    "found = [os.path.join(place, name) for place, _, names in os.walk({folder!r}) for name in "
    "names]\n"
    "print(json.dumps([name for name in found if not name.endswith(('.py', '.pyc'))]))\n"
)


@pytest.mark.slow
def test_a_virtual_environment_that_is_the_courses_folder_shows_nothing_of_it(bubblewrap, tmp_path):
    """The environment is the result of `python -m venv .` in the course's folder.

    Only the parts that Python needs are visible.
    """
    made = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path]
    subprocess.run(made, check=True)
    for name in ("course.seed", "in/bob/00_start_here.ipynb", "out/grades.csv", "lib/own.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("private")
    program = (
        "import subprocess, sys\nfrom pathlib import Path\nfrom labcourse import backends\n"
        f"course = Path({os.fspath(tmp_path)!r})\n"
        "backend = backends.best(1 << 20, 'bubblewrap', [course])\n"
        f"look = {LOOK.format(folder=os.fspath(tmp_path))!r}\n"
        "subprocess.run([*backend.command, sys.executable, '-P', '-s', '-c', look], check=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.fspath(PACKAGES), *sys.path])}
    python = tmp_path / "bin" / "python"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    seen = [Path(name).relative_to(tmp_path).parts[0] for name in json.loads(done.stdout)]
    assert set(seen) <= {"bin", "pyvenv.cfg"}
