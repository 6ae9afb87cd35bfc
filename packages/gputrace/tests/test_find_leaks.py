"""The leaks of a block: what outlives it, told in a table; in IPython too."""

import gc
import sys
import types

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import virtualgpu.hardware
from gputrace.holders.search import UNSEEN
from gputrace.holders.tensors import Census, alive
from gputrace.leaks import find_leaks
from virtualgpu.source_lines import SourceLine

LINE = SourceLine("train.py", 12, "train")
pytestmark = pytest.mark.usefixtures("shell", "small_heap")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    main = sys.modules["__main__"]
    settings = Config()
    settings.HistoryManager.enabled = False
    yield InteractiveShell.instance(
        config=settings, ipython_dir=str(tmp_path_factory.mktemp("ipython"))
    )
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


def allocated():
    """Return the blocks in use, by address."""
    segments = torch.cuda.memory_snapshot()
    return {
        block["address"]: block
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


class Births:
    """Context manager that collects the blocks allocated in it that are alive at its end."""

    def __enter__(self):
        self._before = set(allocated())
        return self

    def __exit__(self, *error):
        self.census = Census(alive())
        self.list = [
            types.SimpleNamespace(
                device=0, address=address, size=block["size"], line=LINE, category="other"
            )
            for address, block in allocated().items()
            if address not in self._before
        ]

    def leaks(self):
        return find_leaks(self.list, self.census, "virtual GPU")


def test_a_clean_block_is_silent():
    with Births() as births:
        x = torch.ones(1000, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        del x
    found = births.leaks()
    assert found == [] and found.bytes == 0
    assert repr(found) == "no tensor born in the block outlives it"
    assert "no tensor born in the block outlives it" in found._repr_html_()


def test_the_largest_first_as_a_table():
    with Births() as births:
        small = torch.ones(100, dtype=torch.float16, device="cuda")
        history = [torch.ones(16, 64, 64, device="cuda")]
    found = births.leaks()
    assert [(leak.bytes, leak.device, leak.line, leak.shape, leak.dtype) for leak in found] == [
        (262144, 0, LINE, (16, 64, 64), "float32"),
        (512, 0, LINE, (100,), "float16"),
    ]
    assert [leak.holders[0].name for leak in found] == ["history[0]", "small"]
    assert found.bytes == 262656
    lines = repr(found).splitlines()
    assert lines[0] == "2 tensors born in the block outlive it: 256.5 KiB, virtual GPU"
    assert lines[1].split("  ")[0] == "bytes"
    assert lines[2].startswith(
        "256 KiB  cuda:0  train.py:12  other  float32 [16, 64, 64]  local `history[0]` of"
    )
    assert "<table>" in found._repr_html_()
    assert found[0].text.startswith(
        "256 KiB on cuda:0: float32 [16, 64, 64], train.py:12, held by local `history[0]` of"
    )
    assert history[0].shape[0] == 16 and small.ndim == 1


def test_what_died_after_the_block_is_no_leak_and_neither_is_what_took_its_place():
    with Births() as births:
        x = torch.ones(1000, device="cuda")
    address = x.data_ptr()
    del x
    assert births.leaks() == []
    later = torch.ones(1000, device="cuda")
    assert later.data_ptr() == address
    assert births.leaks() == []
    # without a census it cannot be told
    assert [leak.holders[0].name for leak in find_leaks(births.list)] == ["later"]


def test_the_graph_of_losses_in_a_list():
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).cuda()
    losses = []
    model(torch.ones(32, 64, device="cuda"))  # cuBLAS takes its workspace
    with Births() as births:
        for _ in range(2):
            losses.append(model(torch.ones(32, 64, device="cuda")).square().mean())
    found = births.leaks()
    assert len(found) == 8
    saved = {f"the autograd graph of local `losses[{i}]`" for i in range(2)}
    assert {
        holder.text.partition(" of `test")[0] for leak in found[:4] for holder in leak.holders
    } == saved
    assert {leak.holders[0].name for leak in found} == {"", "losses[0]", "losses[1]"}


def test_workspaces_are_no_leaks_and_other_memory_without_a_tensor_is():
    with Births() as births:
        taken = virtualgpu.hardware.machine().gpus[0].allocate(1 << 20)
    found = births.leaks()
    assert [leak.holders for leak in found] == [(UNSEEN,)]
    assert found[0].shape is None and found[0].dtype == ""
    births.list[0].category = "workspace"
    assert births.leaks() == [] and births.leaks().workspaces == 1 << 20
    stays = "(1 MiB of library workspaces stay: they are used again)"
    assert repr(births.leaks()) == f"no tensor born in the block outlives it {stays}"
    with Births() as more:
        kept = torch.ones(1000, device="cuda")
    more.list += births.list
    assert (
        repr(more.leaks()).splitlines()[0]
        == f"1 tensor born in the block outlives it: 4 KiB {stays}, virtual GPU"
    )
    assert kept.is_cuda
    births.list[0].category = "other"
    virtualgpu.hardware.machine().gpus[0].allocator.free(taken)
    assert births.leaks() == []
    births.list[0].category = "workspace"
    assert births.leaks().workspaces == 0


def test_leaks_keep_nothing_alive(no_collection):
    before = torch.cuda.memory_allocated()
    with Births() as births:
        x = torch.ones(1000, device="cuda", requires_grad=True)
        held = {"loss": (x * 2).exp().sum()}
    found = births.leaks()
    assert len(found) == 3
    del x, held
    assert torch.cuda.memory_allocated() == before
    assert not gc.isenabled()


# In IPython


@pytest.fixture
def cell(shell, capsys):
    """A function that runs a cell of a notebook. The cell can use `births` to plant leaks."""
    shell.reset(new_session=True)
    shell.user_ns.update(Births=Births, births=Births(), torch=torch)

    def run(source):
        result = shell.run_cell(source, store_history=True)
        return result.result if result.success else result.error_in_exec

    yield run
    shell.reset(new_session=True)
    run("1 / 0")  # IPython forgets the error before it


def test_results_of_cells(cell):
    cell("with births: x = torch.ones(3, device='cuda')")
    cell("x")
    cell("del x")
    found = cell("births.leaks()")
    assert len(found) == 1
    assert {holder.text for holder in found[0].holders} == {
        "IPython's `Out[2]`",
        "IPython's `_2`",
        "IPython's `_`",
    }


def test_a_variable_of_a_cell(cell):
    cell("with births: data = torch.ones(3, device='cuda')")
    found = cell("births.leaks()")
    assert [holder.text for holder in found[0].holders] == ["global `data` of __main__"]


def test_the_error_of_a_cell(cell):
    cell("def f():\n    x = torch.ones(3, device='cuda')\n    raise ValueError\nwith births: f()")
    found = cell("births.leaks()")
    ending = (
        "of `f` (line 3 of cell [1]), kept by the traceback of the last exception, `sys.last_value`"
    )
    assert [holder.text for holder in found[0].holders] == [f"local `x` {ending}"]
    cell("import sys; sys.last_exc = sys.last_value = sys.last_traceback = None")
    found = cell("births.leaks()")
    assert [holder.text.partition(" (it keeps")[0] for holder in found[0].holders] == [
        "local `x` of `f` (line 3 of cell [1]), kept by the traceback of the records of IPython"
    ]
