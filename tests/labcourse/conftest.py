"""A course of the kit's own lessons, and a sandbox to grade it in."""

import pytest
from handed_in import COURSE, LIMITS

from labcourse import assignment, wall
from labcourse.sandbox import Sandbox


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> assignment.Course:
    path = tmp_path_factory.mktemp("course") / "course.toml"
    path.write_text(COURSE)
    return assignment.read(path)


@pytest.fixture(scope="session")
def strong_wall() -> wall.Wall:
    """Bubblewrap; where it does not work, tests of what only it can do are skipped."""
    try:
        return wall.best(LIMITS.scratch, "bubblewrap")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sandbox(strong_wall):
    """One sandbox for many submissions: none may harm the next."""
    with Sandbox(strong_wall, LIMITS) as box:
        yield box
