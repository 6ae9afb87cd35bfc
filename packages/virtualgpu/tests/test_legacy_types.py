"""Legacy types of tensors, such as `torch.FloatTensor` and `torch.cuda.FloatTensor`."""

import pickle

import pytest
import torch

from virtualgpu.factories import LEGACY


@pytest.mark.parametrize("name", LEGACY)
def test_a_tensor_is_an_instance_of_the_type_of_its_device(name, machine):
    on_host, on_gpu = getattr(torch, name), getattr(torch.cuda, name)
    x = torch.ones(2, dtype=LEGACY[name])
    assert isinstance(x, on_host) and not isinstance(x, on_gpu)
    assert isinstance(x.cuda(), on_gpu) and not isinstance(x.cuda(), on_host)
    other = torch.ones(2, dtype=torch.complex64)
    assert not isinstance(other, on_host) and not isinstance(other.cuda(), on_gpu)
    assert not isinstance(1.0, on_host)


def test_parameters_wrappers_and_sparse_tensors_too(machine):
    layer = torch.nn.Linear(2, 2)
    assert isinstance(layer.weight, torch.FloatTensor)
    assert isinstance(layer.cuda().weight, torch.cuda.FloatTensor) and not isinstance(
        layer.weight, torch.FloatTensor
    )
    seen = []
    torch.vmap(lambda x: seen.append(isinstance(x, torch.FloatTensor)) or x)(
        torch.ones(2, device="cuda")
    )
    assert seen == [False]
    sparse = torch.eye(2).to_sparse()
    assert isinstance(sparse, torch.sparse.FloatTensor) and not isinstance(
        sparse.cuda(), torch.sparse.FloatTensor
    )


def test_the_types_of_the_cpu_are_what_they_were(machine):
    stand_in = torch.FloatTensor
    original = stand_in.original
    assert stand_in == original and original == stand_in and hash(stand_in) == hash(original)
    assert {original: 1}[stand_in] == {stand_in: 1}[original] == 1
    assert repr(stand_in) == repr(original) and stand_in.__name__ == "FloatTensor"
    assert (stand_in.dtype, stand_in.layout, stand_in.is_cuda) == (
        torch.float32,
        torch.strided,
        False,
    )
    assert pickle.loads(pickle.dumps(stand_in)) is stand_in
    assert torch.FloatTensor([1.0, 2.0]).tolist() == [1, 2] and torch.LongTensor(2, 3).shape == (
        2,
        3,
    )
    assert type(torch.FloatTensor(2)) is torch.Tensor
    assert torch.ones(1).type(torch.LongTensor).dtype is torch.int64
    assert torch.ones(1, device="cuda").type(torch.LongTensor).device.type == "cpu"
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises(
        RuntimeError,
        match="legacy constructor expects device type: cpu but device type: cuda was passed",
    ):
        torch.FloatTensor(2, device="cuda")


def test_a_legacy_constructor_converts_no_tensor(machine):
    x = torch.ones(2)
    assert torch.equal(torch.FloatTensor(x), x) and torch.equal(
        torch.cuda.FloatTensor(x.cuda()), x.cuda()
    )
    for make, given in (
        (torch.FloatTensor, x.cuda()),
        (torch.cuda.FloatTensor, x),
        (torch.cuda.FloatTensor, x.cuda().int()),
    ):
        with pytest.raises(
            TypeError, match="^expected TensorOptions.dtype=float, device=.*got TensorOptions"
        ):
            make(given)
