"""Submissions from every platform: who handed in what, and what is wrong with it.

No file leads out of the folder or fills the memory.
"""

import io
import json
import os
import stat
import zipfile
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from labcourse import collect, sources
from labcourse.reading import LARGEST

from .handed_in import notebook

ANSWER = notebook("def on_gpu(numbers): ...")
LAB = "00_start_here"


def put(folder, name, data=ANSWER):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def kinds(problems, student=None):
    return [
        problem.kind
        for problem in problems
        if problem.kind != "missing" and student in (None, problem.student)
    ]


def test_folders_of_students(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    put(tmp_path, "bob/notes/anything.ipynb")
    put(tmp_path, "cyd/report.pdf", b"%PDF")
    put(tmp_path, "dee/00_start_here.ipynb", b"x" * (LARGEST + 1))
    put(tmp_path, "eve/00_start_here.ipynb", b"{broken")
    submissions, problems = collect.collect(tmp_path, course, ["ada", "bob", "fay"])
    assert [(item.student, item.lab) for item in submissions] == [
        ("ada", LAB),
        ("bob", LAB),
        ("eve", LAB),
    ]
    assert kinds(problems, "bob") == ["renamed"] and kinds(problems, "cyd") == ["not a notebook"]
    assert "larger than 64 MiB" in next(
        problem.detail for problem in problems if problem.student == "dee"
    )
    assert ("fay", LAB) in {
        (problem.student, problem.lab) for problem in problems if problem.kind == "missing"
    }
    assert ("ada", LAB) not in {(problem.student, problem.lab) for problem in problems}


def test_two_submissions_of_one_student_count_for_nothing_until_a_person_decides(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    put(tmp_path, f"ada/again/{LAB}.ipynb", notebook("def on_gpu(numbers): pass"))
    put(tmp_path, f"bob/{LAB}.ipynb")
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.student for item in submissions] == ["bob"]
    assert kinds(problems) == ["duplicate"]


def test_one_name_in_two_unicode_forms_is_one_student(course, tmp_path):
    put(tmp_path, f"Zoe\u0308/{LAB}.ipynb")
    put(tmp_path, f"Zo\u00eb/{LAB}.ipynb")
    put(tmp_path, f"李雷/{LAB}.ipynb")
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.student for item in submissions] == ["李雷"]
    assert (kinds(problems), problems[0].student) == (["duplicate"], "Zo\u00eb")


@pytest.mark.parametrize(
    "name",
    [
        "Eve_22222_assignsubmission_file_x_11111_assignsubmission_file_00_start_here.ipynb",
        "Eve_22222_assignsubmission_file_x_22222_assignsubmission_file_00_start_here.ipynb",
        "Eve_22222_assignsubmission_file__11111_assignsubmission_onlinetext_/00_start_here.ipynb",
        "evelyn_22222_345_x_11111_assignsubmission_file_00_start_here.ipynb",
        "eve_22222_345_+00_start_here+2026-11-01 10:00:00 UTC+x/00_start_here.ipynb",
    ],
)
def test_a_name_that_can_be_read_in_two_ways_is_refused_by_name(name, course, tmp_path):
    victim = "Ada_11111_assignsubmission_file_00_start_here.ipynb"
    submissions, problems = collect.collect(
        zipped(tmp_path / "all.zip", (name, ANSWER), (victim, ANSWER)), course
    )
    assert [item.student for item in submissions] == ["11111"]
    assert (
        kinds(problems) == ["name"] and name in problems[0].detail and "22222" in problems[0].detail
    )


@pytest.mark.parametrize(
    "name",
    [
        "Eve_22222_assignsubmission_file_+00_start_here+2020-01-01 10:00:00 UTC+x.ipynb",
        "Eve_22222_assignsubmission_file_/Ada_11111_assignsubmission_file_00_start_here.ipynb",
        "Eve_22222_assignsubmission_file_/11111+00_start_here+2020-01-01 10:00:00 "
        "UTC+x/00_start_here.ipynb",
        "eve_22222_345_11111_678_LATE_00_start_here.ipynb",
    ],
)
def test_what_a_student_writes_into_a_name_says_nothing(name, course, tmp_path):
    submissions, _ = collect.collect(zipped(tmp_path / "all.zip", (name, ANSWER)), course)
    assert [(item.student, item.received, item.late) for item in submissions] == [
        ("22222", "", False)
    ]


def test_a_students_own_time_is_not_believed(course, tmp_path):
    put(tmp_path, f"in/ada/{LAB}/{LAB}.ipynb")
    put(tmp_path, f"in/ada/{LAB}/timestamp.txt", b"2020-01-01 10:00:00 UTC")
    submissions, problems = collect.collect(tmp_path / "in", course)
    assert (submissions[0].received, kinds(problems)) == ("", ["time not known"])
    (tmp_path / "gradebook.db").write_text("")  # now the folder is nbgrader's
    submissions, problems = collect.collect(tmp_path / "in", course)
    assert (submissions[0].received, kinds(problems)) == ("2020-01-01T10:00:00+00:00", [])


def test_with_nbgrader_the_latest_submission_counts(course, tmp_path):
    for time, answer in (("10:00:00.10", "1"), ("10:00:00.30", "3"), ("10:00:00.20", "2")):
        put(
            tmp_path,
            f"ada+{LAB}+2026-11-20 {time} UTC+x{answer}/{LAB}.ipynb",
            notebook(f"def on_gpu(numbers): return {answer}"),
        )
    submissions, problems = collect.collect(tmp_path, course)
    assert [b"return 3" in item.read() for item in submissions] == [True] and kinds(problems) == []
    assert submissions[0].received == "2026-11-20T10:00:00+00:00"
    # a time that cannot be compared
    put(tmp_path, f"ada+{LAB}+2026-11-21 10:00:00 CEST+x4/{LAB}.ipynb")
    submissions, problems = collect.collect(tmp_path, course)
    assert submissions == [] and kinds(problems) == ["duplicate"]


def test_one_student_with_too_many_files_is_one_students_problem(course, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST", 20)
    put(tmp_path, f"in/ada/{LAB}.ipynb")
    for number in range(21):
        put(tmp_path, f"in/eve/{number}.txt", b"")
        put(tmp_path, f"flat/Eve_22_assignsubmission_file_{number}.ipynb", b"")
    put(tmp_path, f"flat/Ada_11_assignsubmission_file_{LAB}.ipynb")
    members = [
        (str(path.relative_to(tmp_path / "in")), path.read_bytes())
        for path in (tmp_path / "in").rglob("*.*")
    ]
    archive = zipped(tmp_path / "in.zip", *members)
    for source, ada, eve in (
        (tmp_path / "in", "ada", "eve"),
        (archive, "ada", "eve"),
        (tmp_path / "flat", "11", "22"),
    ):
        submissions, problems = collect.collect(source, course)
        assert [item.student for item in submissions] == [ada]
        assert [problem.detail for problem in problems if problem.student == eve] == [
            "more than 20 files, and none is read. Leave only the notebooks"
        ]


def test_folders_without_end_are_one_students_problem(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    put(tmp_path, "eve/" + "a/" * 60 + f"{LAB}.ipynb")
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.student for item in submissions] == ["ada"]
    assert kinds(problems, "eve") == ["refused"] and "nested folders" in problems[0].detail


def test_an_export_of_gradescope_has_a_folder_for_each_submission(course, tmp_path):
    for number in (5, 6):
        put(tmp_path, f"in/assignment_1_export/submission_{number}/{LAB}.ipynb")
    put(tmp_path, "in/assignment_1_export/submission_metadata.yml", b"")
    members = [
        (str(path.relative_to(tmp_path / "in")), path.read_bytes())
        for path in (tmp_path / "in").rglob("*.*")
    ]
    for source in (tmp_path / "in", zipped(tmp_path / "in.zip", *members)):
        submissions, _ = collect.collect(source, course)
        assert [item.student for item in submissions] == ["submission_5", "submission_6"]


def test_a_member_without_a_name_stops_nobody(course, tmp_path):
    nameless = zipfile.ZipInfo("x")
    nameless.filename = ""
    path = zipped(tmp_path / "in.zip", (nameless, ANSWER), (f"ada/{LAB}.ipynb", ANSWER))
    submissions, _ = collect.collect(path, course)
    assert [item.student for item in submissions] == ["ada"]


def test_a_text_file_that_is_called_a_notebook_is_named(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb", b"Dear teacher")
    put(tmp_path, f"bob/{LAB}.ipynb", b"")
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.student for item in submissions] == ["ada", "bob"]  # the grader says so, too
    assert [problem.kind for problem in problems] == ["unreadable", "unreadable"]
    assert ["not JSON" in problem.detail for problem in problems] == [True, False]


def test_many_files_that_are_no_notebooks_are_one_remark(course, tmp_path):
    for number in range(9):
        put(tmp_path, f"ada/picture-{number}.png", b"")
    _, problems = collect.collect(tmp_path, course)
    assert (
        kinds(problems) == ["not a notebook"]
        and "ada/picture-0.png" in problems[0].detail
        and "6 more" in problems[0].detail
    )


@pytest.mark.parametrize("name", [f"{LAB} (1)", f"{LAB}-2", f"my_{LAB}"])
def test_the_number_of_a_copy_is_no_other_name(name, course, tmp_path):
    put(tmp_path, f"ada/{name}.ipynb")
    _, problems = collect.collect(tmp_path, course)
    assert kinds(problems) == []


def test_a_notebook_beside_that_of_the_lab_is_left_out(course, tmp_path):
    put(tmp_path, f"ada+{LAB}+2026-11-20 10:00:00 UTC+x/{LAB}.ipynb")
    put(
        tmp_path,
        f"ada+{LAB}+2026-11-20 10:00:00 UTC+x/scratch.ipynb",
        b'{"cells": [{"cell_type": "code", "source": "1"}]}',
    )
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.origin.rpartition("/")[2] for item in submissions] == [f"{LAB}.ipynb"]
    assert "left out" in kinds(problems) and "duplicate" not in kinds(problems)


def test_checkpoints_are_no_second_submission(course, tmp_path):
    checkpoint = f"ada/.ipynb_checkpoints/{LAB}-checkpoint.ipynb"
    put(tmp_path, f"in/{checkpoint}")
    put(tmp_path, f"in/ada/{LAB}.ipynb")
    archive = zipped(tmp_path / "in.zip", (checkpoint, ANSWER), (f"ada/{LAB}.ipynb", ANSWER))
    for source in (tmp_path / "in", archive):
        submissions, problems = collect.collect(source, course)
        assert [item.origin for item in submissions] == [f"ada/{LAB}.ipynb"] and problems == []


def test_a_lab_is_missing_once_it_is_due(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    due, now = datetime(2026, 12, 1, tzinfo=UTC), datetime(2026, 12, 2, tzinfo=UTC)
    first, second, third = course.labs
    labs = (first, replace(second, due=due), replace(third, due=due + timedelta(days=9)))
    timed = replace(course, labs=labs, extensions={("bob", second.name): now + timedelta(days=1)})
    _, problems = collect.collect(tmp_path, timed, ["ada", "bob", "cyd"], now)
    missing = [(problem.student, problem.lab) for problem in problems if problem.kind == "missing"]
    assert missing == [
        ("bob", first.name),
        ("cyd", first.name),
        ("ada", second.name),
        ("cyd", second.name),
    ]


def test_an_extension_for_nobody_in_the_list_is_named(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    extended = replace(course, extensions={("adda", LAB): datetime(2026, 12, 1, tzinfo=UTC)})
    _, problems = collect.collect(tmp_path, extended, ["ada"])
    assert [(problem.student, problem.kind) for problem in problems] == [("adda", "unlisted")]


def test_a_submission_that_is_not_found_again_is_removed(course, tmp_path):
    put(tmp_path, f"from/ada/{LAB}.ipynb")
    collect.write(*collect.collect(tmp_path / "from", course), tmp_path / "to")
    put(tmp_path, f"from/ada/again/{LAB}.ipynb")
    collect.write(*collect.collect(tmp_path / "from", course), tmp_path / "to")
    submissions, problems = collect.collect(tmp_path / "to", course)
    assert submissions == [] and kinds(problems) == ["duplicate"]


def test_links_are_not_followed(course, tmp_path):
    secret = put(tmp_path / "outside", "solutions.ipynb")
    inside = tmp_path / "inside"
    (inside / "ada").mkdir(parents=True)
    (inside / "ada" / f"{LAB}.ipynb").symlink_to(secret)
    (inside / "bob").symlink_to(secret.parent)
    os.mkfifo(inside / "ada" / "pipe.ipynb")
    submissions, problems = collect.collect(inside, course)
    assert submissions == []
    assert sorted(kinds(problems)) == ["not a notebook", "refused", "refused"]
    assert "a symbolic link" in str(problems)


def test_names_that_are_no_ids_are_refused(course, tmp_path):
    put(tmp_path, f"=HYPERLINK(1)/{LAB}.ipynb")
    put(tmp_path, f"a\nb/{LAB}.ipynb")
    os.makedirs(os.fsencode(tmp_path) + b"/\xff\xfe")
    (tmp_path / os.fsdecode(b"\xff\xfe") / f"{LAB}.ipynb").write_bytes(ANSWER)
    submissions, problems = collect.collect(tmp_path, course)
    assert [item.student for item in submissions if item.student.isprintable()] == [
        item.student for item in submissions
    ]
    assert kinds(problems).count("name") == 2
    collect.write(submissions, problems, tmp_path / "to")


def zipped(path, *members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def test_the_zip_file_of_a_platform(course, tmp_path):
    path = zipped(
        tmp_path / "all.zip",
        (f"lovelaceada_12345_678901_{LAB}.ipynb", ANSWER),
        (f"hopper_LATE_23456_678902_{LAB}-1.ipynb", ANSWER),
        (f"Alan Turing_34567_assignsubmission_file_/{LAB}.ipynb", ANSWER),
        # downloaded without folders
        (
            f"Flat Person_45678_assignsubmission_file_{LAB}.ipynb",
            ANSWER,
        ),
        ("__MACOSX/._x.ipynb", b""),
    )
    submissions, problems = collect.collect(path, course)
    assert [item.student for item in submissions] == ["12345", "23456", "34567", "45678"]
    # a zip's time is the download's
    assert all(item.lab == LAB and item.file_time and not item.received for item in submissions)
    assert [item.late for item in submissions] == [False, True, False, False]
    assert set(kinds(problems)) <= {"renamed"}


def test_who_is_not_in_the_list_is_named_and_collected_all_the_same(course, tmp_path):
    path = zipped(tmp_path / "all.zip", (f"lovelaceada_12345_678901_{LAB}.ipynb", ANSWER))
    submissions, problems = collect.collect(path, course, ["12345", "23456"])
    assert [item.student for item in submissions] == ["12345"] and "unlisted" not in kinds(problems)
    submissions, problems = collect.collect(path, course, ["ada"])
    assert [item.student for item in submissions] == ["12345"]
    assert kinds(problems) == ["unlisted"] and {
        problem.student for problem in problems if problem.kind == "missing"
    } == {"ada"}


def test_hostile_members_of_a_zip_file(course, tmp_path):
    link = zipfile.ZipInfo(f"eve/{LAB}.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    members = [
        (f"../../ada/{LAB}.ipynb", ANSWER),
        (f"/etc/bob/{LAB}.ipynb", ANSWER),
        (f"C:\\cyd\\{LAB}.ipynb", ANSWER),
        (f"dee/{LAB}.ipynb", b" " * (LARGEST - 1)),  # 64 MiB out of 64 KiB
        (link, "/etc/passwd"),
    ]
    submissions, problems = collect.collect(zipped(tmp_path / "bad.zip", *members), course)
    assert submissions == []
    assert sorted(kinds(problems)) == ["name"] + 4 * ["refused"]
    collect.write(submissions, problems, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.zip", "collected.json", "to"]


def test_a_zip_file_that_lies_about_sizes(course, tmp_path):
    """The file claims 100 bytes and has a gigabyte. Only the allowed size is unpacked."""
    packer = zlib.compressobj(wbits=-15)
    data = b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(64)), packer.flush()])
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr(f"ada/{LAB}.ipynb", data)
    content = bytearray(plain.getvalue())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = content.index(mark)
        content[at + offset : at + offset + 2] = (8).to_bytes(2, "little")  # deflated
        size = at + (22 if mark == b"PK\x03\x04" else 24)
        content[size : size + 4] = (100).to_bytes(4, "little")
    path = tmp_path / "lying.zip"
    path.write_bytes(content)
    submissions, problems = collect.collect(path, course)
    assert submissions == [] and kinds(problems) == ["refused"]


def test_what_is_no_folder_and_no_zip_file_is_refused(course, tmp_path):
    with pytest.raises(ValueError, match="expected a folder or a zip file"):
        collect.collect(put(tmp_path, "x.zip", b"PK, but not"), course)


def test_the_exchange_of_nbgrader_with_its_times(course, tmp_path):
    put(tmp_path, f"ada+{LAB}+2026-11-20 10:00:00 UTC+x1/{LAB}.ipynb")
    put(tmp_path, f"bob/{LAB}/{LAB}.ipynb")
    put(tmp_path, f"bob/{LAB}/timestamp.txt", b"2026-11-21 11:00:00.5 UTC")
    put(tmp_path, f"bob/{LAB}/submission_secret.txt", b"123")
    submissions, problems = collect.collect(tmp_path, course)
    assert [(item.student, item.received) for item in submissions] == [
        ("ada", "2026-11-20T10:00:00+00:00"),
        ("bob", "2026-11-21T11:00:00+00:00"),
    ]
    assert kinds(problems) == []


def test_what_was_collected_is_read_back_alike(course, tmp_path):
    put(tmp_path, f"from/ada+{LAB}+2026-11-20 10:00:00 UTC+x1/other.ipynb")
    put(tmp_path, f"from/bob/{LAB}.ipynb")
    put(tmp_path, f"from/bob/second/{LAB}.ipynb")
    submissions, problems = collect.collect(tmp_path / "from", course)
    collect.write(submissions, problems, tmp_path / "to")
    again, known = collect.collect(tmp_path / "to", course)
    for item, same in zip(submissions, again, strict=True):
        assert (same.student, same.lab, same.read()) == (item.student, item.lab, item.read())
        assert (same.received, same.known_from, same.file_time) == (
            item.received,
            item.known_from,
            item.file_time,
        )
    assert kinds(known) == ["duplicate"]  # what was renamed has its name now
    assert (
        json.loads((tmp_path / "to" / "collected.json").read_text())["submissions"][0]["sha256"]
        == submissions[0].digest
    )
