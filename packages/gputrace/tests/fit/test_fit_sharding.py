"""A script sharded from outside takes the same memory as one that calls `fully_shard`.

A script that cannot be sharded is refused by name.
"""

import textwrap

import pytest

from gputrace.fit.outcome import Wish

SCRIPT = """
import time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    def forward(self, x):
        return x + self.layers(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

model = Net().cuda()
{before}
optimizer = torch.optim.AdamW({parameters})
for number in range(4):
    optimizer.zero_grad()
    loss = model(torch.ones(1024, 64, device="cuda")).square().mean()
    loss.backward()
    {between}
    optimizer.step()
    print(loss.item())
"""
BY_HAND = """
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
ends = []
"""
TOLD = (
    "\nresult = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), "
    "(ends[-1] - ends[0]) / 3\n"
)
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BIASES = [
    "biases = [p for p in model.parameters() if p.ndim == 1]",
    '[{"params": biases, "lr": 0.1}, {"params": (p for p in model.parameters() if p.ndim > 1)}]',
]
NAMED = ["", "model.named_parameters()"]


@pytest.fixture
def sharded(run, tmp_path):
    """A function that runs a script as `fit` does, as one of this many ranks."""

    def over(ranks: int, source: str, **lines: str):
        path = tmp_path / "train.py"
        path.write_text(
            textwrap.dedent(source).format(
                **{"before": "", "parameters": "model.parameters()", "between": ""} | lines
            )
        )
        return run(
            Wish(str(path), [], False, "A100", 4, change=f"sharding over {ranks} GPUs (FSDP2)")
        )

    return over


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_made_from_outside_it_takes_what_it_would_take_written_into_the_script(
    sharded, tmp_path, ranks
):
    labkit = pytest.importorskip("labkit", reason="labkit simulates the rank to compare with")
    outside = sharded(ranks, SCRIPT, between=CLIP)
    written = tmp_path / "written.py"
    lines = {"before": BY_HAND, "parameters": "model.parameters()", "between": CLIP}
    written.write_text(
        SCRIPT.format(**lines).replace(
            "    print(loss.item())", "    loss.item()\n    ends.append(time.perf_counter())"
        )
        + TOLD
    )
    simulated = labkit.torchrun(written, simulate=ranks, network="400Gb/s", like="A100", quiet=True)
    (inside,) = simulated.results
    assert (outside.failed, outside.changed, outside.steps) == ("", True, 4)
    assert [outside.allocated, outside.reserved] == inside[:2]
    assert outside.step == pytest.approx(inside[2], rel=0.05)


@pytest.mark.slow
def test_however_an_optimizer_gets_the_parameters_it_has_the_shards(sharded):
    plain = sharded(4, SCRIPT)
    listed = sharded(
        4,
        SCRIPT,
        before="kept = [p for p in model.parameters() if p.requires_grad]",
        parameters="kept",
    )
    for before, parameters in (BIASES, NAMED):
        other = sharded(4, SCRIPT, before=before, parameters=parameters)
        assert (other.failed, other.parts["optimizer state"]) == (
            "",
            plain.parts["optimizer state"],
        )
    assert (listed.failed, listed.allocated, listed.reserved) == (
        "",
        plain.allocated,
        plain.reserved,
    )


@pytest.mark.slow
def test_a_module_whose_training_step_is_called_as_lightning_does_is_sharded_too(sharded):
    whole = """class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, x):
        return self.net(x)

model = Whole().cuda()"""
    called = SCRIPT.replace("model = Net().cuda()", whole).replace(
        "loss = model(", "loss = model.training_step("
    )
    inside, plain = sharded(4, called), sharded(4, SCRIPT)
    assert (inside.failed, inside.allocated, inside.reserved) == (
        "",
        plain.allocated,
        plain.reserved,
    )


@pytest.mark.slow
def test_a_variable_that_a_loop_over_the_parameters_left_behind_is_no_hindrance(sharded):
    frozen = sharded(
        2, SCRIPT, before="for p in model.blocks[0].parameters():\n    p.requires_grad = False"
    )
    assert (frozen.failed, frozen.changed) == ("", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            {"before": "kept = tuple(model.parameters())"},
            "optimizer.step(): RuntimeError: the script keeps 26 of the parameters",
        ),
        (
            {
                "before": "scale = nn.Parameter(torch.ones(3, device='cuda'))",
                "parameters": "[*model.parameters(), scale]",
            },
            "of shape (3,)",
        ),
        (
            {"between": "loss.new_ones(8, 64) @ model.first.weight.T"},
            "got mixed torch.Tensor and DTensor",
        ),
        (
            {"before": "model.blocks[0].layers[0].weight = model.blocks[1].layers[0].weight"},
            "blocks of Net share parameters",
        ),
        (
            {
                "before": "torch.distributed.init_process_group('nccl', rank=0, world_size=1, "
                "store=torch.distributed.HashStore())",
            },
            "the script starts ranks itself",
        ),
    ],
)
def test_what_cannot_be_sharded_is_named(sharded, lines, reason):
    failed = sharded(2, SCRIPT, **lines).failed
    assert failed.startswith("train.py:") and reason in failed


@pytest.mark.slow
def test_two_models_with_an_optimizer_each_are_both_sharded(sharded):
    one, two = (
        sharded(2, SCRIPT, before=before, between=between)
        for before, between in (
            ("", ""),
            (
                "other = Net().cuda(); second = torch.optim.AdamW(other.parameters())",
                "other(loss.new_ones(8, 64)).sum().backward(); second.step()",
            ),
        )
    )
    assert not two.failed and two.parts["optimizer state"] == 2 * one.parts["optimizer state"]


AVERAGE = "average = copy.deepcopy(model).requires_grad_(False)"
UPDATE = (
    "torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in "
    "model.parameters()], 0.1)"
)


@pytest.mark.slow
def test_copies_of_the_model_are_sharded_as_it_is_whenever_they_are_made(sharded):
    """Check averages of the model, made by the script's own lines and by PyTorch's class."""
    plain = sharded(4, SCRIPT)
    shards = plain.parts["optimizer state"] / 2
    before = sharded(4, SCRIPT, before=f"import copy; {AVERAGE}", between=UPDATE)
    after = sharded(
        4, SCRIPT, between=f"import copy\n    {AVERAGE} if number == 0 else average\n    {UPDATE}"
    )
    averaged = (
        "average = globals().get('average') or "
        "torch.optim.swa_utils.AveragedModel(model); average.update_parameters(model)"
    )
    torchs = sharded(4, SCRIPT, between=averaged)
    for outcome in (before, after, torchs):
        assert outcome.failed == ""
        assert outcome.allocated == pytest.approx(plain.allocated + shards, rel=0.01)


@pytest.mark.slow
def test_without_an_optimizer_there_is_nothing_to_shard(sharded):
    outcome = sharded(
        2,
        "import torch\ntorch.nn.Linear(8, 8).cuda()(torch.ones(8, 8, "
        "device='cuda')).sum().backward()",
    )
    assert (outcome.failed, outcome.changed) == ("", False)
