"""The networks: sizes that are refused, parameters as published, and a step that trains."""

import pytest
import torch
from torch.nn import functional as F

import labkit
from gpulessons.networks import GPT, MLP, OPTIMIZERS, ResNet


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MLP(width=0), "from 1 to 1048576 for width of MLP, got 0"),
        (lambda: MLP(depth=True), "for depth of MLP, got True"),
        (lambda: GPT(width=100, heads=3), "a multiple of 8 · heads = 24, got 100"),
        (lambda: ResNet(side=1.5), "for side of ResNet, got 1.5"),
    ],
)
def test_sizes_that_make_no_network_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        (MLP(10, 3, 4), 3 * (10 * 10 + 10) + 10 * 4 + 4),
        (ResNet(), 11_689_512),  # ResNet-18, as torchvision counts it
        # GPT-2 shares the weights of its first and its last layer. GPT() does not.
        (GPT(), 124_439_808 + 50257 * 768),
    ],
)
def test_parameters_are_counted(network, parameters):
    model = network.build(device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "network",
    [MLP(16, 4, 3), GPT(16, 2, 2, 8, 11), ResNet(8, 1, 32, 5)],
    ids=lambda network: type(network).__name__,
)
@pytest.mark.parametrize("optimizer", ["SGD momentum", "RMSprop", "Adam fused"])
def test_a_step_trains_and_checkpointing_changes_no_gradient(network, optimizer):
    with labkit.use(gpus=1, virtual=True, quiet=True):
        torch.manual_seed(0)
        plain, frugal = network.build(), network.build(checkpointing=True)
        frugal.load_state_dict(plain.state_dict())
        inputs, targets = network.batch(4)
        for model in (plain, frugal):
            F.cross_entropy(model(inputs), targets).backward()
        for one, other in zip(plain.parameters(), frugal.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        before = [parameter.clone() for parameter in plain.parameters()]
        OPTIMIZERS[optimizer](plain.parameters()).step()
        assert any(
            not torch.equal(old, new) for old, new in zip(before, plain.parameters(), strict=True)
        )
