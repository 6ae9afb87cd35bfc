"""What is handed in, however it comes: who handed in what, and what is wrong with it. Nothing leads out or fills the memory."""

import io
import json
import os
import stat
import zipfile
import zlib

import pytest
from handed_in import notebook

from labcourse import collect
from labcourse.reading import LARGEST

ANSWER = notebook("def on_gpu(numbers): ...")
LAB = "00_start_here"


def put(folder, name, data=ANSWER):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def kinds(problems, student=None):
    return [problem.kind for problem in problems if problem.kind != "missing" and student in (None, problem.student)]


def test_folders_of_students(course, tmp_path):
    put(tmp_path, f"ada/{LAB}.ipynb")
    put(tmp_path, "bob/notes/anything.ipynb")
    put(tmp_path, "cyd/report.pdf", b"%PDF")
    put(tmp_path, "dee/00_start_here.ipynb", b"x" * (LARGEST + 1))
    put(tmp_path, "eve/00_start_here.ipynb", b"{broken")
    submissions, problems = collect.collect(tmp_path, course, ["ada", "bob", "fay"])
    assert [(item.student, item.lab) for item in submissions] == [("ada", LAB), ("bob", LAB), ("eve", LAB)]
    assert kinds(problems, "bob") == ["renamed"] and kinds(problems, "cyd") == ["not a notebook"]
    assert "larger than 20 MiB" in next(problem.detail for problem in problems if problem.student == "dee")
    assert ("fay", LAB) in {(problem.student, problem.lab) for problem in problems if problem.kind == "missing"}
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
    assert [item.student for item in submissions if item.student.isprintable()] == [item.student for item in submissions]
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
        (f"Flat Person_45678_assignsubmission_file_{LAB}.ipynb", ANSWER),  # downloaded without folders
        ("__MACOSX/._x.ipynb", b""),
    )
    submissions, problems = collect.collect(path, course)
    assert [item.student for item in submissions] == ["12345", "23456", "34567", "45678"]
    assert all(item.lab == LAB and item.file_time and not item.received for item in submissions)  # a zip's time is the download's
    assert [item.late for item in submissions] == [False, True, False, False]
    assert set(kinds(problems)) <= {"renamed"}


def test_who_is_not_in_the_list_is_named_and_collected_all_the_same(course, tmp_path):
    path = zipped(tmp_path / "all.zip", (f"lovelaceada_12345_678901_{LAB}.ipynb", ANSWER))
    submissions, problems = collect.collect(path, course, ["12345", "23456"])
    assert [item.student for item in submissions] == ["12345"] and "unlisted" not in kinds(problems)
    submissions, problems = collect.collect(path, course, ["ada"])
    assert [item.student for item in submissions] == ["12345"]
    assert kinds(problems) == ["unlisted"] and {problem.student for problem in problems if problem.kind == "missing"} == {"ada"}


def test_hostile_members_of_a_zip_file(course, tmp_path):
    link = zipfile.ZipInfo(f"eve/{LAB}.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    members = [
        (f"../../ada/{LAB}.ipynb", ANSWER),
        (f"/etc/bob/{LAB}.ipynb", ANSWER),
        (f"C:\\cyd\\{LAB}.ipynb", ANSWER),
        (f"dee/{LAB}.ipynb", b" " * (LARGEST - 1)),  # 20 MiB out of 20 KiB
        (link, "/etc/passwd"),
    ]
    submissions, problems = collect.collect(zipped(tmp_path / "bad.zip", *members), course)
    assert submissions == []
    assert sorted(kinds(problems)) == ["name"] + 4 * ["refused"]
    collect.write(submissions, problems, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.zip", "collected.json", "to"]


def test_a_zip_file_that_lies_about_sizes(course, tmp_path):
    """Its directory says 100 bytes, its data are a gigabyte: no more than is allowed is unpacked."""
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
    with pytest.raises(ValueError, match="no folder and no zip file"):
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
        assert (same.received, same.known_from, same.file_time) == (item.received, item.known_from, item.file_time)
    assert kinds(known) == ["duplicate"]  # what was renamed has its name now
    assert json.loads((tmp_path / "to" / "collected.json").read_text())["submissions"][0]["sha256"] == submissions[0].digest
