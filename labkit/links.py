"""Where the repository lives, said once in pyproject.toml, and stamped from there: badges and the lessons' set-up elsewhere.

Two cells are stamped into each notebook, and a column into README's table of lessons. All carry a mark of their own, so that stamping
again changes nothing, another address replaces them, and no address takes them away.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

BRANCH = "main"  # what the links open
TAG = "elsewhere"  # of the stamped cells
COLUMN = "Open in"  # of README's table
MARK = "<!-- lessons -->"  # before that table
ALLOWED = "https://github.com/OWNER/NAME"  # the only host whose notebooks Colab and Kaggle open by a link
NO_ADDRESS = (
    "pyproject.toml names no repository, so there are no links. Once it has an address, write below [project.urls]\n"
    f'    Repository = "{ALLOWED}"\n'
    "and run `python -m labkit links` again."
)

# Colab and Kaggle start each notebook on a machine without the kit. Their own PyTorch, widgets and figures stay as they are.
SET_UP = """\
# On Colab and Kaggle this installs labkit. Elsewhere it does nothing.
import os
import sys

if "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    %pip install -q git+{address}"""


def main(root: Path, check: bool, hub: str | None) -> int:
    """Stamp the links below `root`, or say which are stale, or print those of a JupyterHub; the exit status.

    Raises ValueError when there is nothing to stamp, or the address cannot be used.
    """
    if not (root / "pyproject.toml").is_file() or not lessons(root):
        raise ValueError("run this in the kit's own folder, with pyproject.toml and notebooks/")
    home = repository(root)
    if home is None:
        print(NO_ADDRESS)
    if hub is not None:
        address = hub_address(hub)
        if home is None:
            return 1
        for path in lessons(root):
            print(home.on_hub(address, path))
        return 0
    changed = stale(root, home)
    for file, text in changed.items():
        print(f"{'stale' if check else 'wrote'}: {file.relative_to(root).as_posix()}")
        if not check:
            file.write_text(text, encoding="utf-8")
    if not changed:
        print(f"README.md and the notebooks have {f'their links to {home.address}' if home else 'no links, as they should'}.")
    return int(check and bool(changed))


@dataclass(frozen=True)
class Repository:
    """A public repository on GitHub."""

    owner: str
    name: str

    @property
    def address(self) -> str:
        return f"https://github.com/{self.owner}/{self.name}"

    def badges(self, path: str) -> str:
        """Markdown that opens the notebook at `path` of the repository, such as notebooks/02_streams.ipynb, on three platforms."""
        file = f"github/{self.owner}/{self.name}/blob/{BRANCH}/{path}"
        source = f"{self.address}/blob/{BRANCH}/{path}"
        lab = f"{self.owner}/{self.name}/{BRANCH}?urlpath={quote(f'lab/tree/{path}', safe='')}"
        badges = (
            ("Colab", "https://colab.research.google.com/assets/colab-badge.svg", f"https://colab.research.google.com/{file}"),
            ("Kaggle", "https://kaggle.com/static/images/open-in-kaggle.svg", f"https://kaggle.com/kernels/welcome?src={source}"),
            ("Binder", "https://mybinder.org/badge_logo.svg", f"https://mybinder.org/v2/gh/{lab}"),
        )
        return " ".join(f"[![Open in {name}]({picture})]({link})" for name, picture, link in badges)

    def on_hub(self, hub: str, path: str) -> str:
        """A link that copies the repository into a student's folder on a JupyterHub with nbgitpuller, and opens the notebook at `path`.

        nbgitpuller would take the branch "master" where none is named.
        """
        query = {"repo": self.address, "branch": BRANCH, "urlpath": f"lab/tree/{self.name}/{path}?autodecode"}
        return f"{hub}/hub/user-redirect/git-pull?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())


def repository(root: Path) -> Repository | None:
    """What pyproject.toml in `root` names as its repository, or None. Raises ValueError for an address that links cannot be made of."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return None
    found = re.fullmatch(r"https://github\.com/([A-Za-z\d]+(?:-[A-Za-z\d]+)*)/([\w.-]+)", str(address), re.ASCII)
    if found is None or found[2].endswith(".git") or set(found[2]) == {"."}:
        raise ValueError(
            f"pyproject.toml names the repository {address!r}. Colab and Kaggle open notebooks by a link from github.com alone: "
            f"write {ALLOWED}, without .git or anything after the name. A repository elsewhere has no Repository there, and no links."
        )
    return Repository(*found.groups())


def hub_address(text: str) -> str:
    """A JupyterHub's address without a slash at its end. Raises ValueError for what is none."""
    parts = urlsplit(text)
    if (
        parts.scheme not in ("https", "http")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or not text.isprintable()
        or " " in text
    ):
        raise ValueError(f"--hub {text!r}: give the hub's address, such as https://hub.university.edu")
    return text.rstrip("/")


def lessons(root: Path) -> list[str]:
    """The paths of the notebooks within the repository."""
    return [path.relative_to(root).as_posix() for path in sorted((root / "notebooks").glob("*.ipynb"))]


def stamped(root: Path, home: Repository | None) -> dict[Path, str]:
    """What README.md and each notebook should hold, by their files in `root`. Without a `home` there are no links."""
    readme = root / "README.md"
    texts = {readme: stamped_table(readme.read_text(encoding="utf-8"), home)}
    for path in lessons(root):
        notebook = nbformat.read(root / path, as_version=4)
        texts[root / path] = nbformat.writes(stamped_notebook(notebook, path, home)) + "\n"
    return texts


def stale(root: Path, home: Repository | None) -> dict[Path, str]:
    """Those of `stamped` that their files do not hold yet."""
    return {file: text for file, text in stamped(root, home).items() if file.read_text(encoding="utf-8") != text}


def stamped_table(text: str, home: Repository | None) -> str:
    """README with a last column of badges in its table of lessons, or without one."""
    before, mark, after = text.partition(f"{MARK}\n")
    table = re.match(r"\s*((?:\|.*\n)*)", after) if mark else None
    if table is None or not table[1]:
        if home is None:
            return text
        raise ValueError(f"README.md has no table after the line {MARK}, where the links to the lessons go")
    rows = table[1].splitlines()
    if rows[0].endswith(f"| {COLUMN} |"):
        rows = [row[: row.rstrip("|").rindex("|") + 1] for row in rows]
    if home is not None:
        rows = [f"{row} {cell} |" for row, cell in zip(rows, [COLUMN, "---", *map(_badges_of(home), rows[2:])], strict=True)]
    return "".join((before, mark, after[: table.start(1)], *(f"{row}\n" for row in rows), after[table.end() :]))


def _badges_of(home: Repository) -> Callable[[str], str]:
    def badges(row: str) -> str:
        found = re.search(r"\((notebooks/[\w.-]+\.ipynb)\)", row)
        return home.badges(found[1]) if found else ""

    return badges


def stamped_notebook(notebook: NotebookNode, path: str, home: Repository | None) -> NotebookNode:
    """The notebook with badges below its title and a cell that installs the kit above its first code cell; or without both.

    A notebook that was run stays one that was run from top to bottom: the new first cell prints nothing, and the others' numbers follow.
    """
    _take_away(notebook)
    if home is None:
        return notebook
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    was_run = any(notebook.cells[index].execution_count for index in code)
    if was_run:
        _renumber(notebook, +1)
    install = new_code_cell(SET_UP.format(address=home.address), id="elsewhere-install", execution_count=1 if was_run else None)
    badges = new_markdown_cell(home.badges(path), id="elsewhere-badges")
    for index, cell in ((code[0], install), (1, badges)):
        cell.metadata = nbformat.from_dict({"tags": [TAG]})
        notebook.cells.insert(index, cell)
    return notebook


def _take_away(notebook: NotebookNode) -> None:
    ours = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    notebook.cells = [cell for cell in notebook.cells if TAG not in cell.metadata.get("tags", [])]
    if any(cell.get("execution_count") for cell in ours):
        _renumber(notebook, -1)


def _renumber(notebook: NotebookNode, by: int) -> None:
    """Count executions from another number on: of cells, of their results, and in tracebacks."""

    def moved(found: re.Match[str]) -> str:
        return f"In[{int(found[1]) + by}]"

    for cell in notebook.cells:
        for holder in (cell, *cell.get("outputs", [])):
            if holder.get("execution_count"):
                holder.execution_count += by
            if "traceback" in holder:
                holder.traceback = [re.sub(r"In\[(\d+)\]", moved, line) for line in holder.traceback]
