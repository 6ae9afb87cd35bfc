"""Race detection: an unordered reader gets the old values, and the report names both lines."""

import gc
import io
import warnings

import psutil
import pytest
import torch
from torch._C import _DisableTorchDispatch

import virtualgpu
from virtualgpu import hardware
from virtualgpu.streams.race_reports import BOTH_WRITE, OVERWRITTEN, STALE, RaceWarning

from .racing import RACES, here, kinds

pytestmark = pytest.mark.usefixtures("raced")


def test_what_is_remembered_of_memory_goes_without_the_garbage_collector(side):
    for _ in range(2):
        gc.collect()
        x = torch.ones(8, device="cuda")
        side.wait_stream(here())
        with torch.cuda.stream(side):
            x.mul_(2).add_(x)
        torch.cuda.synchronize()
        del x
    assert gc.collect() == 0


# A reader before its writer.


@RACES
@pytest.mark.parametrize(
    "draw",
    [
        torch.Tensor.uniform_,
        lambda x: x.bernoulli_(0.5),
        lambda x: x.bernoulli_(torch.full_like(x, 0.5)),
    ],
)
def test_drawing_in_place_does_not_read_what_stood_there(side, draw):
    """Check CUDA's `bernoulli_`, which only reads a tensor of probabilities.

    The source is ATen/native/cuda/DistributionTemplates.h.
    """
    x = torch.zeros(8, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        x.fill_(2.0)
    draw(x)
    assert kinds() == [BOTH_WRITE]


@RACES
def test_drawing_reads_its_probabilities(side):
    x, p = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        p.fill_(1.0)
    assert x.bernoulli_(p).tolist() == [0.0] * 8
    assert kinds() == [STALE]


@RACES
@pytest.mark.parametrize("stream_first", [True, False])
def test_the_articles_example_is_wrong_every_time(stream_first):
    stream = torch.cuda.Stream() if stream_first else None
    a = torch.empty(100, 100, device="cuda").normal_()
    stream = stream or torch.cuda.Stream()
    with torch.cuda.stream(stream):
        b = torch.sum(a)
    torch.cuda.synchronize()
    assert b.item() == 0.0 != a.sum().item()  # new memory is zero
    assert kinds() == [STALE]


def test_and_right_once_the_stream_waits(side):
    a = torch.empty(100, 100, device="cuda").normal_()
    side.wait_stream(here())
    with torch.cuda.stream(side):
        b = torch.sum(a)
    torch.cuda.synchronize()
    assert b.item() == a.sum().item() != 0.0
    assert virtualgpu.races() == []


ORDERS = {
    "wait_stream": lambda side: side.wait_stream(here()),
    "wait_event": lambda side: side.wait_event(here().record_event()),
    "event.wait": lambda side: here().record_event().wait(side),
    "event.synchronize": lambda side: here().record_event().synchronize(),
    "stream.synchronize": lambda side: here().synchronize(),
    "device": lambda side: torch.cuda.synchronize(),
    "item": lambda side: torch.ones(1, device="cuda").item(),
    "through another stream": lambda side: (
        (other := torch.cuda.Stream()).wait_stream(here()) or side.wait_stream(other)
    ),
    "query": lambda side: wait_by_asking(here().record_event()),
}


def wait_by_asking(event: torch.cuda.Event) -> None:
    while not event.query():
        pass


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_kind_of_order_serves(side, order):
    a = torch.ones(1000, device="cuda") * 3
    order(side)
    with torch.cuda.stream(side):
        b = a.sum()
    torch.cuda.synchronize()
    assert b.item() == 3000
    assert virtualgpu.races() == []


@RACES
def test_the_old_values_are_those_before_the_writes_that_are_not_ordered(side):
    a = torch.ones(10, device="cuda")
    side.wait_stream(here())
    a.mul_(2)
    event = here().record_event()
    a.mul_(3)
    a.mul_(5)
    with torch.cuda.stream(side):
        first = a.sum()
        side.wait_event(event)
        second = a.sum()
    torch.cuda.synchronize()
    assert (first.item(), second.item(), a.sum().item()) == (10, 20, 300)


@RACES
def test_a_lost_update(side):
    a = torch.zeros(4, device="cuda")
    side.wait_stream(here())
    a.add_(1)
    with torch.cuda.stream(side):
        a.add_(10)
    torch.cuda.synchronize()
    assert a.tolist() == [10.0] * 4


@RACES
def test_time_that_passes_orders_nothing(side):
    a = torch.ones(10, device="cuda").mul_(2)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        b = a.sum()
    torch.cuda.synchronize()
    assert b.item() == 0 and kinds() == [STALE]


def test_parts_of_a_tensor_are_memory_of_their_own(side):
    a = torch.zeros(8, 8, device="cuda")
    side.wait_stream(here())
    a[:4].add_(1)
    a[:, ::2][4:].add_(3)
    with torch.cuda.stream(side):
        a[4:, 1::2].add_(2)
        total = a[4:, 1::2].sum()
    torch.cuda.synchronize()
    assert total.item() == 2 * 16
    assert virtualgpu.races() == []


@RACES
def test_and_parts_that_overlap_are_not(side):
    a = torch.zeros(8, device="cuda")
    side.wait_stream(here())
    a[:5].add_(1)
    with torch.cuda.stream(side):
        total = a[4:].sum()
    torch.cuda.synchronize()
    assert total.item() == 0 and kinds() == [STALE]


@RACES
def test_two_writers(side):
    a = torch.zeros(4, device="cuda")
    side.wait_stream(here())
    a.fill_(1)
    with torch.cuda.stream(side):
        a.fill_(2)
    torch.cuda.synchronize()
    assert kinds() == [BOTH_WRITE]


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(1000.0, device="cuda"), lambda: torch.eye(40, device="cuda")]
)
def test_what_an_operator_has_just_made_races_with_nobody(side, make):
    """Check operators that resize their output, whose memory is therefore new."""
    torch.ones(1000, device="cuda").mul_(2)
    made = make()
    assert made.sum().item() == made.cpu().sum().item() and virtualgpu.races() == []


# A reader after the next writer.


@RACES
def test_what_is_overwritten_too_early_is_read_so_and_all_that_is_made_of_it(side):
    a = torch.ones(1000, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        doubled = a * 2
        total = doubled.sum()
        doubled.add_(1)
    a.fill_(7)
    side.synchronize()
    assert (total.item(), doubled[0].item()) == (14000, 15)
    assert kinds() == [OVERWRITTEN]


def freed_while_read(side: torch.cuda.Stream, recorded: bool) -> float:
    x = torch.ones(1000, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        y = (x * 2).sum()
    if recorded:
        x.record_stream(side)
    del x
    torch.full((1000,), 7.0, device="cuda")
    side.synchronize()
    return y.item()


@RACES
def test_a_freed_block_that_another_stream_still_reads(side):
    assert freed_while_read(side, recorded=False) == 14000
    assert kinds() == [OVERWRITTEN]


def test_and_once_its_stream_is_recorded(side):
    assert freed_while_read(side, recorded=True) == 2000
    assert virtualgpu.races() == []


@RACES
def test_a_smaller_tensor_in_the_freed_block_overwrites_its_part(side):
    x = torch.ones(1000, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        y = x.sum()
    del x
    torch.full((100,), 2.0, device="cuda")
    side.synchronize()
    assert y.item() == 1100


def test_a_freed_block_that_is_reused_in_order(side):
    for _ in range(3):
        x = torch.ones(1000, device="cuda")
        side.wait_stream(here())
        with torch.cuda.stream(side):
            y = x.sum()
        here().wait_stream(side)
        del x
        assert y.item() == 1000
    assert virtualgpu.races() == []


# Reports


def test_a_race_names_both_lines(side):
    a = torch.ones(10, device="cuda").mul_(2)
    with torch.cuda.stream(side), pytest.warns(RaceWarning, match="mul_.*sum|sum.*mul_") as told:
        a.sum()
        a.sum()  # another line, another race
    first, second = virtualgpu.races()
    assert first.first.text.startswith("a = torch.ones") and first.second.text == "a.sum()"
    assert (
        first.first.line.startswith("test_race_detector.py:")
        and first.first.line != first.second.line != second.second.line
    )
    assert told[0].filename == __file__ and str(told[0].lineno) == first.second.line.split(":")[1]
    assert "the default stream of cuda:0" in str(first) and "stream 1 of cuda:0" in str(first)


@RACES
def test_the_same_two_lines_are_told_once(side):
    kept = []
    for _ in range(5):
        kept.append(torch.ones(10, device="cuda").mul_(2))
        with torch.cuda.stream(side):
            kept[-1].sum()
    assert len(virtualgpu.races()) == 1


def test_races_without_a_virtual_machine():
    virtualgpu.use(None)
    with pytest.raises(RuntimeError, match="virtual"):
        virtualgpu.races()


@RACES
def test_without_values_races_are_told_too():
    virtualgpu.use(None)
    with virtualgpu.use(gpus=1, values=False):
        stream = torch.cuda.Stream()
        a = torch.empty(10_000, 10_000, device="cuda").normal_()
        with torch.cuda.stream(stream):
            a.sum()
        assert kinds() == [STALE]


def test_a_warning_that_is_an_error_leaves_the_machine_usable(side):
    a = torch.ones(10, device="cuda").mul_(2)
    with warnings.catch_warnings(), torch.cuda.stream(side):
        warnings.simplefilter("error")
        with pytest.raises(RaceWarning):
            a.sum()
        side.wait_stream(torch.cuda.default_stream())
        assert a.sum().item() == 20


# Memory of the detector


def test_watching_keeps_no_memory_of_the_gpus_and_none_of_the_hosts_for_good(side):
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(side):
        for _ in range(100):
            x = torch.ones(1000, device="cuda")
            y = (x * 2).sum()
        del x, y
        assert torch.cuda.memory_allocated() == before
    torch.cuda.synchronize()
    from virtualgpu import hardware

    assert not hardware.machine().races._in_flight


def test_what_copies_have_replaced_is_let_go_when_the_host_has_waited():
    """Check that no old values are kept after ten copies of 32 MiB with waits."""
    process = psutil.Process()
    page_locked, device = torch.ones(8 << 20).pin_memory(), torch.ones(8 << 20, device="cuda")
    before = process.memory_info().rss
    for _ in range(5):
        device.copy_(page_locked, non_blocking=True)
        page_locked.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
    assert process.memory_info().rss - before < 4 * (32 << 20)


def test_operands_on_two_devices_are_refused_before_anybody_looks_for_races(side):
    x, y = torch.ones(4, 4, device="cuda:0"), torch.ones(4, 4, device="cuda:1")
    with (
        warnings.catch_warnings(),
        pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"),
    ):
        warnings.simplefilter("error")
        y @ x
    assert virtualgpu.races() == []


def test_what_was_loaded_from_a_file_can_be_written_to():
    with torch.cuda.stream(torch.cuda.Stream()):
        file = io.BytesIO()
        torch.save(torch.ones(5, device="cuda"), file)
        file.seek(0)
        loaded = torch.load(file)
        assert loaded.mul_(3).tolist() == [3.0] * 5


def reallocate(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(36)


@pytest.mark.parametrize(
    "resize", [reallocate, lambda x: x.resize_(9), lambda x: torch.add(x.new_zeros(9), 1, out=x)]
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_memory_that_was_read_can_be_resized_and_written(resize):
    """Check memory that a kernel has read, which the detector shares with a snapshot.

    PyTorch 2.13 cannot write such memory after it was resized.
    """
    x = torch.zeros(4, device="cuda")
    twice = 2 * x
    resize(x)
    with _DisableTorchDispatch():  # collectives write like this
        x.fill_(1.0)
    assert x.tolist() == [1.0] * len(x) and twice.tolist() == [0.0] * 4


def test_memory_that_was_resized_like_another_can_be_resized_again():
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.rand(1, device="cuda")
        x.add_(1).resize_as_(torch.rand(3, device="cuda"))
        assert x.resize_(3).add_(1).shape == (3,)


# Listeners


@RACES
def test_who_watches_hears_of_races_that_were_found_before(side):
    def race() -> None:
        x = torch.zeros(8, device="cuda")
        with torch.cuda.stream(side):
            x + 1
        torch.cuda.synchronize()

    race()
    before = len(virtualgpu.races())
    with hardware.machine().races.watched() as found:
        race()
        race()
    race()
    assert len(found) == 1 and len(virtualgpu.races()) == before


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@RACES
@pytest.mark.parametrize("layer", [torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(8, 4)])
def test_a_layer_that_reads_memory_reused_too_early_is_computed_again_in_tf32(layer, tf32):
    layer = layer.cuda().requires_grad_(False)
    stream = torch.cuda.Stream()
    batches = [torch.rand(1, 3, 8, 8).pin_memory() for _ in range(2)]
    with torch.cuda.stream(stream):
        first = batches[0].to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda._sleep(10**8)
    found = layer(first)
    address = first.data_ptr()
    del first
    with torch.cuda.stream(stream):
        second = batches[1].to("cuda", non_blocking=True)
    assert second.data_ptr() == address and kinds() == [OVERWRITTEN]
    torch.cuda.synchronize()
    assert torch.equal(found, layer(second))


# Functions that compute values themselves.

FUSED = {
    "RNN": (lambda: torch.nn.RNN(8, 8), lambda layer, x: layer(x)[0]),
    "LSTMCell": (lambda: torch.nn.LSTMCell(8, 8), lambda layer, x: layer(x[:, 0])[0]),
    "GRUCell": (lambda: torch.nn.GRUCell(8, 8), lambda layer, x: layer(x[:, 0])),
    "RMSNorm": (lambda: torch.nn.RMSNorm(8), lambda layer, x: layer(x)),
    "attention": (
        lambda: torch.nn.Identity(),
        lambda layer, x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    ),
}


@RACES
@pytest.mark.parametrize("name", FUSED)
def test_fused_functions_race_with_other_streams(side, name):
    make, run = FUSED[name]
    layer = make().cuda()
    x = torch.zeros(4, 2, 8, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        x.fill_(1.0)
    run(layer, x)  # reads too early
    of_input = kinds()
    torch.cuda.synchronize()
    y = run(layer, x.requires_grad_())
    with torch.cuda.stream(side):
        y.detach().add(1)  # reads too early
    of_output = kinds()[len(of_input) :]
    torch.cuda.synchronize()
    gradient = torch.zeros_like(y)
    side.wait_stream(here())
    with torch.cuda.stream(side):
        gradient.fill_(1.0)
    y.backward(gradient)
    of_gradient = kinds()[len(of_input + of_output) :]
    assert set(of_input) == set(of_output) == set(of_gradient) == {STALE}


@pytest.mark.parametrize("name", FUSED)
def test_fused_functions_in_order_do_not_race(side, name):
    make, run = FUSED[name]
    layer = make().cuda()
    x = torch.zeros(4, 2, 8, device="cuda", requires_grad=True)
    side.wait_stream(here())
    with torch.cuda.stream(side):
        y = run(layer, x)
        y.sum().backward()
    here().wait_stream(side)
    run(layer, x).add(y.detach()).sum().backward()
    assert kinds() == []
