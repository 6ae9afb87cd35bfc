"""Sphinx configuration of the site.

The site has the lessons with their stored outputs, the guides, and the reference, which is made
from docstrings and from the commands' parsers. The sources are the repository itself, so a link
that works on GitHub also works on the site.
"""

import datetime
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

import labkit
from gputrace import report

ROOT = Path(__file__).parents[1]
LIVE = "docs/a-step-on-four-gpus"  # a page, and the script whose recording it shows
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))

project = "PyTorch on GPUs"
author = "the GPU teaching kit authors"
copyright = author
html_title = "PyTorch on GPUs: a teaching kit"
html_theme = "furo"
html_static_path = ["static"]
html_js_files = ["reachable.js"]
html_css_files = ["live.css", "dark.css"]
html_search_scorer = str(ROOT / "docs" / "scorer.js")
language = "en"

sys.path.append(str(ROOT / "docs"))
extensions = [
    "command_reference",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**",
    "notebooks/*.ipynb",
    "packages/*/README.md",
]
nb_execution_mode = "off"  # the stored outputs are shown, which the tests compare
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
always_document_param_types = True

# Where a lesson opens with nothing to install. docs/platforms.md has the same addresses.
GITHUB = "OWNER/NAME/blob/main/notebooks/LESSON"
PLACES = {
    "on Binder": "https://mybinder.org/v2/gh/OWNER/NAME/main?urlpath=lab/tree/work/LESSON",
    "in Colab": f"https://colab.research.google.com/github/{GITHUB}",
    "on Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{GITHUB}",
}
# Words that a reader may search for, beside those of the glossary, and the pages that explain them.
SEARCHED = {
    "out of memory": "notebooks/05_caching_allocator",
    "OutOfMemoryError": "notebooks/05_caching_allocator",
    "licence": "docs/license",
}
_TITLE = "What ran when on four GPUs, and the blocks of their memory"
_MAY = "allow-scripts allow-downloads allow-popups"
_PAGES = {"explorer": "In a window of its own", "trace": "The whole page that the command writes"}
CONTENTS = {
    "Lessons": [f"notebooks/{name}" for name in LESSONS],
    "Guides": [
        "docs/platforms",
        "docs/teaching",
        "docs/your-own-course",
        "docs/your-own-script",
        "docs/will-it-fit",
        "docs/virtualgpu-for-your-tests",
        LIVE,
        "docs/glossary",
        "docs/how-the-virtual-gpu-works",
        "docs/accuracy",
        "Virtual GPUs: virtualgpu <packages/virtualgpu/README>",
        "Recording: gputrace <packages/gputrace/README>",
        "Courses: labcourse <packages/labcourse/README>",
        "docs/other-material",
    ],
    "Reference": [
        f"docs/reference/{name}"
        for name in (
            "index",
            "command-line",
            "labkit",
            "labkit-for-authors",
            "gputrace",
            "virtualgpu",
            "labcourse",
        )
    ],
    "Measured on H200s": [
        "docs/measured/report_h200_x1",
        "docs/measured/x2/report_h200_x2",
        "docs/measured/report_h200_x4",
    ],
    "Design": [
        f"docs/design/{name}"
        for name in ("index", "races", "threads", "ranks", "sandbox", "time", "allocation")
    ],
    "The project": [
        "CONTRIBUTING",
        "CHANGELOG",
        "docs/license",
        "A draft of a paper <docs/paper>",
    ],
}


def setup(app: Any) -> None:
    """Register the functions that change pages while Sphinx reads them."""
    # GitHub draws mermaid diagrams. A library that draws them here would be loaded from elsewhere.
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _add_contents)
    app.connect("source-read", _know_anchors)
    app.connect("source-read", _add_words)
    app.connect("source-read", _know_address)
    app.connect("source-read", _add_recording)
    app.connect("builder-inited", _record)
    app.connect("build-finished", _open_at_the_start)


def _add_contents(app: Any, docname: str, source: list[str]) -> None:
    """Add the pages in reading order, which GitHub would show as code."""
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def _know_anchors(app: Any, docname: str, source: list[str]) -> None:
    """Make targets of links from HTML anchors, which Sphinx does not see."""
    source[0] = re.sub(r'<a id="([\w-]+)"></a>', r"[]{#\1}", source[0])


def _add_words(app: Any, docname: str, source: list[str]) -> None:
    """Add a page's words to the index, where the search finds a whole phrase first."""
    words = words_of(docname)
    if not words:
        return
    entries = "\n\n".join(f"```{{index}} ! single: {word}\n```" for word in words)
    if docname in CONTENTS["Lessons"]:
        content = json.loads(source[0])
        first = content["cells"][0]
        first["source"] = "".join(first["source"]) + f"\n\n{entries}\n"
        source[0] = json.dumps(content)
    else:
        source[0] += f"\n{entries}\n"


def words_of(docname: str) -> list[str]:
    """Return the words that a page explains: those of `SEARCHED` and of the glossary."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| <a id=".+?"></a>(.+?) \| .*\(\.\./(.+?)\.ipynb\) \|$', glossary, re.M)
    return [word for word, page in [*SEARCHED.items(), *rows] if page == docname]


def repository() -> str | None:
    """Return OWNER/NAME of the repository on GitHub, or None if it is not known.

    GitHub's workflows name the repository from which they build. Elsewhere it is `Repository` under
    `[project.urls]` in pyproject.toml.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "")
    known = address.removeprefix("https://github.com/").strip("/")
    return os.environ.get("GITHUB_REPOSITORY") or known or None


def _know_address(app: Any, docname: str, source: list[str]) -> None:
    """Link each lesson to the places where it opens, if the repository's address is known."""
    address = repository()
    if address is None:
        return
    if docname in CONTENTS["Lessons"]:
        source[0] = with_links(source[0], f"{Path(docname).name}.ipynb")
    source[0] = source[0].replace("OWNER/NAME", address)


def with_links(notebook: str, lesson: str) -> str:
    """Return the notebook with links to its places below its title."""
    content = json.loads(notebook)
    title, _, rest = "".join(content["cells"][0]["source"]).partition("\n")
    links = [f"[{place}]({link.replace('LESSON', lesson)})" for place, link in PLACES.items()]
    line = f"Open this lesson {' · '.join(links)} ([how](../docs/platforms.md))."
    content["cells"][0]["source"] = f"{title}\n\n{line}\n{rest}"
    return json.dumps(content)


def _record(app: Any) -> None:
    """Record the script, and write the explorer of the recording and the page of `trace`."""
    if app.builder.name != "html":
        return
    script = ROOT / f"{LIVE}.py"
    ranks = labkit.torchrun(
        script, ranks=4, like="H200", values=False, trace=True, quiet=True, timeout=None
    )
    trace = ranks.trace
    Path(app.outdir, LIVE).parent.mkdir(parents=True, exist_ok=True)
    trace.explore().save(Path(app.outdir, f"{LIVE}-explorer.html"))
    command = f"--ranks=4 --like=H200 --no-values {script.name}"
    page = report.page(trace, command, "at its last line", datetime.date.today())
    Path(app.outdir, f"{LIVE}-trace.html").write_text(page, encoding="utf-8")


def _add_recording(app: Any, docname: str, source: list[str]) -> None:
    """Add a frame with the explorer, which stays hidden in a browser without scripts."""
    if docname != LIVE:
        return
    name = Path(LIVE).name
    attributes = f'title="{_TITLE}" src="{name}-explorer.html" sandbox="{_MAY}"'
    frame = f'<iframe class="live" hidden loading="lazy" {attributes}></iframe>'
    links = [f'<a href="{name}-{kind}.html">{text}</a>' for kind, text in _PAGES.items()]
    source[0] = source[0].replace("<!-- live -->", f"{frame}\n<p>{' · '.join(links)}</p>")


def _open_at_the_start(app: Any, exception: Exception | None) -> None:
    """Give the first page the name that web servers look for."""
    if exception is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))
