"""A training with leaks built in, on a virtual GPU."""

import gc

import pytest
import torch

import labkit
from gputrace.holders.autograd import TELLS_SAVED
from labkit.experiments import collect, leaky_training
from labkit.experiments.leaks import ALONE, LEAKS, NO_LEAK, growth, script

MIB = 1 << 20
GRAPH = "the autograd graph of global `losses[" if TELLS_SAVED else "C++ only, perhaps an autograd graph"  # torch 2.6 does not tell


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The objects of pytest and torch are left out of the search for holders, which makes it quick."""
    with labkit.use(virtual=True, quiet=True):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


def test_each_leak_keeps_what_its_tensors_take():
    result = collect(leaky_training(steps=3))
    kept = growth(result)
    assert list(kept) == list(ALONE)
    assert [kept[leak] / MIB for leak in ("summed losses", "hook", "kept batches", "evaluation")] == [0, 1, 1.5, 3]
    loss = torch.nn.functional.mse_loss(*torch.ones(2, 2048, 64, device="cuda"))
    assert kept["kept losses"] == max(512, loss.untyped_storage().nbytes())
    assert result.column("step", leak="hook") == [1, 2, 3]
    assert result.column("grown", leak="hook") == [MIB, 2 * MIB, 3 * MIB]
    assert set(result.column("holder")) == {""}


@pytest.mark.parametrize(
    ("leaks", "mib", "holder"),
    [
        ([], 0, ""),
        (["retain_graph"], 0, ""),
        (["kept losses", "retain_graph"], 3.5, GRAPH),
        (["kept batches"], 1.5, "global `history["),
        (["hook"], 1, "global `seen["),
    ],
)
def test_leaks_together_name_who_holds_them(leaks, mib, holder):
    result = collect(leaky_training(leaks, steps=2, together=True))
    assert growth(result) == {" + ".join(leaks) or NO_LEAK: mib * MIB}
    first, last = result.column("holder")
    assert first == "" and last.startswith(holder) and bool(last) == bool(holder)


def test_it_leaves_nothing_behind_however_it_ends():
    collect(leaky_training(["summed losses"], steps=2))  # cuBLAS takes its workspace
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        collect(leaky_training(tuple(LEAKS), steps=2, together=True))
        run = leaky_training(["hook"], together=True)
        next(run), next(run)
        assert torch.cuda.memory_allocated() > before
        run.close()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_the_script_shows_the_lines_that_run():
    before, step = script(["hook", "retain_graph", "kept losses"])
    assert LEAKS["hook"] in before and LEAKS["hook"] not in step
    assert "loss.backward(retain_graph=True)" in step and "loss.backward()" not in step
    assert step.endswith("losses.append(loss)\n")
    assert script([])[1].endswith("optimizer.step()\n")


def test_bad_arguments_name_what_is_allowed():
    with pytest.raises(ValueError, match=r"leaks=\['nothing'\]: choose from 'summed losses', .*'retain_graph'"):
        leaky_training(["nothing"])
    with pytest.raises(ValueError, match="none of them only with together=True"):
        leaky_training([])
    for steps in (1, 1001, 2.0, True):
        with pytest.raises(ValueError, match="steps=.*from 2 to 1000"):
            leaky_training(steps=steps)


@pytest.mark.gpu
def test_a_real_gpu_keeps_the_same():
    labkit.use(None)
    with labkit.use(virtual=False, quiet=True):
        kept = growth(collect(leaky_training(steps=3)))
    assert [kept[leak] / MIB for leak in ("summed losses", "hook", "kept batches", "evaluation")] == [0, 1, 1.5, 3]
