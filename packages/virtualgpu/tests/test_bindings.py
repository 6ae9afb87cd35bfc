"""Bindings of C++ outside of the dispatcher, with tensors on a GPU or on two devices."""

import pytest
import torch
from torch import nn

from virtualgpu.errors import VERSION

pytestmark = pytest.mark.usefixtures("machine")
OTHER_STORAGE = (
    'Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"cuda:0".  '
    "This is no longer allowed; the devices must match."
)


def first(a, *others):
    return a


def on_gpu(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device="cuda")


# Attributes of a tensor that the dispatcher does not know, by the kind of their test.
NAMES_WITHOUT_DEVICES = [
    "H", "T", "_backward_hooks", "_base", "_cdata", "_dtensor__new__", "_fix_weakref", "_grad",
    "_grad_fn", "_has_symbolic_sizes_strides", "_is_view", "_make_subclass",
    "_make_wrapper_subclass", "_post_accumulate_grad_hooks", "_python_dispatch",
    "_rev_view_func_unsafe", "_use_count", "_view_func", "_view_func_unsafe", "as_subclass",
    "dtype", "grad_dtype", "grad_fn", "is_mkldnn", "is_nested", "is_quantized", "is_sparse",
    "is_sparse_csr", "itemsize", "layout", "nbytes", "ndim", "ndimension", "nelement",
    "requires_grad", "shape", "volatile", "names",
]  # fmt: skip
DEVICE_FLAGS = [
    "is_cpu",
    "is_ipu",
    "is_maia",
    "is_meta",
    "is_mps",
    "is_mtia",
    "is_vulkan",
    "is_xla",
    "is_xpu",
]
OTHER_DEVICES = ["ipu", "mtia", "xpu"]
CONVERSIONS = [
    "bfloat16",
    "bool",
    "byte",
    "cdouble",
    "cfloat",
    "char",
    "double",
    "float",
    "half",
    "int",
    "long",
    "short",
]
TRIED = [
    "apply_",
    "map_",
    "map2_",
    "new",
    "new_tensor",
    "numpy",
    "tolist",
    "type",
    "data_ptr",
    "const_data_ptr",
]
TRIED += ["untyped_storage", "is_cuda"]


@pytest.mark.skipif(VERSION < (2, 13), reason="the list is that of torch 2.13 and newer")
def test_every_member_that_is_no_operator_is_known_here():
    members = {name for name in dir(torch._C.TensorBase) if not name.startswith("__")}
    bindings = {name for name in members if not hasattr(torch.ops.aten, name)}
    known = {*NAMES_WITHOUT_DEVICES, *DEVICE_FLAGS, *OTHER_DEVICES, *CONVERSIONS, *TRIED}
    assert bindings <= known


@pytest.mark.parametrize("name", DEVICE_FLAGS)
def test_a_gpu_tensor_is_on_no_other_device(name):
    assert not getattr(on_gpu(1), name, False) and on_gpu(1).is_cuda


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_stays_on_the_gpu(name):
    assert getattr(on_gpu(2), name)().device == torch.device("cuda", 0)


CALLS = {
    "apply_": (
        lambda: on_gpu(2).apply_(first),
        TypeError,
        "apply_ is only implemented on CPU tensors",
    ),
    "map_": (
        lambda: on_gpu(2).map_(on_gpu(2), first),
        TypeError,
        "map_ is only implemented on CPU tensors",
    ),
    "map_, other": (
        lambda: torch.ones(2).map_(on_gpu(2), first),
        TypeError,
        "map_: expected torch.FloatTensor for 'other' (got torch.cuda.FloatTensor)",
    ),
    "map2_": (
        lambda: torch.ones(2).map2_(torch.ones(2), on_gpu(2), first),
        TypeError,
        "map2_: expected torch.FloatTensor for argument 'y' (got torch.cuda.FloatTensor)",
    ),
    "map_, bfloat16": (
        lambda: on_gpu(2).bfloat16().map_(torch.ones(2).bfloat16(), first),
        TypeError,
        "map_: expected CUDABFloat16Type for 'other' (got CPUBFloat16Type)",
    ),
    "set_": (lambda: torch.ones(2).set_(on_gpu(2)), RuntimeError, OTHER_STORAGE),
    "set_, storage": (
        lambda: torch.ones(2).set_(on_gpu(2).untyped_storage(), 0, (2,), (1,)),
        RuntimeError,
        OTHER_STORAGE,
    ),
    "set_, typed": (
        lambda: torch.ones(2).set_(on_gpu(2)._typed_storage()),
        RuntimeError,
        OTHER_STORAGE,
    ),
    "numpy": (
        lambda: on_gpu(2).numpy(),
        TypeError,
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
        "host memory first.",
    ),
    "type": (lambda: on_gpu(2).type("torch.foo"), ValueError, "invalid type: 'torch.foo'"),
    "backward": (
        lambda: (on_gpu(2).requires_grad_() * 2).backward(torch.ones(2)),
        RuntimeError,
        "invalid gradient at index 0 - expected device cuda:0 but got cpu",
    ),
    "PackedSequence": (
        lambda: nn.utils.rnn.PackedSequence(on_gpu(2), torch.tensor([2], device="cuda")),
        ValueError,
        "batch_sizes should always be on CPU. Instances of PackedSequence should never be created "
        "manually. They should "
        "be instantiated by functions like pack_sequence and pack_padded_sequences in "
        "nn.utils.rnn. "
        "https://pytorch.org/docs/stable/nn.html#torch.nn.utils.rnn.pack_sequence",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_binding_refuses(name):
    call, kind, words = CALLS[name]
    with pytest.raises(kind) as refused:
        call()
    assert str(refused.value) == words


@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_new_converts_no_tensor(here, there):
    x = torch.ones(2, device=here)
    assert torch.equal(x.new(x), x)
    with pytest.raises(TypeError, match="^expected TensorOptions.dtype=float, device=c"):
        x.new(torch.ones(2, device=there))
    assert x.new_tensor(torch.ones(2, device=there)).device == x.device


def test_maps_of_cpu_tensors_work():
    x = torch.ones(2)
    assert x.map_(torch.ones(2), lambda a, b: a + b).tolist() == [2, 2]
    assert x.map2_(x, x, lambda a, b, c: a + b + c).tolist() == [6, 6]
    assert x.set_(torch.zeros(3)).tolist() == [0, 0, 0]


def test_a_storage_answers_as_cudas():
    storage = on_gpu(2).untyped_storage()
    assert storage.is_shared() and storage.new().device == storage.device == torch.device("cuda", 0)
    assert on_gpu(2).is_shared()
    x = on_gpu(2)
    if hasattr(torch.Tensor, "const_data_ptr"):
        assert x.const_data_ptr() == x.data_ptr()
    assert x.tolist() == [1, 1] and x.type() == "torch.cuda.FloatTensor"


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook", "of the leaf"])
def test_a_hook_of_a_c_node_cannot_give_a_gpu_leaf_a_gradient_of_the_host(kind):
    def to_host(gradients, *of_outputs):
        return tuple(None if x is None else x.cpu() for x in gradients)

    x = on_gpu(3).requires_grad_()
    y = x * 2
    if kind == "of the leaf":
        y.grad_fn.next_functions[0][0].register_prehook(to_host)
    else:
        getattr(y.grad_fn, kind)(to_host)
    with pytest.raises(RuntimeError) as refused:
        y.sum().backward()
    assert str(refused.value) == (
        "hook '<unknown>' has changed the type of value (was torch.cuda.FloatTensor got "
        "torch.FloatTensor)"
    )
    assert x.grad is None
