"""The formula of a training step's memory, against what virtual GPUs and real ones measure."""

import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import product

import pytest
from training_memory import TEN_SETTINGS

import labkit
from labkit.lab_parts.budget import STATE, Chip, Setting, budget, gpu_of
from labkit.lab_parts.layers import block_bytes, layers
from labkit.lab_parts.measured_memory import describe, measured_peak
from labkit.lab_parts.networks import GPT, MLP, OPTIMIZERS, ResNet

NEAR = 0.05
CHIP = Chip(8, 108, 2048)
OTHERS = [  # none of these sizes is among the ten
    Setting(MLP(1000, 1, 10), 30000, "autocast float16", "SGD", checkpointing=True),
    Setting(MLP(512, 20, 5000), 777, optimizer="SGD momentum", gpus=2, spread="DataParallel"),
    Setting(MLP(1024, 5, 5000), 777, optimizer="Adam fused", gpus=4, spread="DataParallel", micro_batches=2),
    Setting(MLP(64, 3), 32, optimizer="RMSprop"),
    Setting(GPT(256, 8, 2, 1024, 1000), 16, "autocast float16", "Adam fused", checkpointing=True),
    Setting(GPT(768, 12, 12, 1024, 50257), 3, "autocast float16", "AdamW"),
    Setting(GPT(320, 3, 5, 100, 100), 7, optimizer="RMSprop", micro_batches=3),
    Setting(ResNet(16, 1, 64, 10), 256, optimizer="SGD"),
    Setting(ResNet(96, 3, 100, 1000), 16, "autocast float16", "SGD momentum", True, 4, "DataParallel", 2),
    Setting(ResNet(32, 2, 129, 10), 30, "autocast float16", "Adam", micro_batches=4),
]


def error(setting: Setting) -> float:
    predicted = budget(setting, gpu_of().chip)
    return predicted.peak / measured_peak(setting, predicted) - 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(("like", "setting"), [*product(("T4", "H200"), TEN_SETTINGS), *product(("A100",), OTHERS)], ids=str)
def test_the_formula_is_within_five_percent_on_virtual_gpus(like, setting):
    with labkit.use(gpus=4, like=like, virtual=True, quiet=True):
        assert abs(error(setting)) < NEAR


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("setting", TEN_SETTINGS, ids=describe)
def test_the_formula_is_within_five_percent_on_real_gpus(setting):
    with labkit.use(gpus=2, virtual=False, quiet=True):
        assert abs(error(setting)) < NEAR


FRESH = """
import torch
from torch import nn
layer = nn.Linear(64, 64, device="cuda")
layer(torch.zeros(8, 64, device="cuda", requires_grad=True)).sum().backward()
del layer
print(torch.cuda.memory_allocated())
"""


@pytest.mark.slow
def test_workspaces_are_those_of_a_fresh_process():
    with labkit.use(gpus=1, like="H200", virtual=True, quiet=True):
        exec(FRESH.replace("print(", "found = ("), names := {})
        assert budget(TEN_SETTINGS[0], gpu_of().chip).terms["workspace"] == names["found"]


@pytest.mark.gpu
def test_workspaces_are_those_of_a_fresh_process_on_a_real_gpu():
    found = subprocess.run([sys.executable, "-c", FRESH], check=True, capture_output=True, text=True, timeout=120)
    with labkit.use(gpus=1, virtual=False, quiet=True):
        assert budget(TEN_SETTINGS[0], gpu_of().chip).terms["workspace"] == int(found.stdout)


RANK = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn import functional as F
from labkit.lab_parts.networks import OPTIMIZERS
from tests_setting import setting

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = setting.network.build()
run = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
x, y = setting.network.batch(setting.batch // setting.gpus)
peaks = []
for _ in range(6):
    torch.cuda.synchronize()
    time.sleep(0.3)  # NCCL's watchdog lets go of buckets that are through, when it next looks
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    F.cross_entropy(run(x), y).backward()
    optimizer.step()
    peaks.append(torch.cuda.max_memory_allocated())
if rank == 0:
    print("peak", min(peaks[2:]))  # it varies with when the watchdog looks
dist.destroy_process_group()
"""


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("network", [MLP(), GPT(512, 6, 8, 512, 8192), ResNet()], ids=lambda network: type(network).__name__)
def test_ddp_leaves_what_the_formula_says_on_real_gpus(network, tmp_path):
    setting = Setting(network, 32, gpus=2)
    told = f"from labkit.lab_parts.networks import *\nfrom labkit.lab_parts.budget import Setting\nsetting = {setting!r}\n"
    (tmp_path / "tests_setting.py").write_text(told)
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    measured = int(found.stdout.split("peak")[1].split()[0])
    with labkit.use(gpus=2, virtual=False, quiet=True):
        assert abs(budget(setting, gpu_of().chip).peak / measured - 1) < NEAR


@pytest.mark.parametrize(
    "network", [MLP(100, 5, 7), GPT(64, 3, 2, 16, 99), ResNet(16, 2, 64, 10)], ids=lambda network: type(network).__name__
)
def test_weights_and_buffers_are_those_of_the_network(network):
    from labkit.lab_parts.layers import Mode

    found = layers(network, 4, Mode("", 108, 2048))
    model = network.build(device="meta")
    assert sum(sum(layer.weights) for layer in found) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(sum(layer.buffers) for layer in found) == sum(buffer.numel() for buffer in model.buffers())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_keeps_what_the_table_says(optimizer):
    with labkit.use(gpus=1, virtual=True, quiet=True):
        model = MLP(256, 2).build()
        chosen = OPTIMIZERS[optimizer](model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        chosen.step()
        kept = [value for slot in chosen.state.values() for name, value in slot.items() if name != "step" and value is not None]
        assert sum(tensor.nbytes for tensor in kept) == STATE[optimizer] * sum(parameter.nbytes for parameter in model.parameters())


def test_the_terms_follow_the_setting():
    plain = Setting(GPT(), 8)
    found = budget(plain, CHIP).terms
    parameters = found["parameters"]
    assert parameters == pytest.approx(4 * 163_037_184, rel=1e-3)
    assert found["optimizer state"] == 2 * parameters
    assert budget(replace(plain, optimizer="SGD"), CHIP).terms["optimizer state"] == 0
    half = budget(replace(plain, micro_batches=2), CHIP).terms
    assert half["activations"] == pytest.approx(found["activations"] / 2) and half["gradients"] == parameters
    assert budget(replace(plain, checkpointing=True), CHIP).terms["activations"] < found["activations"] / 2
    shared = budget(replace(plain, gpus=4), CHIP)
    assert shared.terms["buckets"] == parameters and shared.terms["activations"] == pytest.approx(found["activations"] / 4)
    fullest = budget(replace(plain, batch=1, network=MLP(4096, 4)), CHIP)
    assert fullest.moment == "the optimizer's step" and fullest.terms["in flight"] == fullest.terms["gradients"]


def test_blocks_are_multiples_of_512_bytes():
    assert block_bytes((1, 128, 129)) == 512 + 512 + 1024


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "float8"}, "precision='float8': choose one of 'float32', 'autocast bfloat16', 'autocast float16'"),
        ({"optimizer": "Lion"}, "optimizer='Lion': choose one of 'SGD'"),
        ({"batch": 0}, "batch=0: give a whole number from 1"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"gpus": 17}, "gpus=17: give a whole number from 1 to 16"),
        ({"gpus": 4, "micro_batches": 4}, "batch=8: 4 GPU\\(s\\) and 4 micro-batch\\(es\\) need a row each"),
        ({"spread": "FSDP"}, "spread='FSDP': choose one of 'DataParallel', 'DDP'"),
    ],
)
def test_a_setting_that_is_none_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(Setting(MLP(), 8), **change)


def test_attention_in_bfloat16_needs_a_newer_gpu():
    with pytest.raises(ValueError, match="from Ampere on, and this GPU is older: choose autocast float16"):
        budget(Setting(GPT(), 8, "autocast bfloat16"), Chip(7, 40, 1024))
    assert budget(Setting(MLP(), 8, "autocast bfloat16"), Chip(7, 40, 1024)).peak > 0
