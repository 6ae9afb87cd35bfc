"""A course of the kit's own lessons, and a sandbox to grade it in."""

import pytest
from handed_in import COURSE, LIMITS

from labcourse import assignment, backends
from labcourse.sandbox import Sandbox


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> assignment.Course:
    path = tmp_path_factory.mktemp("course") / "course.toml"
    path.write_text(COURSE)
    return assignment.read(path)


@pytest.fixture(scope="session")
def bubblewrap() -> backends.Backend:
    """Bubblewrap; where it does not work, tests of what only it can do are skipped."""
    try:
        return backends.best(LIMITS.scratch, "bubblewrap")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sandbox(bubblewrap):
    """One sandbox for many submissions: none may harm the next."""
    with Sandbox(bubblewrap, LIMITS) as box:
        yield box
