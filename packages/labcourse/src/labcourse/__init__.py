"""Hand out, collect and grade the exercises of lessons as the labs of a course.

The package uses `labkit.checks` and does not depend on virtual GPUs. Five modules do what the
commands `labkit course release`, `collect` and `grade` do::

    from pathlib import Path

    from labcourse import assignment, collect, grading, release, results

    course = assignment.read(Path("course.toml"))
    release.write(release.files(course, [course.lab("03")], "labkit"), Path("labs"))

    submissions, problems = collect.collect(Path("downloads.zip"), course)
    store = grading.Store(Path("results"))
    grading.grade_all(course, submissions, store, workers=4)
    results.write(course, submissions, problems, store)
"""

from typing import TYPE_CHECKING

from virtualgpu import front_end

front_end.register("labcourse", __file__)

if TYPE_CHECKING:
    from labcourse import assignment as assignment
    from labcourse import collect as collect
    from labcourse import grading as grading
    from labcourse import release as release
    from labcourse import results as results
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)
