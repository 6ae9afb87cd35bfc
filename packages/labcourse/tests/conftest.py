"""A course of the kit's own lessons, and a sandbox to grade it in."""

import contextlib

import pytest

from labcourse import assignment, backends, examination, gradescope, grading
from labcourse.sandbox import Sandbox
from labkit.lesson_copies import shipped

from .handed_in import COURSE, LIMITS, notebook


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> assignment.Course:
    path = tmp_path_factory.mktemp("course") / "course.toml"
    path.write_text(COURSE)
    return assignment.read(path)


@pytest.fixture(scope="session")
def bubblewrap() -> backends.Backend:
    """The backend bubblewrap. Tests that need it are skipped where it does not work."""
    try:
        return backends.best(LIMITS.scratch, "bubblewrap")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sandbox(bubblewrap):
    """A started sandbox that many tests use. No submission may harm the next one."""
    with Sandbox(bubblewrap, LIMITS) as box:
        yield box


class Borrowed:
    """Replacement of the class Sandbox that always uses `lent`, a sandbox that has started.

    So a grading starts no sandbox of its own, and does not stop the lent one.
    """

    def __init__(self, lent: Sandbox) -> None:
        self._lent = lent

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def __enter__(self) -> Sandbox:
        return self._lent

    def __exit__(self, *ended: object) -> None:
        pass


@pytest.fixture(scope="session")
def borrowing(sandbox):
    """A function that makes a context. In it, gradings with one worker use the shared sandbox.

    Otherwise each grading would start a sandbox of its own.
    """

    @contextlib.contextmanager
    def borrowed():
        with pytest.MonkeyPatch.context() as patch:
            for module in (grading, gradescope):
                patch.setattr(module, "Sandbox", lambda *given: Borrowed(sandbox))
            yield

    return borrowed


@pytest.fixture
def borrowed_sandbox(borrowing):
    """Let the test's gradings use the shared sandbox.

    Tests of the sandbox itself do not use this.
    """
    with borrowing():
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("course") / "course.toml"
    lessons = sorted(lesson.stem[:2] for lesson in shipped().glob("[0-9]*.ipynb"))
    path.write_text(
        COURSE.partition("[labs")[0] + "".join(f'[labs."{lesson}"]\n' for lesson in lessons)
    )
    return assignment.read(path)


@pytest.fixture
def tried(whole, sandbox):
    """A function that tries only one exercise of a lab, and returns its result."""

    def examine(number, *cells, given=""):
        lab = whole.lab(number[:2])
        exercise = next(item for item in lab.exercises if item.number == number)
        lab = assignment.Assignment(lab.name, lab.title, (exercise,))
        cells = [
            cell.replace("ANSWER", "return torch.tensor(numbers, device='cuda')") for cell in cells
        ]
        return examination.examine(
            notebook(*cells, number=number, name=exercise.name),
            "ada",
            lab,
            whole,
            frozenset({given}),
            sandbox,
        )

    return examine
