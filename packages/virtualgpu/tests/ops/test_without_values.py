"""Tensors without values, with `values=False` or without enough memory on the host."""

import copy
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from virtualgpu.ops import without_values

NOT_KEPT = "the values of this tensor on cuda:0 were not kept, because nothing is computed here"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(), nn.LayerNorm(128), nn.Linear(128, 10)
        ),
        torch.randn(4, 64),
    ),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        ),
        torch.randn(4, 3, 8, 8),
    ),
    "transformer": lambda: (
        nn.Sequential(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            nn.Flatten(),
            nn.Linear(160, 10),
        ),
        torch.randn(4, 5, 32),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(4, 5, 8)),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(96, 10)),
        torch.randint(50, (4, 6)),
    ),
}


def memory_of_training(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], values: bool
) -> list[int]:
    """Return the bytes allocated after each part of two training steps, and the peak."""
    found = []
    with virtualgpu.use(gpus=1, like="H200", values=values):
        model, x = make()
        model, x, k = model.cuda(), x.cuda(), torch.randint(10, (4,)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), k)
            found.append(torch.cuda.memory_allocated())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found.append(torch.cuda.memory_allocated())
            optimizer.step()
            found.append(torch.cuda.memory_allocated())
        found += [torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
        del model, x, k, optimizer, loss
        gc.collect()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_training_takes_the_same_memory_with_values_and_without(name):
    assert memory_of_training(MODELS[name], values=False) == memory_of_training(
        MODELS[name], values=True
    )


@pytest.fixture
def no_values():
    with virtualgpu.use(gpus=2, like="H200", values=False) as used:
        yield used


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.tolist(),
        lambda x: x.numpy(force=True), lambda x: bool(x[0] > 0), lambda x: f"{x[0]:.2f}",
        lambda x: torch.equal(x, x.clone()), lambda x: torch.empty(3).copy_(x), lambda x: 1.0 in x,
            lambda x: int(x[0]),
        lambda x: x.untyped_storage().cpu(),
    ],
)  # fmt: skip
def test_reading_says_that_the_values_were_not_kept(no_values, read):
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        read(torch.randn(3, device="cuda"))


def test_a_checkpoint_has_nan_where_a_copy_to_the_host_has_it():
    """Check this so that a training script that only measures can still save its model."""
    file = io.BytesIO()
    with virtualgpu.use(gpus=1) as used, used.without_values():
        state = {
            "weight": torch.randn(3, device="cuda"),
            "half": torch.randn(5, device="cuda").half(),
            "step": torch.randn(2),
        }
        torch.save(state, file)
        known = state["step"].tolist()
    file.seek(0)
    found = torch.load(file, map_location="cpu")
    assert (
        found["weight"].isnan().all()
        and found["half"].isnan().all()
        and found["half"].shape == (5,)
    )
    assert found["step"].tolist() == known


@pytest.mark.parametrize("blank", [False, True])
def test_a_scaler_takes_gradients_to_be_finite(no_values, blank):
    """Check this because otherwise every step would be skipped.

    The optimizer would then never allocate its state.
    """
    model = nn.Linear(64, 64).cuda()
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cuda")
    virtualgpu.current().machine.blanks_host = blank
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[model.weight]["exp_avg"].shape == (64, 64)
    assert (optimizer.state[model.weight]["step"].item(), scaler.get_scale()) == (3, 65536)


def test_numbers_that_nothing_computed_are_taken_to_be_finite(no_values):
    """Check a training script that only takes a step if its loss is finite."""
    before = torch.cuda.memory_allocated()
    loss = torch.randn(8, device="cuda").sum()
    assert not (torch.isnan(loss) or torch.isinf(loss)) and torch.isfinite(loss).all()
    found = loss.isnan(), loss.isfinite()
    assert torch.cuda.memory_allocated() - before == 3 * 512 and found[0].shape == ()
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        (loss > 0).item()


def test_a_storage_is_resized(no_values):
    """Check what FSDP2 does: free gathered parameters, and get them back in the same storage."""
    x = torch.randn(1000, device="cuda")
    for storage in (x.untyped_storage(), (x + 1).untyped_storage()):
        before = torch.cuda.memory_allocated()
        storage.resize_(0)
        assert (storage.nbytes(), torch.cuda.memory_allocated()) == (0, before - 4096)
        storage.resize_(8000)
        assert (storage.nbytes(), torch.cuda.memory_allocated()) == (8000, before + 4096)
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        x.tolist()


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_a_shape_that_depends_on_values_is_refused(no_values, choose):
    with pytest.raises(
        RuntimeError, match="the shape of its result depends on values, and these were not kept"
    ):
        choose(torch.randn(3, device="cuda"))


def test_a_mask_whose_values_are_known_chooses_so_many(no_values):
    x, mask = (
        torch.randn(4, 3, 2, device="cuda"),
        torch.tensor([True, False, True, True], device="cuda"),
    )
    assert (
        x[mask].shape == (3, 3, 2)
        and x[:, mask[:3]].shape == (4, 2, 2)
        and x[mask, :, 1].shape == (3, 3)
    )


IN_PLACE_VIEWS = {
    "unsqueeze_": (lambda x: x.unsqueeze_(1), (200, 1, 3), (3, 3, 1)),
    "squeeze_": (lambda x: x.squeeze_(), (200, 3), (3, 1)),
    "t_": (lambda x: x.t_(), (3, 200), (1, 3)),
    "transpose_": (lambda x: x.transpose_(0, 1), (3, 200), (1, 3)),
    "as_strided_": (lambda x: x.as_strided_((2,), (3,)), (2,), (3,)),
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("name", IN_PLACE_VIEWS)
def test_a_tensor_changes_its_own_shape_and_no_kernel_runs(name, values):
    change, shape, strides = IN_PLACE_VIEWS[name]
    with virtualgpu.use(values=values) as gpus:
        x = torch.rand(200, 3, device="cuda") * 2
        stream = gpus.machine.gpus[0].stream
        launched = stream.count
        assert change(x) is x
        assert stream.count == launched
        assert (x.shape, x.stride(), (x + 1).shape) == (shape, strides, shape)


def test_shapes_dtypes_and_devices_are_right(no_values):
    x = torch.randn(4, 6, device="cuda")
    assert (x @ x.T).shape == (4, 4)
    assert x.half().double().dtype == torch.float64
    assert x.to("cuda:1").sum(0).device == torch.device("cuda:1")
    assert [part.shape for part in x.split([1, 3])] == [(1, 6), (3, 6)]
    assert x.topk(2).indices.dtype == torch.int64
    assert torch.linalg.svd(x)[1].shape == (4,)
    assert x.T.contiguous().stride() == (4, 1)


CONSTANTS: dict[str, Callable[[str], torch.Tensor]] = {
    "a mask of floats": lambda d: torch.ones(2, 3, device=d),
    "scores of a mask": lambda d: (1.0 - torch.ones(2, 3, device=d)) * torch.finfo(torch.half).min,
    "a mask resized": lambda d: F.interpolate(torch.ones(1, 1, 8, 8, device=d), size=(4, 4)).bool(),
    "filled": lambda d: torch.empty(3, device=d).fill_(2.0),
    "distances": lambda d: torch.arange(5.0, device=d).neg().exp(),
}
DATA: dict[str, Callable[[], torch.Tensor]] = {
    "drawn": lambda: torch.rand(3, device="cuda"),
    "drawn in place": lambda: torch.ones(3, device="cuda").normal_(),
    "drawn after a model": lambda: torch.rand_like(torch.ones(3, device="cuda")),
    "dropped at random": lambda: F.dropout(torch.ones(3, device="cuda")),
    "from the host": lambda: torch.ones(3).cuda(),
    "copied from the host": lambda: torch.ones(3, device="cuda").copy_(torch.ones(3)),
    "a parameter": lambda: nn.Linear(3, 1, device="cuda").weight,
    "of both": lambda: torch.ones(3, device="cuda") * torch.rand(3, device="cuda"),
    "large": lambda: torch.ones(1 << 15, device="cuda"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_small_constants_are_computed(no_values, name):
    assert CONSTANTS[name]("cuda").tolist() == CONSTANTS[name]("cpu").tolist()


@pytest.mark.parametrize("name", DATA)
def test_data_and_parameters_are_not(no_values, name):
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        DATA[name]().tolist()


def test_a_mask_of_floats_from_the_host_keeps_its_values(no_values):
    """Check this because nn.TransformerEncoder tests whether its mask is causal."""
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert mask.cuda().tolist() == mask.tolist()
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2), 2, enable_nested_tensor=False
    ).cuda()
    assert encoder(torch.rand(5, 3, 16, device="cuda"), mask=mask.cuda()).shape == (5, 3, 16)
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        # other constants may be this large
        nn.Transformer.generate_square_subsequent_mask(200).cuda().tolist()


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_takes_the_memory_that_it_takes_with_values(loss, reduction):
    def taken(values: bool) -> tuple[int, int]:
        with virtualgpu.use(1, values=values):
            x, y = (
                torch.rand(64, 1000, device="cuda", requires_grad=True),
                torch.rand(64, 1000, device="cuda"),
            )
            result = loss(x, y, reduction=reduction)
            alive = torch.cuda.memory_allocated()
            result.sum().backward()
            return alive, torch.cuda.max_memory_allocated()

    assert taken(values=False) == taken(values=True)


INTEGERS: dict[str, tuple[Callable[[str], torch.Tensor], list]] = {
    "arange": (lambda d: torch.arange(5, device=d), [0, 1, 2, 3, 4]),
    "a mask": (
        lambda d: (
            (torch.arange(4, device=d) > 1) & torch.tensor([True, False, True, False], device=d)
        ),
        [False, False, True, False],
    ),
    "positions in a mask": (lambda d: (torch.arange(5, device=d) > 2).nonzero().flatten(), [3, 4]),
    "put into": (
        lambda d: torch.zeros(3, dtype=torch.long, device=d).index_fill_(
            0, torch.tensor([1], device=d), 7
        ),
        [0, 7, 0],
    ),
    "there and back": (lambda d: torch.tensor([3, 1]).to(d).cpu().sort().values, [1, 3]),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_small_integers_and_truth_values_are_computed(no_values, name):
    make, expected = INTEGERS[name]
    assert make("cuda").tolist() == expected
    assert sorted(torch.randperm(6, device="cuda").tolist()) == list(range(6))
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        torch.randn(3, device="cuda").argmax().item()  # the values are unknown
    with pytest.raises(RuntimeError, match=NOT_KEPT):
        torch.arange(1 << 20, device="cuda").tolist()


def test_an_output_that_is_given_gets_its_size(no_values):
    x, out = torch.ones(3, 4, device="cuda"), None
    x @ x.T  # allocates cuBLAS's workspace
    for compute in (
        lambda out: torch.mm(x, x.T, out=out),
        lambda out: torch.cat([x, x], out=out),
        lambda out: torch.add(x, x, out=out),
    ):
        del out
        before, out = torch.cuda.memory_allocated(), torch.empty(0, device="cuda")
        shape = compute(out).shape
        assert (
            out.shape == shape and out.numel() >= 9 and out.untyped_storage().nbytes() == out.nbytes
        )
        assert torch.cuda.memory_allocated() == before + 512
    assert torch.eye(3, device="cuda").shape == (3, 3) and torch.arange(
        5.0, device="cuda"
    ).shape == (5,)
    values, places = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    torch.max(x, 1, out=(values, places))
    assert values.shape == places.shape == (3,)


def test_a_number_that_is_not_known_is_nan_where_copies_bring_nan():
    with virtualgpu.use(gpus=1, like="H200") as used, used.without_values():
        x = torch.randn(3, device="cuda")
        assert x.sum().item() != x.sum().item()
        with pytest.raises(RuntimeError, match=NOT_KEPT):
            bool((x > 0).all())


def test_a_tensor_that_was_written_without_values_says_why_it_has_none():
    with virtualgpu.use(gpus=1, like="H200") as used:
        older = torch.ones(1 << 20, device="cuda")
        with used.without_values():
            older.mul_(2)
        why = r"because an operator wrote to it while nothing was computed \(values=False\)"
        with pytest.raises(RuntimeError, match=why) as caught:
            older[0].item()
        assert "Make tensors inside the function" in str(caught.value)
        assert "LABKIT_HOST_BUDGET" not in str(caught.value)
        with pytest.raises(
            RuntimeError, match="or come from a tensor that was written while nothing was computed"
        ):
            (older + 1)[0].item()


def test_a_product_of_three_dimensions_takes_its_memory_once(no_values):
    x, weight = torch.ones(2, 512, 64, device="cuda"), torch.ones(64, 4096, device="cuda")
    x @ weight  # allocates cuBLAS's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = x @ weight
    assert torch.cuda.max_memory_allocated() - before == result.nbytes


def test_shapes_are_remembered_and_told_apart(no_values, monkeypatch):
    x = torch.ones(3, 4, dtype=torch.int32, device="cuda")
    asked = []
    ask = without_values._on_meta
    monkeypatch.setattr(
        without_values, "_on_meta", lambda func, *given: asked.append(func) or ask(func, *given)
    )
    for _ in range(3):
        assert [(x + y).dtype for y in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]
        assert [(x + torch.ones(n, 1, 4, device="cuda")).shape for n in (1, 2)] == [
            (1, 3, 4),
            (2, 3, 4),
        ]
        assert (x.T + 1).stride() == (1, 4)
    assert len([func for func in asked if func is torch.ops.aten.add.Tensor]) <= 6
    monkeypatch.setattr(without_values, "REMEMBERED", 0)
    assert (x + 12345).dtype is torch.int32 and len(without_values._shapes) == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype is torch.float32


def test_a_module_can_be_copied(no_values):
    layer = nn.Linear(3, 3).cuda()
    assert copy.deepcopy(layer).weight.shape == (3, 3)


BEYOND_THE_BUDGET = """
import torch, virtualgpu
virtualgpu.use(gpus=1, like="H200")
small = torch.arange(5.0, device="cuda")
kept = []
for step in range(1, 11):
    kept.append(torch.ones(10_000_000, 10).cuda())
    assert torch.cuda.memory_allocated() == 512 + step * 400_556_032, torch.cuda.memory_allocated()
assert (small * 2).tolist() == [0, 2, 4, 6, 8]
try:
    kept[-1].sum().item()
except RuntimeError as error:
    assert "because they take too much host memory" in str(error), error
else:
    raise SystemExit("a value that was not kept was read")
del kept
assert torch.cuda.memory_allocated() == 512
assert torch.ones(1000, device="cuda").sum().item() == 1000
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process its own peak of resident memory"
)
def test_four_gigabytes_on_the_gpu_in_little_host_memory():
    done = subprocess.run(
        [sys.executable, "-c", BEYOND_THE_BUDGET],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Read VmHWM, in KiB, because the peak in a child's getrusage begins with that of its parent.
    assert int(done.stdout) << 10 < 1.2 * (1 << 30)


def test_inference_without_values():
    with virtualgpu.use(gpus=1, values=False), torch.inference_mode():
        x = torch.ones(8, 4, device="cuda").to(torch.float64)
        assert torch.nn.functional.layer_norm(x, (4,)).reshape(-1).shape == (32,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_has_its_shape_and_memory(dtype):
    def run() -> tuple:
        x, weights = (
            torch.ones(*shape, device="cuda", dtype=dtype, requires_grad=True)
            for shape in ((8, 16), (2, 16, 40))
        )
        y = F.grouped_mm(x, weights, offs=torch.tensor([3, 8], dtype=torch.int32, device="cuda"))
        y.backward(torch.ones_like(y))
        found = [(v.shape, v.stride(), v.dtype) for v in (y, x.grad, weights.grad)]
        return found, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    answers = []
    for values in (True, False):
        with virtualgpu.use(gpus=1, like="H200", values=values):
            answers.append(run())
    assert answers[0] == answers[1]


def test_ctc_loss_goes_back():
    with virtualgpu.use(gpus=1, like="H200", values=False):
        scores = torch.zeros(8, 3, 5, device="cuda", requires_grad=True)
        F.ctc_loss(
            scores, torch.ones(3, 2, dtype=torch.int64, device="cuda"), [8, 8, 8], [2, 2, 2]
        ).backward()
        assert scores.grad is not None and scores.grad.shape == scores.shape


def test_a_sparse_gradient_is_refused_by_name():
    with virtualgpu.use(gpus=1, values=False):
        bag = nn.EmbeddingBag(5000, 80, mode="sum", sparse=True, device="cuda")
        bags = bag(torch.arange(2000, device="cuda"), torch.arange(1000, device="cuda"))
        with pytest.raises(
            NotImplementedError,
            match="a sparse result of tensors whose values were not kept is not supported",
        ):
            bags.sum().backward()


def sparse_gradient() -> torch.Tensor:
    table = nn.Embedding(1000, 16, sparse=True, device="cuda")
    table(torch.tensor([3, 7, 3, 999], device="cuda")).square().mean().backward()
    assert table.weight.grad is not None and not table.weight.grad.is_coalesced()
    return table.weight.grad


def test_an_operator_on_a_sparse_tensor_without_values_is_refused():
    """The CPU's kernel would abort the process."""
    with virtualgpu.use(gpus=1, values=False):
        gradient = sparse_gradient()
        with pytest.raises((NotImplementedError, RuntimeError), match="values"):
            torch.neg(gradient)


def test_a_sparse_gradient_has_its_indices_without_values():
    with virtualgpu.use(gpus=1, values=False):
        gradient = sparse_gradient()
        summed = gradient.coalesce()
        assert summed.is_coalesced() and summed.indices().tolist() == [[3, 7, 999]]
        assert summed.values().shape == (3, 16)
        chosen = torch.ones(1000, 16, device="cuda").square().sparse_mask(summed)
        assert chosen._indices().tolist() == [[3, 7, 999]] and chosen._values().shape == (3, 16)
        assert gradient.to_dense().shape == (1000, 16)


def test_sparse_adam_takes_the_same_memory_without_values():
    def peak() -> int:
        table = nn.Embedding(1000, 16, sparse=True, device="cuda")
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([3, 7, 3, 999], device="cuda")).square().mean().backward()
            optimizer.step()
        return torch.cuda.max_memory_allocated()

    with virtualgpu.use(1, like="H200"):
        expected = peak()
    with virtualgpu.use(1, like="H200", values=False):
        assert peak() == expected


def on_cuda(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="cuda")


MISTAKES: dict[str, Callable[[], object]] = {
    "mm": lambda: on_cuda(2, 3) @ on_cuda(4, 5),
    "mm of a vector": lambda: torch.mm(on_cuda(2), on_cuda(3, 4)),
    "mv": lambda: on_cuda(2, 3) @ on_cuda(4),
    "dot": lambda: on_cuda(3) @ on_cuda(4),
    "bmm": lambda: torch.bmm(on_cuda(1, 2, 3), on_cuda(1, 4, 5)),
    "linear": lambda: F.linear(on_cuda(7, 2, 3), on_cuda(5, 4), on_cuda(5)),
    "convolution": lambda: F.conv2d(on_cuda(1, 3, 8, 8), on_cuda(4, 2, 3, 3)),
    "cat": lambda: torch.cat([on_cuda(2, 3), on_cuda(3, 4)]),
    "addition": lambda: on_cuda(2, 3) + on_cuda(4, 5),
    "addition in place": lambda: on_cuda(2, 3).add_(on_cuda(4, 5)),
    "view": lambda: on_cuda(2, 3).view(7),
    "gather": lambda: torch.gather(
        on_cuda(2, 3), 5, torch.zeros(2, 3, dtype=torch.long, device="cuda")
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_the_same_words_with_and_without_values(name):
    said = []
    for values in (True, False):
        with (
            virtualgpu.use(like="H200", values=values),
            pytest.raises((RuntimeError, IndexError)) as raised,
        ):
            MISTAKES[name]()
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]


def test_the_words_of_a_mistake_take_no_memory():
    with virtualgpu.use(like="H200", values=False):
        x, y = on_cuda(1 << 20, 1 << 10), on_cuda(1 << 11, 1 << 22)
        with pytest.raises(
            RuntimeError,
            match=r"^mat1 and mat2 shapes cannot be multiplied \(1048576x1024 and 2048x4194304\)$",
        ):
            x @ y


SPARSE = {
    "mm": lambda sparse, dense: torch.mm(sparse, dense),
    "spmm": lambda sparse, dense: torch.spmm(sparse, dense),
    "sparse.mm": lambda sparse, dense: torch.sparse.mm(sparse, dense),
    "addmm": lambda sparse, dense: torch.addmm(dense[:6], sparse, dense),
    "transposed": lambda sparse, dense: sparse.t() @ dense[:6],
    "mv": lambda sparse, dense: torch.mv(sparse, dense[:, 0]),
    "dense @ sparse": lambda sparse, dense: dense.t()[:, :6] @ sparse,
    "sum": lambda sparse, dense: torch.ones(6, 9, device=dense.device) + sparse,
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_and_a_dense_tensor_give_a_dense_one_of_the_same_memory(name):
    """Check this because a product's shape does not depend on the positions of sparse elements."""

    def step() -> tuple[torch.Size, torch.layout, int]:
        places = torch.tensor([[0, 1, 5], [2, 0, 8]])
        sparse = torch.sparse_coo_tensor(places, torch.ones(3), (6, 9)).cuda()
        dense = torch.randn(9, 16, device="cuda", requires_grad=True)
        result = SPARSE[name](sparse, dense)
        if result.requires_grad:
            result.sum().backward()
        return result.shape, result.layout, torch.cuda.max_memory_allocated()

    with virtualgpu.use(1, like="H200"):
        expected = step()
    with virtualgpu.use(1, like="H200", values=False):
        assert step() == expected
        other = torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (7, 9)).cuda()
        assert (other @ torch.randn(9, 2, device="cuda")).shape == (7, 2)


def distributions_of(x: torch.Tensor) -> list[torch.distributions.Distribution]:
    d, share = torch.distributions, torch.sigmoid(x)
    mixture = d.MixtureSameFamily(d.Categorical(logits=x[0]), d.Normal(x[0], share[0]))
    tanh = d.TransformedDistribution(d.Normal(x, share), [d.transforms.TanhTransform(cache_size=1)])
    return [
        d.Categorical(logits=x),
        d.Categorical(probs=share),
        d.OneHotCategorical(logits=x),
        d.Bernoulli(logits=x),
        d.Multinomial(10, logits=x),
        d.Binomial(10, logits=x),
        d.Poisson(share),
        d.Normal(x, share),
        d.LogNormal(x, share),
        d.Uniform(x - 1, x + 1),
        d.Beta(share, share),
        d.Gamma(share, share),
        d.Dirichlet(share),
        d.StudentT(share),
        d.MultivariateNormal(x, scale_tril=torch.diag_embed(share)),
        d.LowRankMultivariateNormal(x, x[..., None], share),
        d.Independent(d.Normal(x, share), 1),
        mixture,
        tanh,
    ]


def test_distributions_take_their_arguments_to_be_valid(no_values):
    """Check distributions, which validate arguments by reading values.

    The sizes are compared with those on the CPU.
    """
    x = torch.randn(4, 3, requires_grad=True)
    on_gpu = x.detach().cuda().requires_grad_()
    pairs = zip(distributions_of(on_gpu), distributions_of(x), strict=True)
    for found, expected in pairs:
        samples, known = found.sample((5,)), expected.sample((5,))
        assert samples.shape == known.shape and samples.is_cuda
        assert found.log_prob(samples).shape == expected.log_prob(known).shape
        if found.has_rsample:
            found.rsample().sum().backward(retain_graph=True)


@pytest.fixture
def reads(no_values):
    """A list of the dtypes of the values that were read. Each read gives 1."""
    read: list[torch.dtype] = []
    machine = virtualgpu.current().machine
    machine.blanks_host = True

    def make_up(dtype: torch.dtype) -> int:
        read.append(dtype)
        return 1

    machine.makes_up = make_up
    return read


def test_what_selects_elements_gets_the_largest_shape_if_values_are_made_up(reads):
    x = torch.randn(6, 4, device="cuda")
    assert x[x > 0].shape == x.masked_select(x > 0).shape == x.flatten().unique().shape == (24,)
    assert x[x[:, 0] > 0].shape == (6, 4) and (x > 0).nonzero().shape == (24, 2)
    assert [part.shape for part in torch.where(x > 0)] == [(24,), (24,)]
    values, places, counts = torch.unique(x, dim=0, return_inverse=True, return_counts=True)
    assert (values.shape, places.shape, counts.shape) == ((6, 4), (6,), (6,))
    assert [part.shape for part in x[0].unique_consecutive(return_counts=True)] == [(4,), (4,)]
    assert reads and set(reads) == {torch.bool}
    with pytest.raises(
        RuntimeError, match="repeat_interleave.*depends on values, and these were not"
    ):
        x.repeat_interleave(x.argmax(1), 0)


def test_numbers_that_the_host_reads_are_made_up(reads):
    x = torch.randn(6, 4, device="cuda")
    assert (x.sum().item(), int(x.argmax()), bool(x[0, 0] > 0)) == (1, 1, True)
    assert x.argmax(1).tolist() == [1] * 6 and x[0].cpu().tolist() == [1] * 4
    assert (x > 9).all()
    expected = [torch.float32, torch.int64, torch.bool, torch.int64, torch.float32, torch.bool]
    assert reads == expected


def test_a_process_that_is_started_afresh_copies_nan_to_the_host_too(tmp_path):
    """Check that a new process reads the same NaN as its parent (`virtualgpu run --no-values`)."""
    script = tmp_path / "train.py"
    script.write_text(
        "import subprocess, sys, torch, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    print(torch.randn(3, device='cuda').sum().item(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    work(0)\n"
        "    mp.spawn(work, nprocs=1)\n"
        "    line = 'import torch; print(torch.randn(3, device=\"cuda\").sum().item())'\n"
        "    subprocess.run([sys.executable, '-c', line], check=True)\n"
    )
    command = [sys.executable, "-m", "virtualgpu", "run", "--no-values", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.split() == ["nan"] * 3, ended.stderr
