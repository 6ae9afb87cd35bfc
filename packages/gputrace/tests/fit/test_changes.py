"""A change from outside takes the same memory as one that is written into the script.

A change that finds nothing to change says so.
"""

import textwrap
from dataclasses import replace

import pytest

from gputrace.fit.outcome import Wish

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    def forward(self, x):
        return x + self.layers(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = {block}
        return x

model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(){foreach})
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
batches = DataLoader(torch.ones(8 * 4096, 64), batch_size={size})
for number, batch in enumerate(batches):
    if number % {every} == 0:
        optimizer.zero_grad()
    {autocast}output = model(batch.cuda())
    loss = output.float().square().mean()
    loss.backward()
    if number % {every} == {every} - 1:
        optimizer.step()
    schedule.step()
"""
REMEMBER = """def remember(self, cache):
        if cache is not None:
            cache.append(self)
            assert len(cache) <= 4, "a block remembered twice"
    def forward(self, x, cache=None):
        self"""
PLAIN = {"block": "block(x)", "foreach": "", "size": 4096, "every": 1, "autocast": ""}
WRITTEN = {
    "optimizer with foreach=False": {"foreach": ", foreach=False"},
    "autocast to bfloat16": {"autocast": 'with torch.autocast("cuda", torch.bfloat16): '},
    "two halves of a batch, accumulated": {"size": 2048, "every": 2},
    "half the batch": {"size": 2048},
    "checkpointing of each block": {"block": "checkpoint(block, x, use_reentrant=False)"},
}


@pytest.fixture
def tried(run, tmp_path):
    """A function that runs a script with this source, with a change or none."""

    def run_it(source: str, change: str | None = None, gpus: int = 1):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return run(Wish(str(path), [], False, "A100", 4, change=change, gpus=gpus))

    return run_it


@pytest.mark.slow
@pytest.mark.parametrize("change", WRITTEN)
def test_made_from_outside_it_takes_what_it_would_take_written_into_the_script(tried, change):
    plain = tried(SCRIPT.format(**PLAIN))
    outside, written = (
        tried(SCRIPT.format(**PLAIN), change),
        tried(SCRIPT.format(**PLAIN | WRITTEN[change])),
    )
    assert (
        not (plain.failed or outside.failed or written.failed)
        and outside.changed
        and not plain.changed
    )
    assert outside.steps == written.steps == 4
    assert (outside.used, outside.allocated, outside.parts) == (
        written.used,
        written.allocated,
        written.parts,
    )
    assert outside.step == pytest.approx(written.step, rel=0.05)
    assert replace(outside, changed=False, changes=plain.changes) != plain
    assert change in plain.changes


@pytest.mark.slow
def test_float16_takes_what_it_would_take_with_a_scaler_in_the_script(tried):
    change = "autocast to float16, with GradScaler"
    plain = SCRIPT.format(**PLAIN)
    autocast = 'with torch.autocast("cuda", torch.float16): '
    written = SCRIPT.format(**PLAIN | {"autocast": autocast})
    written = written.replace("model = Net", 'scaler = torch.amp.GradScaler("cuda")\nmodel = Net')
    written = written.replace("loss.backward()", "scaler.scale(loss).backward()")
    written = written.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    outside, inside = tried(plain, change), tried(written)
    assert not (outside.failed or inside.failed) and outside.changed and outside.steps == 4
    assert (outside.used, outside.allocated, outside.parts) == (
        inside.used,
        inside.allocated,
        inside.parts,
    )
    assert outside.step == pytest.approx(inside.step, rel=0.05)
    assert change in tried(plain).changes and change not in inside.changes


@pytest.mark.slow
@pytest.mark.parametrize("change", ["autocast to bfloat16", "checkpointing of each block"])
def test_the_replicas_of_data_parallel_are_changed_too(tried, change):
    def parallel(**lines: object) -> str:
        source = SCRIPT.format(**PLAIN | lines)
        return source.replace("model = Net().cuda()", "model = nn.DataParallel(Net().cuda())")

    source = parallel(**WRITTEN[change])
    if "autocast" in WRITTEN[change]:
        assert change not in tried(source, gpus=2).changes
    outside, inside = tried(parallel(), change, 2), tried(source, gpus=2)
    assert (outside.failed, outside.changed) == ("", True)
    assert (outside.allocated, outside.by_device) == (inside.allocated, inside.by_device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "set_grad_checkpointing"])
def test_a_model_that_can_checkpoint_by_itself_does_so(tried, name):
    able = f"class Net(nn.Module):\n    own = False\n    def {name}(self):\n        self.own = True"
    block = "checkpoint(block, x, use_reentrant=False) if self.own else block(x, cache)"
    switched = SCRIPT.format(**PLAIN | {"block": block}).replace("class Net(nn.Module):", able)
    switched = switched.replace(
        "        return x + self.layers(x)",
        "        self.remember(cache)\n        return x + self.layers(x)",
    )
    switched = switched.replace("def forward(self, x):\n        self", REMEMBER).replace(
        "        for block in self", "        cache = []\n        for block in self"
    )
    written = switched.replace("own = False", "own = True")
    outside, inside = tried(switched, "checkpointing of each block"), tried(written)
    assert not (outside.failed or inside.failed) and outside.changed
    assert (outside.used, outside.allocated, outside.parts) == (
        inside.used,
        inside.allocated,
        inside.parts,
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_switch_that_is_on_or_refuses_or_is_inside(tried, wrapped):
    """A model with checkpointing switched on is not changed.

    If the model refuses, its blocks are checkpointed. A model in a wrapper is found, too.
    """

    def script(enable: str, on: bool) -> str:
        able = (
            f"class Net(nn.Module):\n    gradient_checkpointing = {on}\n"
            f"    def gradient_checkpointing_enable(self):\n        {enable}"
        )
        block = (
            "checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)"
        )
        source = SCRIPT.format(**PLAIN | {"block": block}).replace("class Net(nn.Module):", able)
        return (
            source.replace("model = Net()", "model = nn.Sequential(Net(), nn.Identity())")
            if wrapped
            else source
        )

    change = "checkpointing of each block"
    inside = tried(script("self.gradient_checkpointing = True", True))
    assert not inside.failed and change not in inside.changes
    for enable in (
        "self.gradient_checkpointing = True",
        'raise ValueError("not here")',
        'raise AssertionError("not here")',
    ):
        outside = tried(script(enable, False), change)
        assert (outside.failed, outside.changed, outside.allocated) == (
            "",
            True,
            inside.allocated,
        ), enable


@pytest.mark.slow
def test_what_a_script_counts_after_each_step_it_may_count_after_half_of_one(tried):
    counts = SCRIPT.format(**PLAIN) + "    print((output.argmax(1) == 0).sum().item())\n"
    change = "two halves of a batch, accumulated"
    outcome, uncounted = tried(counts, change), tried(SCRIPT.format(**PLAIN), change)
    assert (outcome.failed, outcome.steps, outcome.allocated) == ("", 4, uncounted.allocated)
    assert all(line.startswith("train.py:") for line in outcome.made_up) and outcome.made_up


@pytest.mark.slow
def test_a_script_that_evaluates_first_is_checkpointed_when_it_trains(tried):
    first = SCRIPT.replace(
        "for number, batch",
        "model.eval()\nmodel(torch.ones(8, 64).cuda())\nmodel.train()\nfor number, batch",
    )
    change = "checkpointing of each block"
    outside, written = (
        tried(first.format(**PLAIN), change),
        tried(first.format(**PLAIN | WRITTEN[change])),
    )
    assert (outside.failed, outside.changed, outside.allocated) == ("", True, written.allocated)


@pytest.mark.slow
def test_a_list_that_a_block_is_given_may_grow_afterwards(tried):
    """Check a block that appends to its list, as in a densely connected network."""
    dense = SCRIPT.format(**PLAIN | {"block": "block(kept)"}).replace(
        "        for block in self", "        kept = []\n        for block in self"
    )
    dense = dense.replace(
        "            x = block", "            kept.append(x)\n            x = block"
    )
    joined = (
        "def forward(self, kept):\n        x = torch.cat(kept, 1).square()[:, :64]\n        return"
    )
    dense = dense.replace("def forward(self, x):\n        return", joined)
    outcome = tried(dense, "checkpointing of each block")
    assert (outcome.failed, outcome.changed) == ("", True)


@pytest.mark.slow
def test_a_script_that_has_autocast_keeps_its_own(tried):
    """The autocast is around the call of the model, or in the model's own forward pass."""
    change = "autocast to bfloat16"
    inside = SCRIPT.format(**PLAIN).replace(
        "model = Net()",
        'Net.forward = torch.autocast("cuda", torch.bfloat16)(Net.forward)\nmodel = Net()',
    )
    for source in (SCRIPT.format(**PLAIN | WRITTEN[change]), inside):
        outcome = tried(source, change)
        assert (outcome.failed, outcome.changed) == ("", False)
        assert change not in tried(source).changes
    off = inside.replace("torch.bfloat16)(", "torch.bfloat16, enabled=False)(")
    assert change in tried(off).changes


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_modules_that_prepare_data_are_no_models(tried, workers):
    """Check a data set's transforms, in this process and in a worker that must not use the GPU."""
    source = f"""
        import torch
        from torch.utils.data import DataLoader

        class Scaled(torch.nn.Module):
            def forward(self, x):
                return x / 2

        class Samples(torch.utils.data.Dataset):
            scaled = Scaled()
            def __len__(self):
                return 16
            def __getitem__(self, i):
                return self.scaled(torch.ones(8))

        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Samples(), batch_size=4, num_workers={workers}):
            model(batch.cuda()).sum().backward()
            optimizer.step()
    """
    outcome = tried(source, "autocast to bfloat16")
    assert (outcome.failed, outcome.changed, outcome.steps) == ("", True, 4)
    on_cpu = source.replace(
        "model(batch.cuda()).sum().backward()", "(batch.cuda() @ model.weight).sum().backward()"
    )
    assert not tried(on_cpu, "autocast to bfloat16").changed


@pytest.mark.slow
def test_where_there_is_nothing_to_change_it_says_so(tried):
    source = """
        import torch
        weight = torch.ones(8, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()
    """
    assert tried(source).changes == []
    for change in WRITTEN:
        outcome = tried(source, change)
        # no step is run for nothing
        assert (outcome.failed, outcome.changed, outcome.steps) == (
            "",
            False,
            2,
        )
