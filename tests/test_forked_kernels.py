"""The kernels of `make notebooks`: each is a copy of one process, and starts as a new one does."""

import os

import nbclient
import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner

from labkit.processes import forkserver
from tools import forked_kernels

CELLS = (
    "import os, sys\nleft = 'mine'\nprint(os.getppid())",
    "print('torch' in sys.modules, os.getcwd())",
    "os.kill(os.getpid(), 2)",
    "import torch\ntorch.ones(2, device='cuda')",
    "import labkit\nlabkit.isolated(os.getppid).value",
)


@pytest.mark.slow
@pytest.mark.skipif(not forkserver.POSSIBLE, reason="this system has no fork server")
def test_two_kernels_are_copies_of_one_process_and_share_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr(local_provisioner, "launch_kernel", forked_kernels.launch_kernel)
    for _ in range(2):
        cells = [nbformat.v4.new_code_cell(source) for source in ("left", *CELLS)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        where = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(notebook, timeout=240, allow_errors=True, resources=where)
        client.execute()
        first, parent, modules, interrupted, refused, parent_of_isolated = (
            cell.outputs[0] for cell in notebook.cells
        )
        assert (first.ename, first.evalue) == ("NameError", "name 'left' is not defined")
        assert int(parent.text) == forkserver.pid() != os.getpid()
        assert parent_of_isolated.data["text/plain"] == parent.text.strip()  # no second server
        assert modules.text == f"True {os.path.realpath(tmp_path)}\n"
        assert interrupted.ename == "KeyboardInterrupt"
        assert refused.ename in ("AssertionError", "RuntimeError")  # no GPU is in use
