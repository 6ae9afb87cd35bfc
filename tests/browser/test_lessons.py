"""Every lesson runs in a notebook as a learner would run it: opened, then all cells."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

LESSONS = sorted(path.name for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", LESSONS)
def test_all_cells_run(open_lesson, front_end, name):
    page = open_lesson(name)
    assert page.locator(front_end.cell).count() > 1
