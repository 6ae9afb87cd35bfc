"""Attributes of a tensor of a virtual GPU, and the memory of its storage."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from virtualgpu.tensor import memory_of

KIB4 = 4096  # bytes of 1,000 float32 numbers, rounded up to a multiple of 512


@pytest.fixture(autouse=True)
def used(machine):
    return machine


def allocated(index: int = 0) -> int:
    return torch.cuda.memory_allocated(index)


# Attributes


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("apply_", (abs,)),
        pytest.param(
            "const_data_ptr",
            (),
            marks=pytest.mark.skipif(
                not hasattr(torch.Tensor, "const_data_ptr"), reason="this torch does not have it"
            ),
        ),
        ("data_ptr", ()),
        ("get_device", ()),
        ("is_pinned", ()),
        ("is_shared", ()),
        ("new", (2,)),
        ("numpy", ()),
        ("pin_memory", ()),
        ("tolist", ()),
        ("type", ()),
        ("type", ("torch.cuda.HalfTensor",)),
        ("type_as", (torch.ones(1),)),
    ],
)
def test_a_method_of_torch_tensor_answers_for_the_gpu_as_the_tensors_own_method_does(
    name, arguments
):
    tensor = torch.ones(2, 2, device="cuda:1")
    assert outcome(getattr(torch.Tensor, name), tensor, *arguments) == outcome(
        getattr(tensor, name), *arguments
    )


def test_a_method_of_torch_tensor_answers_for_the_host_as_without_virtual_gpus():
    tensor = torch.ones(2, 2)
    assert torch.Tensor.data_ptr(tensor) == tensor.data_ptr() == tensor.untyped_storage().data_ptr()
    assert (torch.Tensor.get_device(tensor), torch.Tensor.type(tensor)) == (-1, "torch.FloatTensor")
    assert torch.Tensor.numpy(tensor).sum() == 4


def outcome(method, *arguments):
    """Call a method, and return its result's text, device and dtype, or its error."""
    try:
        answer = method(*arguments)
    except (TypeError, RuntimeError) as error:
        return type(error), str(error)
    if isinstance(answer, torch.Tensor):
        return answer.shape, answer.dtype, answer.device
    return answer


# Memory


def test_views_share_a_block_until_the_last_one_dies():
    x = torch.ones(1000, device="cuda")
    part = x[10:20]
    turned = part.view(2, 5).T
    assert allocated() == KIB4
    del x, part
    assert allocated() == KIB4
    del turned
    assert allocated() == 0


def test_the_autograd_graph_holds_what_backward_needs():
    x = torch.ones(1000, device="cuda", requires_grad=True)
    y = x.exp()
    total = y.sum()
    del y
    assert allocated() == 2 * KIB4 + 512
    total.backward()
    assert allocated() == 2 * KIB4 + 512  # the graph freed its tensor, and the gradient arrived
    del total
    x.grad = None
    assert allocated() == KIB4


def test_in_place_operators_take_no_memory():
    x = torch.ones(1000, device="cuda")
    address = x.data_ptr()
    x.add_(1).mul_(2)
    x[:10] = 0
    x += 1
    assert (x.data_ptr(), allocated(), torch.cuda.max_memory_allocated()) == (address, KIB4, KIB4)
    assert x[10].item() == 5


def test_out_writes_where_it_is_told():
    out = torch.empty(1000, device="cuda")
    address = out.data_ptr()
    torch.exp(torch.zeros(1000, device="cuda"), out=out)
    assert (out.data_ptr(), out.sum().item()) == (address, 1000)
    empty = torch.empty(0, device="cuda")
    torch.add(out, 1, out=empty)
    assert (empty.shape, empty.sum().item(), allocated()) == ((1000,), 2000, 2 * KIB4)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, out: torch.mm(x, x, out=out), lambda x, out: torch.addmm(x, x, x, out=out),
        lambda x, out: torch.mv(x, x[0], out=out), lambda x, out: torch.dot(x[0], x[0], out=out),
        lambda x, out: torch.bmm(x[None], x[None], out=out), lambda x,
        out: torch.addbmm(x, x[None], x[None], out=out), lambda x, out: torch.cat([x, x], out=out),
        lambda x, out: torch.sum(x, 0, out=out), lambda x,
        out: torch.gather(x, 0, (x > 1).long(), out=out),
    ],
)  # fmt: skip
def test_out_that_grows_takes_memory(compute):
    x, out = torch.ones(32, 32, device="cuda"), torch.empty(0, device="cuda")
    compute(x, out)
    assert out.numel() and memory_of(out).requested == out.nbytes


def test_resize_takes_a_new_block_only_to_grow():
    x = torch.arange(10.0, device="cuda")
    x.resize_(1000)
    assert allocated() == KIB4
    assert x[:10].tolist() == list(range(10))
    x.resize_(5)
    assert allocated() == KIB4


def test_a_storage_of_no_bytes_holds_no_memory():
    x = torch.ones(1000, device="cuda")
    x.untyped_storage().resize_(0)
    assert allocated() == 0
    x.untyped_storage().resize_(4000)
    assert allocated() == KIB4


def test_set_moves_to_another_storage_and_frees_its_own():
    x, y = torch.ones(1000, device="cuda"), torch.zeros(10, device="cuda")
    x.set_(y)
    assert allocated() == 512
    x.fill_(3)
    assert y.sum().item() == 30


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_set_refuses_a_storage_of_another_device(device):
    x = torch.ones(10, device="cuda")
    with pytest.raises(
        RuntimeError, match=f'on device "cuda:0" to a storage on different device "{device}"'
    ):
        x.set_(torch.zeros(10, device=device).untyped_storage(), 0, (10,))
    assert (x.untyped_storage().device, x.sum().item(), allocated()) == (x.device, 10, 512)


def test_set_takes_an_empty_storage_of_the_cpu_and_of_its_own_gpu():
    x = torch.ones(10, device="cuda")
    with pytest.raises(RuntimeError, match='different device "cuda:1"'):
        x.set_(torch.empty(0, device="cuda:1"))
    for source in (torch.empty(0), torch.empty(0, device="cuda"), None):
        x = torch.ones(10, device="cuda")
        x.set_(*([] if source is None else [source.untyped_storage()]))
        assert (x.device.type, x.untyped_storage().device, allocated()) == (
            "cuda",
            torch.device("cuda:0"),
            0,
        )


def test_tensors_without_elements_take_no_memory():
    x = torch.empty(0, 5, device="cuda")
    assert (allocated(), x.data_ptr(), (x + 1).shape, x.sum().item()) == (0, 0, (0, 5), 0)


def test_data_ptr_moves_with_the_offset():
    x = torch.ones(10, device="cuda")
    assert x[3:].data_ptr() - x.data_ptr() == 12
    assert x.untyped_storage().data_ptr() == x.data_ptr()


def test_reference_cycles_give_their_memory_back_when_collected():
    gc.disable()
    try:
        x = torch.ones(1000, device="cuda")
        x.itself = x
        del x
        assert allocated() == KIB4
    finally:
        gc.enable()
    gc.collect()
    assert allocated() == 0


def test_a_storage_in_garbage_keeps_its_memory_while_a_tensor_is_on_it():
    x = torch.ones(1000, device="cuda")
    cycle: list = [x.untyped_storage()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert allocated() == KIB4
    assert (x.untyped_storage().device, x.sum().item()) == (x.device, 1000)
    del x
    assert allocated() == 0


def test_collections_in_the_midst_of_allocations():
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            ring = [torch.ones(100, device="cuda")]
            ring.append(ring)
            torch.zeros(10, device="cuda").add(1)
    finally:
        gc.set_threshold(*before)
    del ring
    gc.collect()
    assert allocated() == 0
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x @ x,
        lambda x: x.view(5),
        lambda x: x + torch.ones(5, device="cuda"),
        lambda x: torch.cat([x, torch.ones(2, device="cuda")]),
        lambda x: x + torch.ones(3, 4, device="cuda:1"),
        lambda x: torch.linalg.inv(torch.zeros(3, 3, device="cuda")),
        lambda x: torch.empty(200 << 30, dtype=torch.uint8, device="cuda"),
        lambda x: x.int() @ x.int().T,
        lambda x: x.exp().numpy(),
    ],
)
def test_a_failed_operator_leaves_the_memory_as_it_was(mistake):
    x = torch.ones(3, 4, device="cuda")
    with pytest.raises((RuntimeError, TypeError)) as caught:
        mistake(x)
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert [allocated(index) for index in range(4)] == [512, 0, 0, 0]
    assert (x + 1).sum().item() == 24


# Copies of the object


def test_deepcopy_keeps_a_tensor_and_its_storage_together():
    x = torch.zeros(2, device="cuda")
    copied, storage = copy.deepcopy([x, x.untyped_storage()])
    assert storage.data_ptr() == copied.data_ptr() != x.data_ptr()


def test_a_part_of_a_storage_is_on_its_gpu():
    part = torch.arange(2, dtype=torch.int64, device="cuda:1").untyped_storage()[8:16]
    assert (part.device, list(part)) == (torch.device("cuda:1"), [1, 0, 0, 0, 0, 0, 0, 0])


def test_deepcopy_keeps_what_shares_a_storage_together():
    x = torch.ones(1000, device="cuda:2")
    whole, part = copy.deepcopy([x, x[:10]])
    assert allocated(2) == 2 * KIB4
    whole[0] = 7
    assert (part[0].item(), x[0].item(), part.device) == (7, 1, x.device)


def test_deepcopy_of_a_module():
    layer = nn.Linear(10, 10).cuda(2)
    layer(torch.ones(1, 10, device="cuda:2")).sum().backward()
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter)
    assert (twin.weight.device, twin.weight.requires_grad) == (layer.weight.device, True)
    # a copy of a parameter has none
    assert twin.weight.grad is None and nn.Linear(2, 2).weight.__deepcopy__({}).grad is None
    assert copy.deepcopy([layer.weight, layer]).pop().weight.requires_grad
    twin.weight.data.zero_()
    assert layer.weight.abs().sum().item() > 0


def test_attributes_are_those_that_were_set():
    x = nn.Parameter(torch.ones(2, device="cuda"))
    assert dict(vars(x)) == {}
    x.colour = "red"
    assert dict(vars(x)) == {"colour": "red"}
    with pytest.raises(TypeError, match="does not support item assignment"):
        vars(x)["colour"] = "blue"


def test_a_storage_class_makes_storages_of_the_host():
    made = type(torch.ones(2, device="cuda").untyped_storage())(8, device="cpu")
    assert made.device == torch.device("cpu")


def test_state_dicts_are_staged_on_the_host_as_a_gpus_are():
    """Check the first step of torch.distributed.checkpoint.async_save."""
    layer = nn.Linear(2, 2).cuda()
    staged = StateDictStager().stage(layer.state_dict())
    assert {(x.device.type, type(x), *vars(x)) for x in staged.values()} == {("cpu", torch.Tensor)}
    assert all(torch.equal(staged[name], x.cpu()) for name, x in layer.state_dict().items())


def test_deepcopy_of_a_result_is_refused_as_on_cuda():
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(torch.ones(2, device="cuda", requires_grad=True) * 2)


def test_pickle_keeps_the_device():
    x = pickle.loads(pickle.dumps(torch.arange(3.0, device="cuda:1")))
    assert (x.device, x.tolist()) == (torch.device("cuda:1"), [0, 1, 2])


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("place", "device"),
    [
        (None, "cuda:3"),
        ("cpu", "cpu"),
        ("cuda:1", "cuda:1"),
        ("cuda", "cuda:0"),
        (torch.device("cuda:2"), "cuda:2"),
        ({"cuda:3": "cuda:0"}, "cuda:0"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(1), "cuda:1"),
    ],
)
def test_load_puts_tensors_where_map_location_says(place, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda(3)
    state = torch.load(saved(model.state_dict()), map_location=place)
    assert {str(value.device) for value in state.values()} == {device}
    assert torch.equal(state["0.weight"].cpu(), model[0].weight.cpu())


def test_load_of_a_device_that_is_not_there():
    file = io.BytesIO(
        saved(torch.ones(2, device="cuda:3")).getvalue().replace(b"cuda:3", b"cuda:7")
    )
    with pytest.raises(
        RuntimeError,
        match=(
            r"Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count\(\) "
            r"is 4"
        ),
    ):
        torch.load(file)


def test_load_state_dict_crosses_devices_and_assigns():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2).cuda()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.cpu(), source.weight)
    assert target.weight.is_cuda
    source.load_state_dict(target.state_dict(), assign=True)
    assert source.weight.is_cuda
    assert isinstance(source.weight, nn.Parameter)


def test_optimizer_state_follows_its_parameters():
    def trained(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        layer = nn.Linear(2, 2).to(device)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()
        return layer, optimizer

    (_, first), (layer, second) = trained("cuda:1"), trained("cuda:2")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    devices = {name: str(value.device) for name, value in second.state[layer.weight].items()}
    assert devices == {"step": "cpu", "exp_avg": "cuda:2", "exp_avg_sq": "cuda:2"}


# Attributes


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.tensor([1, 2], device="cuda:1"), "tensor([1, 2], device='cuda:1')"),
        (lambda: torch.tensor(3, device="cuda"), "tensor(3, device='cuda:0')"),
        (lambda: torch.empty(0, device="cuda"), "tensor([], device='cuda:0')"),
        (
            lambda: torch.ones(2, dtype=torch.half, device="cuda"),
            "tensor([1., 1.], device='cuda:0', dtype=torch.float16)",
        ),
        (
            lambda: torch.ones(2, device="cuda", requires_grad=True),
            "tensor([1., 1.], device='cuda:0', requires_grad=True)",
        ),
        (
            lambda: torch.ones(1, device="cuda", requires_grad=True) * 2,
            "tensor([2.], device='cuda:0', grad_fn=<MulBackward0>)",
        ),
        (
            lambda: nn.Parameter(torch.ones(1, device="cuda")),
            "Parameter containing:\ntensor([1.], device='cuda:0', requires_grad=True)",
        ),
        (
            lambda: nn.Linear(1, 1).cuda().requires_grad_(False).bias.zero_(),
            "Parameter containing:\ntensor([0.], device='cuda:0')",
        ),
        (lambda: torch.ones(2, device="cuda") > 0, "tensor([True, True], device='cuda:0')"),
    ],
)
def test_repr_is_what_cuda_prints(make, text):
    assert repr(make()) == text


def test_it_says_that_it_is_on_the_gpu():
    x = torch.ones(2, 3, device="cuda:1")
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device(), x.type()) == (
        torch.device("cuda:1"),
        True,
        False,
        1,
        "torch.cuda.FloatTensor",
    )
    assert torch.get_device(x) == 1
    assert torch.typename(x) == "torch.cuda.FloatTensor"
    assert repr(type(x)) == "<class 'torch.Tensor'>"
    assert (x.untyped_storage().device, x.is_pinned(), x.is_shared()) == (x.device, False, True)


def test_every_tensor_is_of_the_type_of_a_tensor_on_the_gpu():
    kind = type(torch.ones(1, device="cuda"))
    assert (
        isinstance(torch.ones(1), kind)
        and isinstance(torch.ones(1, device="cuda"), kind)
        and isinstance(nn.Linear(1, 1).weight, kind)
    )
    assert not isinstance(1.0, kind)


def test_parameters_are_parameters():
    layer = nn.Linear(2, 2).cuda()
    made = nn.Parameter(torch.ones(2, device="cuda"))
    assert isinstance(layer.weight, nn.Parameter) and isinstance(made, nn.Parameter)
    assert not any(
        isinstance(x, nn.Parameter)
        for x in (layer.weight.data, layer.weight * 1, torch.ones(1, device="cuda"))
    )
    assert made.is_leaf and made.requires_grad and not made.data.requires_grad


def test_reading_on_the_host():
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (x[1, 2].item(), float(x[1, 1]), int(x[0, 1]), bool(x[0, 1]), f"{x[0, 1]:.2f}") == (
        5,
        4,
        1,
        True,
        "1.00",
    )
    assert [10, 20, 30][x[0, 2].long()] == 30
    assert x.numpy(force=True).tolist() == x.tolist()
    assert len(x) == 2 and [row.device for row in x] == [x.device] * 2


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray, lambda x: np.add(np.ones(2), x)])
def test_numpy_needs_a_copy_on_the_cpu(read):
    text = (
        r"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\) to copy the tensor "
        r"to host memory first."
    )
    with pytest.raises(TypeError, match=text):
        read(torch.ones(2, device="cuda"))


def test_other_libraries_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="DLPack .* is not supported by the virtual GPU"):
        torch.from_dlpack(torch.ones(2, device="cuda"))
    with pytest.raises(NotImplementedError, match="DLPack .* is not supported by the virtual GPU"):
        torch.utils.dlpack.to_dlpack(torch.ones(2, device="cuda"))
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2))).tolist() == [1, 1]
    with pytest.raises(NotImplementedError, match="__cuda_array_interface__"):
        torch.ones(2, device="cuda").__cuda_array_interface__  # noqa: B018


def test_objects_behave_as_python_objects():
    x = torch.ones(2, device="cuda")
    x.note = "mine"
    alive = weakref.ref(x)
    assert {x: 1}[x] == 1 and x.note == "mine" and not hasattr(x + 1, "note")
    del x
    assert alive() is None


def test_storages_are_saved():
    storage = torch.arange(3.0, device="cuda").untyped_storage()
    assert torch.is_storage(storage)
    copy = torch.load(saved({"storage": storage}))["storage"]._untyped_storage
    assert (copy.device, list(copy.cpu())) == (storage.device, list(storage.cpu()))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storages_move_and_convert():
    storage = torch.ones(3).storage().cuda(1)
    assert (storage.device, storage.dtype) == (
        torch.device("cuda:1"),
        torch.float32,
    ) and isinstance(storage.double(), torch.cuda.DoubleStorage)
    assert storage.double().cpu().int().tolist() == [1, 1, 1]
    assert copy.deepcopy(storage).device == torch.device("cuda:1")
    assert torch.cuda.IntStorage(4).fill_(2).tolist() == [2] * 4 and torch.cuda.IntStorage(
        [1, 2]
    ).tolist() == [1, 2]
    assert (
        torch.UntypedStorage(600, device="cuda").nbytes() == 600
        and torch.UntypedStorage(device="cuda").nbytes() == 0
    )
    assert torch.UntypedStorage([1, 2], device="cuda:1").get_device() == 1 and torch.UntypedStorage(
        3
    ).device == torch.device("cpu")
