"""Training loops give the CPU's losses on virtual GPUs, from the same data and weights."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("without_tf32")
Losses = list[float]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)  # not the current device


@pytest.fixture(scope="module", autouse=True)
def machine(shared_machine):
    return shared_machine


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(6))


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    steps: int = 5,
) -> Losses:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def classify(
    model: nn.Module,
    x: torch.Tensor,
    k: torch.Tensor,
    device: torch.device,
    optimizer: type = torch.optim.SGD,
) -> Losses:
    """Return the losses of a usual training loop with cross entropy."""
    model.to(device)
    x, k = x.to(device), k.to(device)
    return fit(model, optimizer(model.parameters(), lr=0.01), lambda: F.cross_entropy(model(x), k))


def mlp(device: torch.device) -> Losses:
    return classify(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3)),
        drawn(8, 6),
        classes(3, 8),
        device,
    )


def convolutions(device: torch.device) -> Losses:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    )
    return classify(
        nn.Sequential(body, nn.Flatten(), nn.Linear(8 * 16, 4)),
        drawn(4, 3, 8, 8),
        classes(4, 4),
        device,
        torch.optim.Adam,
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body = kind(5, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def lstm(device: torch.device) -> Losses:
    return classify(Recurrent(nn.LSTM), drawn(4, 6, 5), classes(3, 4), device, torch.optim.RMSprop)


def gru(device: torch.device) -> Losses:
    return classify(Recurrent(nn.GRU), drawn(4, 6, 5), classes(3, 4), device)


class Packed(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 5, 3, 2]), batch_first=True)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True)
        return self.head(padded.sum(1) / lengths.to(x.device)[:, None])


def packed_lstm(device: torch.device) -> Losses:
    return classify(Packed(nn.LSTM), drawn(4, 6, 5), classes(3, 4), device)


def transformer(device: torch.device) -> Losses:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(16 * 5, 3))
    return classify(model, drawn(4, 5, 16), classes(3, 4), device, torch.optim.AdamW)


def sparse_embedding(device: torch.device) -> Losses:
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten()).to(device)
    head = nn.Linear(24, 3).to(device)
    words, k = classes(20, 5, 4).to(device), classes(3, 5).to(device)
    sparse = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    found = fit(model, sparse, lambda: F.cross_entropy(head(model(words)), k))
    assert model[0].weight.grad.is_sparse
    return found


def two_optimizers(device: torch.device) -> Losses:
    generator, critic = (
        nn.Linear(4, 6).to(device),
        nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(device),
    )
    first = torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.9))
    noise, real = drawn(8, 4).to(device), drawn(8, 6, seed=9).to(device)
    found = []
    for _ in range(4):
        fake = generator(noise)
        wrong = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        second.zero_grad(set_to_none=False)
        wrong.backward()
        second.step()
        fooled = F.softplus(-critic(fake)).mean()
        first.zero_grad()
        fooled.backward()
        first.step()
        found += [wrong.item(), fooled.item()]
    return found


def accumulation(device: torch.device) -> Losses:
    model = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    )
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        for part, k in zip(drawn(8, 6).chunk(4), classes(3, 8).chunk(4), strict=True):
            loss = F.cross_entropy(model(part.to(device)), k.to(device)) / 4
            loss.backward()
            found.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return found


def checkpointed(device: torch.device) -> Losses:
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).to(device)
    x, k = drawn(8, 6).to(device).requires_grad_(), classes(3, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        middle = checkpoint(model[:2], x, use_reentrant=True)
        return F.cross_entropy(checkpoint(model[2:], middle, use_reentrant=False), k)

    return fit(model, optimizer, loss)


def scaled(device: torch.device) -> Losses:
    model = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # the first steps overflow and are skipped
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=2)
    x, k = drawn(8, 6).to(device), classes(3, 8).to(device)
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = 8 * F.cross_entropy(model(x), k)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found += [loss.item(), scaler.get_scale()]
    return found


def second_order(device: torch.device) -> Losses:
    model = nn.Linear(6, 1).to(device)
    x, y = drawn(8, 6).to(device), drawn(8, 1, seed=3).to(device)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(3)]


def parametrized(device: torch.device) -> Losses:
    plain, tied = (
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)),
    )
    return classify(nn.Sequential(plain, nn.ReLU(), tied), drawn(8, 6), classes(3, 8), device)


def averaged(device: torch.device) -> Losses:
    """Return the losses with a moving average of the weights in a copy of the model."""
    model = nn.Linear(6, 3).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    x, k = drawn(8, 6).to(device), classes(3, 8).to(device)
    found = []
    for _ in range(4):
        found += fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            lambda: F.cross_entropy(model(x), k),
            1,
        )
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        found.append(F.cross_entropy(average(x), k).item())
    return found


def gradient_penalty(device: torch.device) -> Losses:
    """Return the losses with a penalty on a gradient, which needs second derivatives."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)).to(device)
    x = drawn(8, 6).to(device).requires_grad_()

    def loss() -> torch.Tensor:
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean() + out * 0.01

    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone().mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


def own_function(device: torch.device) -> Losses:
    model = nn.Linear(6, 3).to(device)
    x, k = drawn(8, 6).to(device), classes(3, 8).to(device)
    return fit(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.1),
        lambda: F.cross_entropy(Doubled.apply(model(x)), k),
    )


def scheduled(device: torch.device) -> Losses:
    model = nn.Linear(6, 3).to(device)
    x, k = drawn(8, 6).to(device), classes(3, 8).to(device)
    optimizer = torch.optim.Adam(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}], lr=0.1, amsgrad=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    found = []
    for _ in range(6):
        found += fit(model, optimizer, lambda: F.cross_entropy(model(x), k), 1)
        scheduler.step()
    return found


LOOPS = [
    mlp, convolutions, lstm, gru, packed_lstm, transformer, sparse_embedding, two_optimizers,
    accumulation, checkpointed, scaled, second_order, parametrized, averaged, gradient_penalty,
    own_function, scheduled,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_losses_are_those_of_the_cpu(loop):
    torch.manual_seed(1)
    expected = loop(CPU)
    torch.manual_seed(1)
    got = loop(GPU)
    assert len(set(expected)) > 1
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "Rprop",
    ],
)
@pytest.mark.parametrize("foreach", [False, True, None])
def test_optimizers(name, foreach):
    def losses(device: torch.device) -> Losses:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        x, k = drawn(8, 6).to(device), classes(3, 8).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, foreach=foreach)
        return fit(model, optimizer, lambda: F.cross_entropy(model(x), k), 3)

    assert_close(losses(GPU), losses(CPU), rtol=1e-4, atol=1e-5)


# Several devices


def stages() -> list[nn.Module]:
    torch.manual_seed(4)
    return [
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Linear(8, 3),
    ]


@pytest.mark.parametrize(
    "devices",
    [("cpu", "cuda:0", "cuda:1"), ("cuda:0", "cuda:1", "cpu"), ("cuda:1", "cuda:0", "cuda:1")],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_model_parallel(devices, optimizer):
    def losses(places: tuple[str, ...]) -> Losses:
        parts = nn.ModuleList(
            stage.to(place) for stage, place in zip(stages(), places, strict=True)
        )

        def loss() -> torch.Tensor:
            x = drawn(8, 6).to(places[0])
            for stage, (here, there) in zip(parts, pairwise((*places, places[-1])), strict=True):
                x = stage(x.to(here)).to(there)
            return F.cross_entropy(x, classes(3, 8).to(places[-1]))

        return fit(parts, optimizer(parts.parameters(), lr=0.1), loss)

    assert_close(losses(devices), losses(("cpu",) * 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["cpu", "cuda:0"], ids=["batch on the CPU", "batch on the GPU"])
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_data_parallel(place, rows):
    def losses(device: torch.device, wrap: Callable[[nn.Module], nn.Module]) -> Losses:
        model = wrap(nn.Sequential(*stages()).to(device))
        x, k = (
            drawn(rows, 6).to(device if device.type == "cpu" else place),
            classes(3, rows).to(device),
        )
        return fit(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: F.cross_entropy(model(x), k)
        )

    got = losses(torch.device("cuda:0"), nn.DataParallel)
    assert_close(got, losses(CPU, lambda model: model), rtol=1e-4, atol=1e-5)


MIXED_GRAPHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index": lambda a: a[[0, 1, 1]],
    "max": lambda a: a.max(0).values,
    "cummax": lambda a: a.cummax(0).values,
    "trace": lambda a: a[:3].trace(),
    "split": lambda a: a.split(2)[1],
    "sort": lambda a: a.sort(0).values,
    "select": lambda a: a[1],
    "norm": lambda a: a.norm(dim=0),
    "prod": lambda a: a.prod(0),
    "layer_norm": lambda a: F.layer_norm(a, (3,)),
    "repeat": lambda a: a.repeat(2, 2),
}


@pytest.mark.parametrize(
    ("here", "there"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda:1", "cuda:0")]
)
@pytest.mark.parametrize("name", MIXED_GRAPHS)
def test_one_backward_over_two_devices(name, here, there):
    """Check that each gradient is on its leaf's device if nodes of both devices alternate."""
    function = MIXED_GRAPHS[name]
    a = drawn(5, 3).to(here).requires_grad_()
    b = drawn(3).to(there).requires_grad_()
    part, other = function(a), b * 2
    (part.to(there).sum() + other.exp().sum()).backward()

    expected = drawn(5, 3).requires_grad_()
    function(expected).sum().backward()
    assert (a.grad.device, b.grad.device) == (a.device, b.device)
    assert_close(a.grad.cpu(), expected.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    parts = [torch.ones(3, 4), torch.ones(2, 4)]
    moved = [part.cuda() for part in parts]
    assert torch.nested.nested_tensor(parts, layout=layout).is_nested
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        with pytest.raises(
            NotImplementedError,
            match=r"torch.nested.\w+ of CUDA tensors is not supported by the virtual GPU",
        ):
            make(parts, device="cuda", layout=layout)
        with pytest.raises(
            NotImplementedError,
            match=r"torch.nested.\w+ of CUDA tensors is not supported by the virtual GPU",
        ):
            make(moved, layout=layout)
    with pytest.raises(
        NotImplementedError,
        match="a nested tensor between devices is not supported by the virtual GPU",
    ):
        torch.nested.nested_tensor(parts, layout=layout).cuda()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_leaves_out_what_is_masked():
    """Check this in evaluation, where the encoder uses nested tensors."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        got = encoder.cuda()(x.cuda(), src_key_padding_mask=padding.cuda())
    assert got.is_cuda
    torch.testing.assert_close(got.cpu(), expected)
