"""tools/execute_notebooks.py stores outputs without what belongs to one run."""

import importlib.util
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

v4 = nbformat.v4


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[2] / "tools" / "execute_notebooks.py"
    specification = importlib.util.spec_from_file_location("execute_notebooks", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_outputs_of_one_run_become_the_same_bytes(tool):
    def stream(text, name="stdout"):
        return v4.new_output("stream", name=name, text=text)

    widget = v4.new_output(
        "display_data", data={tool.WIDGET: {"model_id": "a1b2"}, "text/plain": "Panel()"}
    )
    cell = v4.new_code_cell(
        "print(1)", outputs=[stream("1"), stream("2\n"), stream("!", "stderr"), stream("3"), widget]
    )
    cell.metadata.update(execution={"iopub.status.busy": "2026"}, tags=["exercise"])
    notebook = tool.normal(
        v4.new_notebook(
            cells=[cell, v4.new_markdown_cell("text")], metadata={"widgets": {"state": {}}}
        )
    )
    assert [(output.name, output.text) for output in cell.outputs[:3]] == [
        ("stdout", "12\n"),
        ("stderr", "!"),
        ("stdout", "3"),
    ]
    assert cell.outputs[3].data == {"text/plain": "Panel()"}
    assert cell.metadata == {"tags": ["exercise"]}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    nbformat.validate(notebook)


@pytest.mark.slow
def test_a_notebook_that_fails_stays_as_it_was(tool, tmp_path, monkeypatch):
    # what main changes in this process is undone with these
    monkeypatch.setenv("LABKIT_VIRTUAL", "0")
    monkeypatch.setenv("LABKIT_PROGRESS", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "broken.ipynb"
    nbformat.write(
        v4.new_notebook(cells=[v4.new_code_cell("print('first')"), v4.new_code_cell("1 / 0")]), path
    )
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        tool.main([str(path)])
    assert path.read_bytes() == before
