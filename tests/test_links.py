"""Links to the lessons elsewhere: none without an address; with one, the same bytes each time, and nothing is left when it goes."""

import copy
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from labkit import cli, links
from labkit.course import assignment, release

ROOT = Path(__file__).parents[1]
SOME = ("00_start_here.ipynb", "03_data_parallel.ipynb", "06_memory_leaks.ipynb")
HOME = links.Repository("some-one", "gpu.kit")
TABLE = """# A kit

| other | table |
|---|---|
| [a](notebooks/00_start_here.ipynb) | b |

<!-- lessons -->

| lesson | what it is about |
|---|---|
| [00](notebooks/00_start_here.ipynb) | the start |
| [03](notebooks/03_data_parallel.ipynb) | a pipe: \\| |

The rest.
"""


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """What the command reads and writes, in a copy, with some of the lessons and a short README; the command runs there."""
    (tmp_path / "notebooks").mkdir()
    for name in SOME:
        shutil.copy(ROOT / "notebooks" / name, tmp_path / "notebooks")
    text = re.sub(r"(?m)^\[project\.urls\]\nRepository = .*\n", "", (ROOT / "pyproject.toml").read_text())
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "README.md").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    for path, text in links.stale(tmp_path, None).items():
        path.write_text(text)
    return tmp_path


def set_address(tree: Path, address: str) -> None:
    path = tree / "pyproject.toml"
    text = re.sub(r"(?m)^\[project\.urls\]\nRepository = .*\n", "", path.read_text())
    path.write_text(f'{text}\n[project.urls]\nRepository = "{address}"\n')


def contents(tree: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tree / "README.md", *sorted((tree / "notebooks").iterdir()))}


def installing_cell(address: str = HOME.address) -> str:
    return links.SET_UP.format(address=address)


def test_no_file_of_this_repository_is_stale():
    changed = links.stale(ROOT, links.repository(ROOT))
    assert not changed, f"run `python -m labkit links`: {[path.name for path in changed]}"


def test_the_table_of_lessons_has_room_for_the_links_of_each():
    stamped = links.stamped_table((ROOT / "README.md").read_text(encoding="utf-8"), HOME)
    assert stamped.count("colab-badge.svg") == len(links.lessons(ROOT))


def test_without_an_address_there_are_no_links_and_the_command_says_what_to_do(tree, capsys):
    before = contents(tree)
    assert cli.main(["links", "--check"]) == cli.main(["links"]) == 0
    said = capsys.readouterr().out
    assert 'Repository = "https://github.com/OWNER/NAME"' in said and "no links" in said
    assert contents(tree) == before
    assert not any(b"github.com/" in text and b"git+" in text for text in before.values())


def test_links_are_stamped_once_found_stale_replaced_and_taken_away(tree, capsys):
    before = contents(tree)
    set_address(tree, HOME.address)
    assert cli.main(["links", "--check"]) == 1
    assert "stale: notebooks/00_start_here.ipynb" in capsys.readouterr().out
    assert contents(tree) == before
    assert cli.main(["links"]) == 0
    stamped = contents(tree)
    assert all(stamped[name] != before[name] for name in before)
    assert cli.main(["links"]) == cli.main(["links", "--check"]) == 0
    assert contents(tree) == stamped

    set_address(tree, "https://github.com/another/one")
    assert cli.main(["links", "--check"]) == 1
    assert cli.main(["links"]) == 0
    assert not any(HOME.address.encode() in text for text in contents(tree).values())
    set_address(tree, HOME.address)
    assert cli.main(["links"]) == 0
    assert contents(tree) == stamped

    readme = tree / "README.md"
    readme.write_text(readme.read_text().replace("colab-badge", "other-badge"))
    assert cli.main(["links", "--check"]) == 1
    text = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(text[: text.index("[project.urls]")])
    assert cli.main(["links", "--check"]) == 1
    assert cli.main(["links"]) == 0
    assert contents(tree) == before


def test_each_link_leads_to_a_file_of_the_repository_and_names_what_it_opens(tree):
    for name in links.lessons(tree):
        badges = re.findall(r"\[!\[(.*?)\]\((.*?)\)\]\((.*?)\)", HOME.badges(name))
        assert [text for text, _, _ in badges] == ["Open in Colab", "Open in Kaggle", "Open in Binder"]
        colab, kaggle, binder = (link for _, _, link in badges)
        assert colab == f"https://colab.research.google.com/github/some-one/gpu.kit/blob/main/{name}"
        assert kaggle == f"https://kaggle.com/kernels/welcome?src=https://github.com/some-one/gpu.kit/blob/main/{name}"
        assert binder.startswith("https://mybinder.org/v2/gh/some-one/gpu.kit/main?")
        assert parse_qs(urlsplit(binder).query) == {"urlpath": [f"lab/tree/{name}"]}
        assert (tree / name).is_file()


def test_the_table_of_lessons_gets_a_column_and_no_other_table_does():
    lines = links.stamped_table(TABLE, HOME).splitlines()
    assert lines[2:5] == TABLE.splitlines()[2:5]
    assert lines[8] == "| lesson | what it is about | Open in |"
    assert lines[9] == "|---|---| --- |"
    assert lines[11] == f"| [03](notebooks/03_data_parallel.ipynb) | a pipe: \\| | {HOME.badges('notebooks/03_data_parallel.ipynb')} |"
    with pytest.raises(ValueError, match="README.md has no table after the line <!-- lessons -->"):
        links.stamped_table("# A kit\n", HOME)


def test_a_stamped_notebook_is_valid_and_was_run_from_top_to_bottom(tree):
    path = "notebooks/06_memory_leaks.ipynb"  # with a stored traceback
    plain = nbformat.read(tree / path, as_version=4)
    notebook = links.stamped_notebook(copy.deepcopy(plain), path, HOME)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0] == plain.cells[0]
    assert notebook.cells[1].source == HOME.badges(path)
    assert code[0].source == installing_cell() and code[0].outputs == []
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.get("execution_count", cell.execution_count) == cell.execution_count
            if output.output_type == "error":
                assert f"In[{cell.execution_count}]" in "".join(output.traceback)
    assert links.stamped_notebook(notebook, path, None) == plain


def test_a_notebook_without_outputs_stays_without():
    plain = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 1"), nbformat.v4.new_code_cell("1")])
    notebook = links.stamped_notebook(copy.deepcopy(plain), "notebooks/1.ipynb", HOME)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [None, None]
    assert links.stamped_notebook(notebook, "notebooks/1.ipynb", None) == plain


@pytest.mark.parametrize(
    "address",
    [
        "https://gitlab.com/some/kit",
        "https://github.university.edu/some/kit",
        "http://github.com/some/kit",
        "git@github.com:some/kit.git",
        "https://github.com/some/kit.git",
        "https://github.com/some/kit/",
        "https://github.com/some",
        "https://github.com/some/kit/tree/main",
        "https://github.com/so me/kit",
        "https://github.com/-some/kit",
        "https://github.com/some/..",
        "https://github.com/some/kit; rm",
        "",
    ],
)
def test_an_address_that_links_cannot_be_made_of_is_refused_and_changes_nothing(tree, capsys, address):
    before = contents(tree)
    set_address(tree, address)
    assert cli.main(["links"]) == 2
    said = capsys.readouterr().err
    assert repr(address) in said and "write https://github.com/OWNER/NAME" in said
    assert contents(tree) == before


def test_outside_the_kits_folder_the_command_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["links"]) == 2
    assert "run this in the kit's own folder" in capsys.readouterr().err


def test_links_for_a_hub_with_nbgitpuller(tree, capsys):
    before = contents(tree)
    assert cli.main(["links", "--hub", "https://hub.university.edu"]) == 1
    set_address(tree, HOME.address)
    capsys.readouterr()
    assert cli.main(["links", "--hub", "https://hub.university.edu/"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(links.lessons(tree))
    parts = urlsplit(printed[1])
    assert (parts.netloc, parts.path) == ("hub.university.edu", "/hub/user-redirect/git-pull")
    assert parse_qs(parts.query) == {
        "repo": [HOME.address],
        "branch": ["main"],
        "urlpath": ["lab/tree/gpu.kit/notebooks/03_data_parallel.ipynb?autodecode"],
    }
    assert contents(tree) == before
    for wrong in ("hub.university.edu", "https://", "https://hub.edu/?next=x", "https://hub.edu/a b"):
        assert cli.main(["links", "--hub", wrong]) == 2
        assert "give the hub's address" in capsys.readouterr().err


class Shell:
    """Remembers the magics that are asked for."""

    def __init__(self):
        self.asked = []

    def run_line_magic(self, *magic):
        self.asked.append(magic)


@pytest.mark.parametrize("platform", ["elsewhere", "Colab", "Kaggle"])
def test_the_stamped_cell_installs_on_colab_and_kaggle_and_does_nothing_elsewhere(platform, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    if platform == "Colab":
        monkeypatch.setitem(sys.modules, "google.colab", object())
    if platform == "Kaggle":
        monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    shell = Shell()
    exec(TransformerManager().transform_cell(installing_cell()), {"get_ipython": lambda: shell})
    assert capsys.readouterr() == ("", "")
    assert shell.asked == ([] if platform == "elsewhere" else [("pip", "install -q git+https://github.com/some-one/gpu.kit")])


@pytest.mark.parametrize("what", ["lesson", "exercises"])
def test_a_lab_installs_the_kit_too_and_does_not_open_the_lesson_with_its_solutions(tree, what):
    set_address(tree, HOME.address)
    assert cli.main(["links"]) == 0
    (tree / "course.toml").write_text(f'notebooks = "notebooks"\ncontents = "{what}"\n[labs."03"]\n')
    course = assignment.read(tree / "course.toml")
    cells = release.student_copy(course, course.labs[0]).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert code[0] == installing_cell() and code.count(installing_cell()) == 1
    assert "mybinder.org" not in str(cells)
