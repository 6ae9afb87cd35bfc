"""Every function that makes tensors makes them on a virtual GPU, however the device is named."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from virtualgpu import hardware


@pytest.fixture(autouse=True)
def used(machine):
    return machine


MAKERS = {
    "zeros": lambda d: torch.zeros(2, device=d),
    "ones": lambda d: torch.ones(2, device=d),
    "empty": lambda d: torch.empty(2, device=d),
    "full": lambda d: torch.full((2,), 3, device=d),
    "arange": lambda d: torch.arange(3, device=d),
    "eye": lambda d: torch.eye(2, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 4, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 4, device=d),
    "range of floats": lambda d: torch.arange(0, 1, 0.25, device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "randn": lambda d: torch.randn(2, device=d),
    "randint": lambda d: torch.randint(5, (2,), device=d),
    "randperm": lambda d: torch.randperm(5, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (2,), device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 2), (1, 2), device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3, device=d),
    "tensor": lambda d: torch.tensor([1, 2], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "as_tensor of numpy": lambda d: torch.as_tensor(np.ones(2), device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "new_zeros": lambda d: torch.ones(2).new_zeros(2, device=d),
    "new_tensor": lambda d: torch.ones(2).new_tensor([1], device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 3, device=d),
    "sparse_coo_tensor": lambda d: torch.sparse_coo_tensor(
        [[0], [0]], [1.0], (2, 2), device=d, check_invariants=True
    ),
    "Linear": lambda d: nn.Linear(2, 2, device=d).weight,
    "LSTM": lambda d: nn.LSTM(2, 2, device=d).weight_ih_l0,
    "skip_init": lambda d: nn.utils.skip_init(nn.Linear, 2, 2, device=d).weight,
}


@pytest.mark.parametrize(
    "device", ["cuda:1", torch.device("cuda", 1), 1], ids=["text", "device", "number"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_the_device_may_be_named_in_every_way(name, device):
    if isinstance(device, int) and name == "skip_init":
        device = torch.device(device)
    made = MAKERS[name](device)
    assert made.device == torch.device("cuda:1")
    like = MAKERS[name]("cpu")
    assert (made.shape, made.dtype, made.stride() if made.layout is torch.strided else 0) == (
        like.shape, like.dtype, like.stride() if like.layout is torch.strided else 0,
    )  # fmt: skip


RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "empty",
    "empty_strided",
    "empty_permuted",
    "Linear",
    "LSTM",
    "skip_init",
}


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - RANDOM))
def test_values_are_those_of_the_cpu(name):
    assert torch.equal(MAKERS[name]("cuda").cpu().to_dense(), MAKERS[name]("cpu").to_dense())


@pytest.mark.parametrize("choose", ["with a device", "set_default_device", "with a number"])
def test_default_device(choose):
    if choose == "set_default_device":
        torch.set_default_device("cuda:2")
    try:
        with (
            torch.device("cpu")
            if choose == "set_default_device"
            else torch.device(2 if "number" in choose else "cuda:2") as chosen
        ):
            inside = [
                torch.zeros(2),
                torch.tensor([1.0]),
                nn.Linear(2, 2).weight,
                torch.as_tensor([1]),
                torch.randn(2),
                torch.arange(3),
            ]
            assert {x.device for x in inside} == {chosen}
            if choose != "set_default_device":
                with torch.device("cpu"):
                    assert torch.tensor([1.0]).device == torch.ones(1).device == torch.device("cpu")
        if choose == "set_default_device":
            assert torch.tensor([1]).device == torch.ones(1).device == torch.device("cuda:2")
    finally:
        torch.set_default_device(None)
    assert torch.tensor([1.0]).device == torch.ones(1).device == torch.device("cpu")


def test_the_current_device_is_meant_by_cuda():
    with torch.cuda.device(3):
        assert (
            torch.ones(1, device="cuda").device
            == torch.tensor([1], device="cuda").device
            == torch.device("cuda:3")
        )
        assert torch.ones(1, device="cuda:1").device == torch.device("cuda:1")
    assert torch.ones(1, device="cuda").device == torch.device("cuda:0")


def test_torch_device_in_all_its_forms():
    assert (
        torch.device(1)
        == torch.device("cuda:1")
        == torch.device("cuda", 1)
        == torch.device(type="cuda", index=1)
    )
    assert repr(torch.device(1)) == "device(type='cuda', index=1)"
    assert isinstance(torch.device(1), torch.device) and isinstance(
        torch.ones(1).device, torch.device
    )
    assert torch.device("cuda").index is None and torch.device("cuda") != torch.device("cuda:0")
    assert {torch.device("cuda:1"): "found"}[torch.device(1)] == "found"
    with pytest.raises(RuntimeError, match="Invalid device string"):
        torch.device("cuda:one")


def test_new_tensors_stay_with_their_model():
    x = torch.ones(2, device="cuda:1", dtype=torch.half)
    for made in (
        x.new_tensor([1]), x.new_zeros(2), x.new_empty((2,)), x.new_full((1,), 2), x.new_ones(2),
        torch.zeros_like(x), x.new([1.0]), x.new(3),
    ):  # fmt: skip
        assert (made.device, made.dtype) == (x.device, x.dtype)
    assert x.new_zeros(2, device="cpu").device.type == "cpu"
    assert x.new_zeros(2, device="cuda:2").device == torch.device("cuda:2")
    assert torch.rand_like(x, device="cpu").device.type == "cpu"
    assert x.new_tensor(torch.ones(1)).device == x.device


def test_tensor_of_a_tensor_copies_it_where_it_is():
    with pytest.warns(UserWarning, match="To copy construct from a tensor"):
        assert torch.tensor(torch.ones(2, device="cuda:1")).device == torch.device("cuda:1")
    x = torch.ones(2, device="cuda:1")
    assert torch.as_tensor(x) is x
    assert torch.as_tensor(x, device="cuda:2").device == torch.device("cuda:2")
    assert torch.tensor([x[0], x[1]]).device.type == "cpu"


def test_leaves_may_require_gradients():
    for made in (
        torch.ones(2, device="cuda", requires_grad=True),
        torch.tensor([1.0], device="cuda", requires_grad=True),
    ):
        assert made.is_leaf and made.requires_grad
        made.sum().backward()
        assert made.grad.device == made.device


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cuda:3"),
        lambda x: x.to_sparse().cpu().to_dense(),
        lambda x: x.to_sparse().to("cuda:3").to_dense(),
        lambda x: x @ x.softmax(-1) + x.mean(),
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], is_causal=True
        )[0, 0],
        lambda x: x.type("torch.DoubleTensor"),
        lambda x: copy.deepcopy(x),
        lambda x: nn.functional.embedding_bag(
            torch.tensor([[0, 1]], device=x.device), x, mode="mean"
        ),
    ],
)
def test_a_default_device_changes_nothing_for_tensors_that_are_elsewhere(work):
    x = torch.arange(4.0, device="cuda:1").view(2, 2)
    expected = work(x)
    with torch.device("cuda:2"):
        got, listed = work(x), work(x).tolist()
    assert (got.device, got.dtype, listed) == (expected.device, expected.dtype, expected.tolist())


def test_a_loader_shuffles_on_the_default_device():
    with torch.device("cuda:1"):
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(
            data, batch_size=4, shuffle=True, generator=torch.Generator("cuda:1")
        )
        batches = [batch for (batch,) in loader]
    assert all(batch.device == torch.device("cuda:1") for batch in batches)
    assert sorted(torch.cat(batches).tolist()) == list(range(8))


def test_legacy_constructors():
    assert torch.cuda.FloatTensor([1.0, 2.0]).tolist() == [1, 2]
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert torch.cuda.HalfTensor([1]).dtype == torch.half
    assert isinstance(torch.ones(1, device="cuda"), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    for name in ("torch.cuda.HalfTensor", torch.cuda.HalfTensor):
        made = torch.ones(1).type(name)
        assert (made.type(), made.device) == ("torch.cuda.HalfTensor", torch.device("cuda:0"))
    assert torch.ones(1, device="cuda").type("torch.FloatTensor").device.type == "cpu"
    with pytest.raises(
        RuntimeError,
        match="legacy constructor expects device type: cpu but device type: cuda was passed",
    ):
        torch.Tensor([1.0, 2.0], device="cuda")


def test_factories_on_the_cpu_are_untouched():
    assert type(torch.ones(2)) is torch.Tensor and type(torch.tensor([1])) is torch.Tensor
    assert torch.cuda.memory_allocated() == 0


def test_composites_of_c_keep_to_their_inputs_device():
    """Check that C++ makes intermediate results on the operator's device.

    This is also so if the same line ran for another device before.
    """
    for device in ("cuda:1", "cpu", "cuda:0", "cpu"):
        x = torch.arange(4.0, device=device)
        made = (
            torch.combinations(x), torch.cartesian_prod(x, x), torch.block_diag(x, x),
            torch.trapezoid(x), torch.vander(x), torch.cov(x), nn.functional.one_hot(x.long()),
            nn.functional.pdist(x[:, None]), torch.linalg.matrix_rank(x[:, None]),
            *torch.gradient(x),
        )  # fmt: skip
        assert {str(y.device) for y in made} == {device}
        assert torch.equal(torch.vander(x).cpu(), torch.vander(torch.arange(4.0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda data: torch.tensor(data),
        lambda data: torch.as_tensor(data),
        lambda data: torch.ones(1).new_tensor(data),
    ],
)
def test_numbers_on_the_gpu_in_a_list_are_waited_for(make):
    x = torch.tensor([1.5, 2.5], device="cuda")
    torch.cuda._sleep(10**9)
    start = hardware.machine().clock.host
    made = make([[x[0], 3.0], [x[1], x[0]]])
    assert made.tolist() == [[1.5, 3.0], [2.5, 1.5]] and made.device.type == "cpu"
    assert hardware.machine().clock.host - start > 0.4
    assert torch.tensor([x[0].half()]).dtype is torch.float16


def test_legacy_constructors_of_sparse_tensors():
    indices, values = (
        torch.tensor([[0, 1], [1, 0]], device="cuda"),
        torch.tensor([1.0, 2.0], device="cuda"),
    )
    made = torch.cuda.sparse.FloatTensor(indices, values, torch.Size((2, 3)))
    assert (
        made.to_dense().tolist() == [[0, 1, 0], [2, 0, 0]]
        and made.type() == "torch.cuda.sparse.FloatTensor"
    )
    assert torch.cuda.sparse.DoubleTensor(indices, values.double()).shape == (2, 2)
    assert (
        torch.cuda.sparse.LongTensor(2, 3).dtype == torch.int64
        and torch.cuda.sparse.LongTensor(2, 3)._nnz() == 0
    )
    assert isinstance(made, torch.cuda.sparse.FloatTensor) and not isinstance(
        made, torch.cuda.FloatTensor
    )
    assert not isinstance(values, torch.cuda.sparse.FloatTensor) and not isinstance(
        made.cpu(), torch.cuda.sparse.FloatTensor
    )


def test_legacy_constructors_take_a_device():
    assert (
        torch.cuda.FloatTensor(1, device=1).get_device()
        == torch.cuda.FloatTensor([1, 2], device="cuda:1").get_device()
        == 1
    )
    x = torch.randn(3, device="cuda")
    assert x.new([0, 1], device=1).get_device() == x.new(2, device=1).get_device() == 1
    with torch.cuda.device(1):
        assert (
            x.new([0, 1]).get_device() == 0
            and torch.cuda.FloatTensor(1, device=None).get_device() == 1
        )


def test_data_on_the_meta_device():
    assert torch.tensor([1.0, 2.0], device="meta").is_meta
    with torch.device("meta"):
        assert torch.as_tensor([1.0, 2.0]).is_meta


def row(indices: list, values: torch.Tensor, **options) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        [0, 1, 2], indices, values, (2, 2), check_invariants=True, **options
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_sparse_tensor_lies_where_it_is_asked_for_or_where_its_values_lie():
    values, indices = torch.ones(2, requires_grad=True), torch.tensor([[0, 1], [1, 0]])
    for made in (
        row([0, 1], values, device="cuda:1"),
        row([0, 1], values.to("cuda:1")),
        torch.sparse_coo_tensor(indices, values, (2, 2), device="cuda:1", check_invariants=True),
        torch.sparse_coo_tensor(
            indices.to("cuda:1"), values=values.to("cuda:1"), size=(2, 2), check_invariants=True
        ),
    ):
        assert made.device == torch.device("cuda:1") == made.cpu().to("cuda:1").device
        values.grad = None
        made.to_dense().sum().backward()
        assert values.grad.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.sparse_coo_tensor(indices, values.to("cuda:1"), (2, 2))
    there, here = values.detach().to("cuda:1"), torch.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match="^Values and crow_indices need to be on the same dev"):
        torch.sparse_csr_tensor(here, here[:2], there, (2, 2))
    with pytest.raises(RuntimeError, match="^Values and row_indices need to be on the same device"):
        torch.sparse_compressed_tensor(
            here.to("cuda:1"), here[:2], there, (2, 2), layout=torch.sparse_csc
        )


@pytest.mark.parametrize("here", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("there", [None, "cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("copies", [None, True])
def test_asarray_shares_a_tensors_memory_where_it_may(here, there, copies):
    x = torch.ones(3, device=here)
    y = torch.asarray(x, device=there, copy=copies)
    assert (y.device, y.tolist()) == (torch.device(there or here), [1, 1, 1])
    x.zero_()
    assert y.tolist() == ([0, 0, 0] if there in (None, here) and not copies else [1, 1, 1])
    assert torch.asarray(x, device=there, dtype=torch.float64).device == y.device


@pytest.mark.parametrize(
    ("here", "there"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")]
)
def test_asarray_cannot_share_memory_with_another_device(here, there):
    with pytest.raises(ValueError, match=f"can't alias tensor from device '{here}' to '{there}'"):
        torch.asarray(torch.ones(3, device=here), device=there, copy=False)


@pytest.mark.parametrize(
    "name", ["zeros", "arange", "eye", "linspace", "logspace", "randn", "randperm"]
)
def test_out_beside_a_device(name):
    out = torch.empty(0, dtype=torch.int64 if name == "randperm" else torch.float32, device="cuda")
    arguments = (0, 1, 5) if name.endswith("space") else (5,)
    assert getattr(torch, name)(*arguments, device="cuda", out=out) is out and out.numel() >= 5
    with pytest.raises(
        RuntimeError, match=r"device type cpu does not match device type of out parameter \(cuda\)"
    ):
        getattr(torch, name)(*arguments, device="cpu", out=out)
    with pytest.raises(
        RuntimeError, match=r"device type cuda does not match device type of out parameter \(cpu\)"
    ):
        getattr(torch, name)(*arguments, device="cuda", out=out.cpu())


class Labelled(torch.Tensor):
    """Subclass of a tensor that the legacy constructor makes."""


def test_the_legacy_constructor_makes_tensors_of_a_subclass(machine):
    for made in (Labelled(2, 3), Labelled([1.0, 2.0]), Labelled(torch.ones(2))):
        assert type(made) is Labelled and made.device.type == "cpu"
    assert Labelled([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert type(torch.Tensor([1.0])) is torch.Tensor


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type.* is deprecated")
def test_a_cuda_type_may_be_the_default(machine):
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert torch.ones(1).device == torch.tensor([1.0]).device == torch.device("cuda", 0)
        assert torch.ones(1).dtype == torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(1).device.type == "cpu" and torch.ones(1).dtype is torch.float32


def test_a_model_in_a_function_transform_gives_its_device(machine):
    x = torch.ones(3, device="cuda")
    assert torch.vmap(lambda y: y + y.new_ones((), device=y.device))(x).tolist() == [2, 2, 2]
