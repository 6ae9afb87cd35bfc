"""The learner's copies of the lessons: without outputs, and never written over."""

import json
import re

import nbformat
import pytest

from labkit import cli, contents, lesson_copies
from labkit.glossary import Glossary

from .followed_links import dead_links, links

FIRST = "00_start_here.ipynb"
WORD = '<a id="process-group"></a>Process group'


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Two small lessons in place of the kit's, and a glossary of one word."""
    folder = tmp_path / "kit" / "notebooks"
    folder.mkdir(parents=True)
    write_glossary(tmp_path / "kit", f"| {WORD} | several ranks | [0](../notebooks/{FIRST}) |")
    for name in (FIRST, "01_device_basics.ipynb"):
        write(folder / name, "print(1)")
    monkeypatch.setattr(lesson_copies, "shipped", lambda: folder)
    monkeypatch.setattr(lesson_copies.courses, "packages", dict)
    return folder


def write(path, source):
    output = {"output_type": "stream", "name": "stdout", "text": "the answer"}
    cells = [
        {"cell_type": "markdown", "source": ["*Predict:* what is printed?"], "metadata": {}},
        {
            "cell_type": "code",
            "source": [source],
            "metadata": {"tags": ["a"]},
            "outputs": [output],
            "execution_count": 3,
        },
    ]
    path.write_text(
        json.dumps(
            {"cells": cells, "metadata": {"kernelspec": {}}, "nbformat": 4, "nbformat_minor": 5}
        )
    )


def write_glossary(kit, *rows):
    (kit / "docs").mkdir(exist_ok=True)
    table = ["| word | what it means | lesson |", "| --- | --- | --- |", *rows]
    (kit / "docs" / "glossary.md").write_text(
        "\n".join(["# Glossary", "", "All words.", "", *table, ""])
    )


def code(path):
    return json.loads(path.read_text())["cells"][1]


def change(path, source):
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["source"] = source
    path.write_text(json.dumps(notebook))


def test_a_copy_has_no_outputs_and_the_lesson_keeps_them(shipped, tmp_path):
    assert lesson_copies.copy(tmp_path / "work") == []
    copied = code(tmp_path / "work" / FIRST)
    assert (copied["outputs"], copied["execution_count"], copied["metadata"]) == (
        [],
        None,
        {"tags": ["a"]},
    )
    assert "the answer" not in (tmp_path / "work" / FIRST).read_text()
    assert code(shipped / FIRST)["outputs"]


def test_jupyterlab_has_nothing_to_write_into_a_copy_that_it_opens(shipped, tmp_path):
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelspec import get_kernel_dict

    lesson_copies.copy(tmp_path)
    metadata = json.loads((tmp_path / FIRST).read_text())["metadata"]
    assert metadata["language_info"] == IPythonKernel.language_info
    assert metadata["kernelspec"]["display_name"] == get_kernel_dict()["display_name"]


def test_what_was_written_stays_and_a_missing_copy_comes_back(shipped, tmp_path):
    work = tmp_path / "work"
    lesson_copies.copy(work)
    change(work / FIRST, "mine")
    (work / "01_device_basics.ipynb").unlink()
    assert lesson_copies.copy(work) == []
    assert code(work / FIRST)["source"] == "mine" and (work / "01_device_basics.ipynb").exists()


def test_a_copy_without_a_change_follows_the_kit_and_any_other_is_told_of(shipped, tmp_path):
    work = tmp_path / "work"
    lesson_copies.copy(work)
    change(work / "01_device_basics.ipynb", "mine")
    for name in (FIRST, "01_device_basics.ipynb"):
        write(shipped / name, "print(2)")
    [told] = lesson_copies.copy(work)
    assert (
        code(work / FIRST)["source"] == ["print(2)"]
        and code(work / "01_device_basics.ipynb")["source"] == "mine"
    )
    assert "01_device_basics.ipynb was made from another version" in told and "--reset 01" in told


def test_a_lesson_that_has_another_number_now_comes_beside_the_old_copy(shipped, tmp_path):
    work = tmp_path / "work"
    lesson_copies.copy(work)
    change(work / "01_device_basics.ipynb", "mine")
    (shipped / "01_device_basics.ipynb").rename(shipped / "02_device_basics.ipynb")
    write(shipped / "01_sharding.ipynb", "print(2)")
    assert lesson_copies.copy(work) == []
    assert [
        code(work / name)["source"]
        for name in ("01_device_basics.ipynb", "01_sharding.ipynb", "02_device_basics.ipynb")
    ] == [
        "mine",
        ["print(2)"],
        ["print(1)"],
    ]
    assert lesson_copies.reset("01", work)[0].name == "01_sharding.ipynb"


def test_a_file_that_is_no_notebook_stays(shipped, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / FIRST).write_text("notes")
    assert len(lesson_copies.copy(tmp_path / "work")) == 1
    assert (tmp_path / "work" / FIRST).read_text() == "notes"


def test_the_contents_show_what_is_done_before_anything_runs(shipped, tmp_path, monkeypatch):
    monkeypatch.delenv("LABKIT_PROGRESS", raising=False)
    work = tmp_path / "work"
    lesson_copies.copy(work)
    source = (
        '# 1 Device basics\nlabkit.check("01.1", f)\nlabkit.check("01.2", g)\n'
        'labkit.check("01.3", h)\nlabs.CopySpeedLab()'
    )
    write(shipped / "01_device_basics.ipynb", source)
    stored = {
        "01.1": [False, True],
        "01.2": [False, False],
        "CopySpeedLab": [True, True],
        "02.1": [True],
    }
    (work / ".labkit").mkdir()
    (work / ".labkit" / "progress.json").write_text(json.dumps(stored))
    assert lesson_copies.copy(work) == []
    [shown] = code(work / "index.ipynb")["outputs"]
    rows = [line.split("  ") for line in shown["data"]["text/plain"].splitlines()]
    assert [[cell.strip() for cell in row if cell] for row in rows[1:]] == [
        ["*Predict:* what is printed?", "5", "none", "none to make"],
        ["*Predict:* what is printed? ← continue here", "5", "1 of 3", "01.2", "2"],
    ]
    page = shown["data"]["text/html"]
    assert f'<a href="{FIRST}">' in page and page.count("continue here") == 1
    (work / ".labkit" / "progress.json").write_text("[")
    assert "progress cannot be read" in lesson_copies.copy(work)[0]
    change(work / "index.ipynb", "my notes")
    assert lesson_copies.copy(work) == [] and code(work / "index.ipynb")["source"] == "my notes"


@pytest.mark.parametrize(
    ("tries", "file"),
    [
        ({}, None),
        ({"00.1": [False]}, "00_start_here.ipynb"),
        ({"00.1": [False, True]}, "01_device_basics.ipynb"),
        ({"02.4": [False], "00.1": [True]}, "02_streams.ipynb"),
        ({f"13.{number}": [True] for number in range(1, 6)}, "puzzles.ipynb"),
    ],
)
def test_one_continues_in_the_last_lesson_begun_or_after_it(tries, file):
    table = contents.Lessons(lesson_copies.lessons().lessons, tries)
    assert (table.next and table.next.file) == file
    marked = [row[0] for row in table.rows if contents.CONTINUE in row[0]]
    assert len(marked) == (file is not None)


def test_each_lesson_says_what_one_learns_and_how_long_each_sitting_takes():
    for lesson in lesson_copies.lessons().lessons:
        assert lesson.learnt.endswith(".") and 20 < len(lesson.learnt) < 120
        assert all(5 <= minutes <= 60 and minutes % 5 == 0 for minutes in lesson.minutes)
    assert [len(lesson.minutes) for lesson in lesson_copies.lessons().lessons[:3]] == [1, 2, 2]


WITHOUT_A_LAB = ("11", "12", "13")  # 13 has a panel, which takes no prediction


def test_lessons_but_the_first_have_five_exercises_and_all_but_the_last_ones_a_lab():
    first, *others, puzzles = lesson_copies.lessons().lessons
    assert (first.exercises, first.labs) == (("00.1",), ())
    assert [lesson.file for lesson in others if len(lesson.exercises) < 5] == []
    assert (puzzles.file, puzzles.exercises, puzzles.labs) == ("puzzles.ipynb", (), ())
    for lesson in others:
        assert len(lesson.labs) == (0 if lesson.file[:2] in WITHOUT_A_LAB else 1)


def test_every_lesson_begins_and_ends_with_links_to_its_neighbours(tmp_path):
    lesson_copies.copy(tmp_path)
    lessons = sorted(
        path
        for path in tmp_path.glob("*.ipynb")
        if path.name not in ("index.ipynb", "glossary.ipynb")
    )
    assert len(lessons) == len(lesson_copies.lesson_files())
    for place, path in enumerate(lessons):
        cells = nbformat.read(path, as_version=4).cells
        for text in (cells[0].source.split("\n\n")[1], cells[-1].source):
            assert re.findall(r"\]\((.+?)\)", text) == [
                *(before.name for before in lessons[:place][-1:]),
                "index.ipynb",
                *(after.name for after in lessons[place + 1 : place + 2]),
            ]
    assert all(
        nbformat.validate(nbformat.read(path, as_version=4)) is None
        for path in tmp_path.glob("*.ipynb")
    )


def test_reset_keeps_each_old_copy_beside_the_new_one(shipped, tmp_path, capsys):
    work = tmp_path / "work"
    for text in ("first try", "second try"):
        cli.main(["lessons", "--to", str(work)])
        change(work / FIRST, text)
        assert cli.main(["lessons", "--to", str(work), "--reset", "00"]) == 0
    assert [code(work / f"00_start_here.before-{n}.ipynb")["source"] for n in (1, 2)] == [
        "first try",
        "second try",
    ]
    assert code(work / FIRST)["source"] == ["print(1)"]
    assert "A copy with your changes is kept in" in capsys.readouterr().out


def test_reset_of_a_lesson_that_was_not_changed_keeps_no_copy(shipped, tmp_path, capsys):
    work = tmp_path / "work"
    cli.main(["lessons", "--to", str(work)])
    capsys.readouterr()
    assert cli.main(["lessons", "--to", str(work), "--reset", "00"]) == 0
    assert capsys.readouterr().out == f"{work / FIRST} is restored.\n"
    assert not list(work.glob("*.before-*"))


def test_reset_keeps_what_is_no_copy_of_the_kit(shipped, tmp_path):
    for content in ("notes", "[]", '{"metadata": {"labkit": {"version": "x"}}}'):
        (tmp_path / FIRST).write_text(content)
        _, kept = lesson_copies.reset("00", tmp_path)
        assert kept.read_text() == content and code(tmp_path / FIRST)["source"] == ["print(1)"]


def test_a_full_disk_leaves_the_learners_copy(shipped, tmp_path, monkeypatch):
    lesson_copies.copy(tmp_path)
    change(tmp_path / FIRST, "mine")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("labkit.whole_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        lesson_copies.reset("00", tmp_path)
    assert code(tmp_path / FIRST)["source"] == "mine" and not list(tmp_path.glob("*.new"))


def test_links_to_the_glossary_lead_to_the_one_beside_the_copies(shipped, tmp_path):
    notebook = json.loads((shipped / FIRST).read_text())
    notebook["cells"][0]["source"] = [
        "# Zero\n",
        "[*group*](../docs/glossary.md#process-group), [all](../docs/glossary.md)\n",
        "two",
    ]
    (shipped / FIRST).write_text(json.dumps(notebook))
    work = tmp_path / "work"
    lesson_copies.copy(work)
    assert [link for link in links(work / FIRST) if "glossary" in link] == [
        "glossary.ipynb#Process-group",
        "glossary.ipynb",
    ]
    [cell] = nbformat.read(work / "glossary.ipynb", 4).cells
    assert (
        cell.source
        == f"# Glossary\n\nAll words.\n\n#### Process group\n\nseveral ranks (lesson [0]({FIRST}))"
    )
    assert dead_links(work) == []
    cell.source = "my words"
    nbformat.write(
        nbformat.from_dict({**nbformat.read(work / "glossary.ipynb", 4), "cells": [cell]}),
        work / "glossary.ipynb",
    )
    lesson_copies.copy(work)
    assert "my words" in (work / "glossary.ipynb").read_text()


def test_a_link_to_a_word_that_the_glossary_lacks_and_a_row_that_is_no_word_are_named(tmp_path):
    write_glossary(tmp_path, f"| {WORD} | several ranks | [0](../notebooks/{FIRST}) |")
    file = tmp_path / "docs" / "glossary.md"
    with pytest.raises(ValueError, match="'rank', which the glossary does not explain"):
        Glossary(file).relink("[r](../docs/glossary.md#rank)")
    write_glossary(tmp_path, "| rank | no anchor | [0](x) |")
    with pytest.raises(ValueError, match="expected a row with an anchor, .* got '. rank"):
        Glossary(file)


def test_every_link_of_every_copy_arrives(tmp_path):
    lesson_copies.copy(tmp_path)
    assert dead_links(tmp_path) == []
    found = {link for file in tmp_path.glob("*.ipynb") for link in links(file)}
    assert {"glossary.ipynb#rank", "glossary.ipynb#Checkpointing"} <= found and len(found) > 20


def test_every_link_of_every_lesson_arrives_in_the_repository():
    kit = lesson_copies.shipped().parent
    assert dead_links(kit, "notebooks/*.ipynb") + dead_links(kit, "docs/glossary.md") == []


@pytest.mark.parametrize(
    "text",
    [
        "[x](missing.ipynb)",
        '<a href="missing.ipynb">x</a>',
        "[x](glossary.ipynb#no-word)",
        "[x](../out.md)",
        "[x]: gone",
    ],
)
def test_a_dead_link_is_found(tmp_path, text):
    lesson_copies.copy(tmp_path / "work")
    (tmp_path / "out.md").write_text("outside")
    (tmp_path / "work" / "own.md").write_text(text)
    assert len(dead_links(tmp_path / "work", "*.md")) == 1


def test_a_lesson_that_there_is_not_is_refused_by_name(shipped, tmp_path, capsys):
    assert cli.main(["lessons", "--to", str(tmp_path), "--reset", "7"]) == 2
    assert "There is no lesson '7'. Choose one of these: 00, 01" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1", "01", "01_device_basics"])
def test_a_lesson_is_restored_by_its_number_or_name(number, tmp_path):
    assert lesson_copies.reset(number, tmp_path) == (tmp_path / "01_device_basics.ipynb", None)


def test_the_puzzles_are_restored_by_name_and_listed_by_it(tmp_path):
    assert lesson_copies.reset("puzzles", tmp_path) == (tmp_path / "puzzles.ipynb", None)
    with pytest.raises(ValueError, match=r"12, 13, puzzles\.$"):
        lesson_copies.reset("pu", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(shipped, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["lessons", "--to", str(tmp_path / "file" / "work")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_kit_ships_its_lessons():
    assert (lesson_copies.shipped() / FIRST).is_file()


def test_the_command_says_how_to_open_the_lessons_with_and_without_a_browser(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert cli.main(["lessons", "--to", str(tmp_path / "my work")]) == 0
    told = capsys.readouterr().out
    assert f"jupyter lab '{tmp_path}/my work/index.ipynb'\n" in told
    assert f"--no-browser --ServerApp.root_dir='{tmp_path}/my work'" in told
    assert "--LabApp.default_url=/lab/tree/index.ipynb" in told


def test_make_lab_opens_the_lessons_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MAKELEVEL", "1")
    assert cli.main(["lessons", "--to", str(tmp_path)]) == 0
    assert "jupyter lab" not in capsys.readouterr().out
