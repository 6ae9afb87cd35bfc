"""A release hands out stubs: an exercise that was answered in the notebook is refused by name."""

import json
import re
import shutil

import pytest

from labcourse import assignment, release
from labkit import checks, lesson_copies

from .handed_in import NOTEBOOKS, solution

EXERCISES = list(checks.exercises())


def described(tmp_path, number, notebooks=""):
    path = tmp_path / "course.toml"
    path.write_text(f'{notebooks}\n[labs."{number}"]')
    return assignment.read(path)


def answered(folder, number, answer):
    """Return a folder with a copy of a lesson in which an exercise's cell contains `answer`."""
    source = next(NOTEBOOKS.glob(f"{number[:2]}_*.ipynb"))
    folder.mkdir()
    notebook = json.loads(source.read_text())
    at = (
        next(
            i
            for i, cell in enumerate(notebook["cells"])
            if f'labkit.check("{number}"' in "".join(cell["source"])
        )
        - 1
    )
    stub = "".join(notebook["cells"][at]["source"])
    notebook["cells"][at]["source"] = answer(stub)
    (folder / source.name).write_text(json.dumps(notebook))
    return stub


@pytest.mark.parametrize("number", EXERCISES)
def test_a_lesson_in_which_an_exercise_was_answered_is_not_released(number, tmp_path):
    answered(tmp_path / "mine", number, lambda stub: solution(number))
    course = described(tmp_path, number[:2], 'notebooks = "mine"')
    with pytest.raises(ValueError, match=re.escape(f"exercise {number}: its cell in ")):
        release.files(course, list(course.labs), "labkit")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "def on_gpu(",
        "def on_cpu(numbers): ...",
        "def on_gpu(numbers):\n    # torch.tensor(numbers, device='cuda')\n    ...",
        "def on_gpu(numbers): ...\nprint(torch.tensor([1.0], device='cuda'))",
        "on_gpu = lambda numbers: torch.tensor(numbers, device='cuda')",
        "def on_gpu(numbers):\n    '''Mine.'''\n    return torch.tensor(numbers)",
    ],
)
def test_anything_but_the_stub_is_refused(answer, tmp_path):
    answered(tmp_path / "mine", "00.1", lambda stub: answer)
    course = described(tmp_path, "00", 'notebooks = "mine"')
    with pytest.raises(ValueError, match=r"exercise 00\.1"):
        release.files(course, list(course.labs), "labkit")


def test_a_stub_may_be_explained_in_another_language(tmp_path):
    answered(
        tmp_path / "mine",
        "00.1",
        lambda stub: stub.replace("Return a tensor on the GPU", "Ein Tensor auf der GPU"),
    )
    course = described(tmp_path, "00", 'notebooks = "mine"')
    assert (
        "Ein Tensor auf der GPU"
        in release.files(course, list(course.labs), "labkit")["student/00_start_here.ipynb"]
    )


def test_a_release_comes_from_the_kit_s_own_lessons_whatever_lies_in_the_learner_s_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    expected = release.files(course := described(tmp_path, "00"), list(course.labs), "labkit")
    for name in ("notebooks", "work"):
        answered(tmp_path / name, "00.1", lambda stub: solution("00.1"))
    course = described(tmp_path, "00")
    assert course.notebooks == lesson_copies.shipped()
    assert release.files(course, list(course.labs), "labkit") == expected


def test_nothing_is_written_when_one_lab_of_several_was_answered(tmp_path):
    from labkit.cli import main

    shutil.copytree(NOTEBOOKS, tmp_path / "all")
    answered(tmp_path / "mine", "01.2", lambda stub: solution("01.2"))
    shutil.copy(next((tmp_path / "mine").iterdir()), tmp_path / "all")
    (tmp_path / "course.toml").write_text('notebooks = "all"\n[labs."00"]\n[labs."01"]')
    assert (
        main(
            [
                "course",
                "release",
                "--course",
                str(tmp_path / "course.toml"),
                "--to",
                str(tmp_path / "labs"),
            ]
        )
        == 2
    )
    assert not (tmp_path / "labs").exists()
