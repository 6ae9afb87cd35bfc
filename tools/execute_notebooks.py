"""Run notebooks on virtual GPUs and store their outputs, the same bytes each time.

    python tools/execute_notebooks.py [NOTEBOOK …]        (default: all in notebooks/)

The stored file has nothing that belongs to one machine or one run: times of execution, the kernel's
version, the ids of widgets. A stored widget cannot be drawn without its kernel, so its text is kept
instead. If a cell without the tag `raises-exception` raises an error, the program stops, and the
notebook stays unchanged.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
SECONDS = 600  # a cell's limit, also on a busy machine
WIDGET = "application/vnd.jupyter.widget-view+json"


def main(arguments: list[str]) -> None:
    os.environ["LABKIT_VIRTUAL"] = "1"  # the kernels inherit it
    os.environ["LABKIT_PROGRESS"] = ""  # nobody's
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for path in [Path(name) for name in arguments] or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=SECONDS,
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": str(path.parent)}},
        )
        nbformat.write(normal(client.execute()), path)
        code_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        print(f"{path}: {code_cells} code cells executed")


def normal(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what belongs to one run from a notebook, and return it. Cells keep their tags."""
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join neighbouring outputs of the same stream, because timing decides how a stream is cut."""
    together: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = None
        if together:
            last = together[-1]
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            together.append(output)
    return together


if __name__ == "__main__":
    main(sys.argv[1:])
