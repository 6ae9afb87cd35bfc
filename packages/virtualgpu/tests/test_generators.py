"""Random numbers of a virtual GPU come from its own generator, never from the CPU's."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from virtualgpu import hardware


@pytest.fixture(autouse=True)
def used(machine):
    torch.manual_seed(0)
    return machine


def flat() -> torch.Tensor:
    return torch.ones(4, device="cuda")


DRAWS = {
    "rand": lambda: torch.rand(3, device="cuda"),
    "randn": lambda: torch.randn(3, device="cuda"),
    "normal_": lambda: flat().normal_(),
    "randint": lambda: torch.randint(9, (3,), device="cuda"),
    "randperm": lambda: torch.randperm(9, device="cuda"),
    "rand_like": lambda: torch.rand_like(flat()),
    "randn_like": lambda: torch.randn_like(flat()),
    "uniform_": lambda: flat().uniform_(),
    "randint_like": lambda: torch.randint_like(flat(), 9),
    "bernoulli": lambda: torch.bernoulli(flat() / 2),
    "multinomial": lambda: flat().multinomial(2),
    "poisson": lambda: torch.poisson(flat() * 9),
    "exponential_": lambda: flat().exponential_(),
    "binomial": lambda: torch.binomial(flat() * 9, flat() / 2),
    "gamma": lambda: torch._standard_gamma(flat()),
    "normal": lambda: torch.normal(flat(), 1.0),
    "cauchy_": lambda: flat().cauchy_(),
    "random_": lambda: flat().random_(),
    "dropout": lambda: F.dropout(flat()),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 9, 2, 2, device="cuda")),
    "alpha_dropout": lambda: F.alpha_dropout(flat(), training=True),
    "rrelu": lambda: F.rrelu(-flat(), training=True),
    "attention": lambda: F.scaled_dot_product_attention(
        *[torch.rand(1, 1, 4, 4, device="cuda")] * 3, dropout_p=0.5
    ),
    "lstm": lambda: nn.LSTM(2, 2, 2, dropout=0.5, device="cuda")(
        torch.ones(2, 2, 2, device="cuda")
    )[0],
    "linear": lambda: nn.Linear(3, 3, device="cuda").weight,
    "gumbel_softmax": lambda: F.gumbel_softmax(flat()),
    "distribution": lambda: torch.distributions.Dirichlet(flat()).sample(),
    "init": lambda: nn.init.trunc_normal_(flat()),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(
        torch.rand(1, 1, 8, 8, device="cuda"), 2, output_size=3
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_with_the_seed_and_leave_the_cpu_alone(name):
    before, elsewhere = torch.get_rng_state(), torch.cuda.get_rng_state(1)
    first, second = DRAWS[name](), DRAWS[name]()
    assert first.is_cuda
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.cuda.get_rng_state(1), elsewhere)
    torch.cuda.manual_seed(0)
    assert torch.equal(DRAWS[name](), first)
    assert torch.equal(DRAWS[name](), second)


def test_seeds():
    torch.manual_seed(3)
    one, two = torch.rand(3, device="cuda:0"), torch.rand(3, device="cuda:1")
    assert torch.cuda.initial_seed() == 3
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(3, device="cuda:1"), two)
    assert torch.equal(torch.rand(3, device="cuda:0"), one)
    with torch.cuda.device(1):
        torch.cuda.manual_seed(4)
    assert not torch.equal(torch.rand(3, device="cuda:1"), two)
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() != 3


def test_states():
    states = torch.cuda.get_rng_state_all()
    assert len(states) == 4 and states[0].dtype == torch.uint8 and states[0].device.type == "cpu"
    drawn = torch.rand(3, device="cuda:2")
    torch.cuda.set_rng_state(states[2], 2)
    assert torch.equal(torch.rand(3, device="cuda:2"), drawn)
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="cuda:2"), drawn)
    with torch.random.fork_rng(devices=range(4)):
        torch.rand(3, device="cuda:2")
        torch.rand(3)
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="cuda:2"), drawn)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.rand(3, generator=g, device="cuda"),
        lambda g: torch.randint(9, (3,), generator=g, device="cuda"),
        lambda g: torch.randperm(9, generator=g, device="cuda"),
        lambda g: torch.ones(9, device="cuda").normal_(generator=g),
        lambda g: torch.ones(9, device="cuda").multinomial(3, generator=g),
        lambda g: torch.bernoulli(torch.full((9,), 0.5, device="cuda"), generator=g),
    ],
)
def test_a_generator_of_ones_own(draw):
    own = torch.Generator(device="cuda").manual_seed(5)
    default = torch.cuda.get_rng_state()
    first, second = draw(own), draw(own)
    assert torch.equal(torch.cuda.get_rng_state(), default)
    assert torch.equal(draw(own.manual_seed(5)), first)
    assert torch.equal(draw(own), second)


def test_generators_know_their_device():
    own = torch.Generator(device="cuda:1")
    assert own.device == torch.device("cuda:1") and isinstance(own, torch.Generator)
    assert torch.cuda.default_generators[2].device == torch.device("cuda:2")
    assert own.manual_seed(7).initial_seed() == 7
    twin = torch.Generator("cuda:1")
    twin.set_state(own.get_state())
    assert torch.equal(
        torch.rand(3, generator=own, device="cuda:1"),
        torch.rand(3, generator=twin, device="cuda:1"),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda generator: pickle.loads(pickle.dumps(generator))]
)
def test_a_copy_draws_on_the_same_device_what_its_model_draws(device, copied):
    own = torch.Generator(device).manual_seed(7)
    torch.rand(3, generator=own, device=device)
    twin = copied(own)
    assert (twin.device, twin.initial_seed()) == (own.device, 7)
    assert torch.equal(
        torch.rand(3, generator=own, device=device), torch.rand(3, generator=twin, device=device)
    )


def test_one_of_the_cpu_is_made_where_no_virtual_gpu_is_in_use(monkeypatch):
    monkeypatch.setattr(hardware, "_in_place", None)
    assert (
        torch.Generator().device.type == torch.Generator(torch.device("cpu")).device.type == "cpu"
    )


def test_a_generator_of_the_wrong_kind_is_refused():
    with pytest.raises(
        RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"
    ):
        torch.rand(3, generator=torch.Generator(), device="cuda")
    with pytest.raises(
        RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"
    ):
        torch.rand(3, generator=torch.Generator("cuda"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_draws_the_same_mask_again(reentrant):
    x = torch.ones(200, device="cuda:1", requires_grad=True)
    masks = []

    def part(x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones_like(x))
        masks.append(mask.tolist())
        return (x * mask).square().sum()

    checkpoint(part, x, use_reentrant=reentrant).backward()
    assert masks[0] == masks[-1] and len(masks) == 2
    assert x.grad.tolist() == [2 * m * m for m in masks[0]]


def test_threads_that_draw_on_a_gpu_leave_the_cpus_draws_alone():
    expected = torch.cat([torch.rand(10) for _ in range(300)])
    torch.manual_seed(0)
    done = threading.Event()

    def draw() -> None:
        x = torch.ones(2000, device="cuda")
        while not done.is_set():
            F.dropout(torch.rand_like(x))

    thread = threading.Thread(target=draw)
    thread.start()
    got = torch.cat([torch.rand(10) for _ in range(300)])
    done.set()
    thread.join()
    assert torch.equal(got, expected)


def test_the_state_is_a_seed_and_an_offset():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert state.tolist() == [7] + [0] * 15
    torch.rand(3, device="cuda")
    assert torch.cuda.get_rng_state().tolist() == [7] + [0] * 7 + [4] + [0] * 7
    drawn = torch.rand(3, device="cuda")
    torch.rand(132 * 2048 * 4 + 1, device="cuda")  # one more than the GPU's threads draw at once
    generator = torch.cuda.default_generators[0]
    assert generator.get_offset() == 16
    generator.set_offset(4)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    torch.cuda.set_rng_state(state[:8])
    assert torch.cuda.get_rng_state().equal(state)


def test_a_state_draws_the_same_in_any_generator():
    own = torch.Generator("cuda:1").manual_seed(3)
    torch.rand(3, generator=own, device="cuda:1")
    twin = own.clone_state()
    drawn = torch.rand(3, generator=own, device="cuda:1")
    torch.cuda.set_rng_state(twin.get_state(), "cuda:2")
    assert torch.equal(torch.rand(3, device="cuda:2").cpu(), drawn.cpu())
    assert torch.equal(torch.rand(3, generator=twin, device="cuda:1"), drawn)


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            lambda: torch.cuda.set_rng_state(torch.get_rng_state()),
            RuntimeError,
            "RNG state is wrong size",
        ),
        (
            lambda: torch.cuda.set_rng_state(torch.zeros(16)),
            TypeError,
            "RNG state must be a torch.ByteTensor",
        ),
        (
            lambda: torch.Generator("cuda").set_state(3),
            TypeError,
            "expected a torch.ByteTensor, but got int",
        ),
        (
            lambda: torch.Generator("cuda").set_offset(3),
            RuntimeError,
            "offset must be a multiple of 4",
        ),
    ],
)
def test_what_is_no_state_is_refused(mistake, error, text):
    with pytest.raises(error, match=text):
        mistake()
