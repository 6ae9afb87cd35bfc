"""How Sphinx builds the site: the lessons with their stored outputs, the guides, and the reference from the packages' docstrings.

The sources are the repository itself, so a link that leads somewhere on GitHub leads there on the site, too.
"""

import datetime
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

import labkit
from gputrace import report

ROOT = Path(__file__).parents[1]
LIVE = "docs/a-step-on-four-gpus"  # a page, and the script whose recording stands in it
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))

project = "PyTorch on GPUs"
author = "the GPU teaching kit authors"
copyright = author
html_title = "PyTorch on GPUs: a teaching kit"
html_theme = "furo"
html_static_path = ["static"]
html_js_files = ["reachable.js"]
html_css_files = ["live.css"]
html_search_scorer = str(ROOT / "docs" / "scorer.js")
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**",
    "notebooks/*.ipynb",
    "packages/*/README.md",
]
nb_execution_mode = "off"  # the outputs are those that the repository stores and its tests compare
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
always_document_param_types = True

PLACES = {  # where a lesson opens with nothing to install, as docs/platforms.md has it
    "on Binder": "https://mybinder.org/v2/gh/OWNER/NAME/main?urlpath=lab/tree/work/LESSON",
    "in Colab": "https://colab.research.google.com/github/OWNER/NAME/blob/main/notebooks/LESSON",
    "on Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/OWNER/NAME/blob/main/notebooks/LESSON",
}
_TITLE = "What ran when on four GPUs, and the blocks of their memory, to look into"
_MAY = "allow-scripts allow-downloads allow-popups"
_PAGES = {"explorer": "In a window of its own", "trace": "The whole page that the command writes"}
CONTENTS = {
    "Lessons": [f"notebooks/{name}" for name in LESSONS],
    "Guides": [
        "docs/platforms",
        "docs/teaching",
        "docs/your-own-course",
        "docs/your-own-script",
        LIVE,
        "docs/glossary",
        "docs/how-the-virtual-gpu-works",
        "docs/accuracy",
        "Virtual GPUs: virtualgpu <packages/virtualgpu/README>",
        "Recording: gputrace <packages/gputrace/README>",
        "Courses: labcourse <packages/labcourse/README>",
        "docs/reference",
        "docs/other-material",
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
    "The project": ["CONTRIBUTING", "CHANGELOG", "A draft of a paper <docs/paper>"],
}


def setup(app: Any) -> None:
    app.add_lexer(
        "mermaid", TextLexer
    )  # GitHub draws it; a library that does so here would come from elsewhere at each reading
    app.connect("source-read", _add_contents)
    app.connect("source-read", _know_anchors)
    app.connect("source-read", _know_address)
    app.connect("source-read", _add_recording)
    app.connect("builder-inited", _record)
    app.connect("build-finished", _open_at_the_start)


def _add_contents(app: Any, docname: str, source: list[str]) -> None:
    """The pages in reading order, which GitHub would show as code."""
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
                + "\n".join(pages)
                + "\n```\n"
            )


def _know_anchors(app: Any, docname: str, source: list[str]) -> None:
    """The places that links lead to, which Sphinx does not see in HTML."""
    source[0] = re.sub(r'<a id="([\w-]+)"></a>', r"[]{#\1}", source[0])


def _know_address(app: Any, docname: str, source: list[str]) -> None:
    """GitHub's workflows say from which repository they build. There, each lesson has a link to where it opens."""
    if address := os.environ.get("GITHUB_REPOSITORY"):
        if docname in CONTENTS["Lessons"]:
            source[0] = with_links(source[0], f"{Path(docname).name}.ipynb")
        source[0] = source[0].replace("OWNER/NAME", address)


def with_links(notebook: str, lesson: str) -> str:
    """The notebook with links to its places below its title."""
    content = json.loads(notebook)
    title, _, rest = "".join(content["cells"][0]["source"]).partition("\n")
    links = " · ".join(
        f"[{place}]({link.replace('LESSON', lesson)})" for place, link in PLACES.items()
    )
    content["cells"][0]["source"] = (
        f"{title}\n\nOpen this lesson {links} ([how](../docs/platforms.md)).\n{rest}"
    )
    return json.dumps(content)


def _record(app: Any) -> None:
    """Record the script of the page that one can look into; the result is two pages of their own: the explorer, and what `trace` writes."""
    if app.builder.name == "html":
        trace = labkit.torchrun(
            ROOT / f"{LIVE}.py",
            ranks=4,
            like="H200",
            values=False,
            trace=True,
            quiet=True,
            timeout=None,
        ).trace
        Path(app.outdir, LIVE).parent.mkdir(parents=True, exist_ok=True)
        trace.explore().save(Path(app.outdir, f"{LIVE}-explorer.html"))
        page = report.page(
            trace,
            f"--ranks=4 --like=H200 --no-values {Path(LIVE).name}.py",
            "at its last line",
            datetime.date.today(),
        )
        Path(app.outdir, f"{LIVE}-trace.html").write_text(page, encoding="utf-8")


def _add_recording(app: Any, docname: str, source: list[str]) -> None:
    """A frame with the recording, which is fetched when it comes into sight. It is hidden where no script runs."""
    if docname == LIVE:
        name = Path(LIVE).name
        frame = f'<iframe class="live" hidden loading="lazy" title="{_TITLE}" src="{name}-explorer.html" sandbox="{_MAY}"></iframe>'
        links = " · ".join(
            f'<a href="{name}-{kind}.html">{text}</a>' for kind, text in _PAGES.items()
        )
        source[0] = source[0].replace("<!-- live -->", f"{frame}\n<p>{links}</p>")


def _open_at_the_start(app: Any, exception: Exception | None) -> None:
    if exception is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))
