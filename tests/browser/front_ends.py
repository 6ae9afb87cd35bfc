"""The two front ends for lessons, used as a learner does: JupyterLab 4, classic notebook 6.5."""

from pathlib import Path
from typing import Any, ClassVar

from .keyboard import reach

SECONDS = 1000  # Playwright counts in milliseconds
OPENED = 120 * SECONDS  # a page, the first time, on a machine that is busy with something else
TOKEN = "browser-tests"
WIDTH, HEIGHT = 1200, 1000  # pixels of a page
LONGEST = 16_000  # pixels: Chromium photographs no more at once


class JupyterLab:
    """JupyterLab 4, with ipywidgets 8."""

    module = "jupyterlab"
    cell = ".jp-Cell.jp-CodeCell"
    source = ".jp-InputArea-editor"
    output = ".jp-OutputArea-output"
    notebook = ".jp-Notebook"
    keeps_focus = True  # the kernel can give a button the keyboard focus
    themes = ("JupyterLab Light", "JupyterLab Dark")
    # What the lessons and the kit draw: outputs and rendered text. JupyterLab draws the rest, and
    # chooses the colours of tracebacks, of the standard error, and of code in a lesson's text.
    drawn: ClassVar = {
        "include": [[".jp-OutputArea-output"], [".jp-RenderedMarkdown"]],
        "exclude": [
            ["[data-mime-type='application/vnd.jupyter.error'] pre"],
            ["[data-mime-type='application/vnd.jupyter.stderr'] pre"],
            [".jp-RenderedMarkdown pre"],
        ],
    }
    narrow = 760  # pixels of a page whose notebook is as narrow as on a phone
    cells = "window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"
    # The indicator says idle before the front end has the kernel's description. Of the cells that
    # are run in between, only the first one runs.
    ready = """async () => {
        const session = window.jupyterapp.shell.currentWidget.sessionContext;
        await session.ready;
        await session.session.kernel.info;
        await session.session.kernel.requestKernelInfo();
    }"""

    @staticmethod
    def options(folder: Path) -> list[str]:
        return [
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={folder}",
            "--LabApp.expose_app_in_browser=True",
        ]

    def open(self, page: Any, address: str, name: str) -> None:
        page.goto(f"{address}/lab/tree/{name}?reset&token={TOKEN}", timeout=OPENED)
        page.locator(self.notebook).wait_for(timeout=OPENED)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=OPENED)
        page.evaluate(self.ready)

    def show_whole(self, page: Any) -> None:
        """Make the page as long as its notebook, and draw what JupyterLab would leave out.

        The outermost element has no height and hides what overflows it. It hides nothing here,
        because the elements in it have their own positions. But axe-core takes all text in it for
        invisible, and would not check its contrast.
        """
        page.add_style_tag(
            content=".jp-Cell { content-visibility: visible !important }"
            " .jp-ThemedContainer { overflow: visible !important }"
        )
        length = page.evaluate("document.querySelector('.jp-WindowedPanel-viewport').scrollHeight")
        page.set_viewport_size({"width": WIDTH, "height": min(length + HEIGHT // 5, LONGEST)})
        page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")

    def change_theme(self, page: Any, theme: str) -> None:
        page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
        page.locator("#jupyterlab-splash").wait_for(
            state="detached"
        )  # which covers the page meanwhile

    def select_cell(self, page: Any, cell: Any) -> None:
        """Select a cell with keys alone, wherever the focus is in the notebook."""
        reach(page, page.locator(f"{self.cell}.jp-mod-active"), "Shift+Tab")
        number = "cell => [...cell.parentElement.children].indexOf(cell)"
        way = cell.evaluate(number) - page.locator(f"{self.cell}.jp-mod-active").evaluate(number)
        for _ in range(abs(way)):
            page.keyboard.press("ArrowDown" if way > 0 else "ArrowUp")

    def run_all(self, page: Any) -> None:
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()


class ClassicNotebook:
    """The notebook 6.5, with ipywidgets 7.7.1 (Colab's)."""

    module = "notebook"
    cell = ".cell.code_cell"
    source = ".input_area"
    output = ".output_subarea"
    notebook = "#notebook-container"
    keeps_focus = False
    themes = ("classic",)  # it has no other
    # colours of tracebacks are IPython's
    drawn: ClassVar = {"include": [[".output_subarea:not(.output_error)"], [".rendered_html"]]}
    narrow = 480
    cells = "window.Jupyter.notebook.toJSON().cells"
    ready = """() => {
        const kernel = window.Jupyter?.notebook?.kernel;
        return kernel?.is_connected() && kernel.info_reply?.status === "ok"
            && kernel.widget_manager !== undefined;
    }"""

    @staticmethod
    def options(folder: Path) -> list[str]:
        return [
            "--NotebookApp.port_retries=0",
            f"--NotebookApp.token={TOKEN}",
            f"--NotebookApp.notebook_dir={folder}",
        ]

    def open(self, page: Any, address: str, name: str) -> None:
        page.goto(f"{address}/notebooks/{name}?token={TOKEN}", timeout=OPENED)
        page.locator(self.notebook).wait_for(timeout=OPENED)
        page.wait_for_function(self.ready, timeout=OPENED)

    def show_whole(self, page: Any) -> None:
        length = page.evaluate("document.querySelector('#site').scrollHeight")
        page.set_viewport_size({"width": WIDTH, "height": min(length + HEIGHT // 5, LONGEST)})

    def change_theme(self, page: Any, theme: str) -> None:
        """Do nothing, because the classic notebook has only one theme."""

    def select_cell(self, page: Any, cell: Any) -> None:
        """Move the focus to the beginning of the output.

        The Tab key moves between cells in an order of its own, and indents in a cell's editor.
        """
        cell.locator(".output_wrapper").evaluate(
            "output => { output.tabIndex = -1; output.focus(); }"
        )

    def run_all(self, page: Any) -> None:
        page.locator("#celllink").click()
        page.locator("#run_all_cells").click()
