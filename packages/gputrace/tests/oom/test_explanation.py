"""Explanations of out-of-memory errors: one for each verdict, and some with missing numbers."""

import contextlib
import gc
import os

import pytest
import torch
from torch import nn

import gputrace
import virtualgpu
from gputrace.oom.situation import situation_of
from virtualgpu import hardware
from virtualgpu.allocator.oom import size_text

MiB, GiB = 1 << 20, 1 << 30
CONTEXT = 126 * MiB  # of a virtual T4


@pytest.fixture
def card():
    """A virtual GPU with 2 GiB."""
    with virtualgpu.use(gpus=2, memory="2GiB", like="T4") as used:
        yield used


def take(mebibytes, device="cuda"):
    return torch.empty(round(mebibytes * MiB), dtype=torch.uint8, device=device)


@contextlib.contextmanager
def running_out(max_events=200_000):
    """Record a block that ends in an out-of-memory error."""
    with pytest.raises(torch.OutOfMemoryError), gputrace.record(max_events) as trace:
        yield trace


def sizes(explanation):
    return {name: size for name, size, _ in explanation.numbers.rows}


def meanings(explanation):
    return {name: meaning for name, _, meaning in explanation.numbers.rows}


def test_no_error_no_explanation(card):
    with gputrace.record() as trace:
        take(1)
    assert trace.oom is None


def test_too_much_live(card):
    with running_out() as trace:
        weights = torch.empty(300 * MiB, dtype=torch.uint8, device="cuda")
        batch = [torch.empty(100 * MiB, dtype=torch.uint8, device="cuda") for _ in range(15)]
        take(200)
    oom = trace.oom
    assert oom.verdict == "too much in use"
    # 2048 MiB less the context; 300, 1500 and 200 were wanted
    assert "78 MiB" in oom.reason
    assert oom.remedies[0].endswith("(1.465 GiB, other): at least 78 MiB less is needed.")
    assert "empty_cache() would not help" in oom.remedies[-1]
    assert sizes(oom) == {
        "tried to allocate": "200.00 MiB",
        "total capacity": "2.00 GiB",
        "free": "122.00 MiB",
        "this process": "1.88 GiB",
        "allocated by PyTorch": "1.76 GiB",
        "reserved but unallocated": "0 bytes",
    }
    assert meanings(oom)["this process"].startswith(
        "its segments, and 126 MiB for the CUDA context"
    )
    assert meanings(oom)["allocated by PyTorch"].startswith("16 live blocks")
    assert [row[0] for row in oom.holders.rows] == ["1.465 GiB", "300 MiB"]
    assert oom.holders.rows[1][4].startswith("weights = torch.empty(300 * MiB")
    assert weights.is_cuda and batch


def test_every_number_stands_in_the_message(card):
    """The numbers from the blocks equal those in PyTorch's error to the last decimal place."""
    with running_out() as trace:
        kept = [take(9) for _ in range(180)]
        del kept[::2]
        take(1000)
    for name, size in sizes(trace.oom).items():
        assert size in trace.error, name


def test_a_smaller_batch_is_advised_without_a_share_that_later_lines_would_refute():
    with virtualgpu.use(gpus=1, memory="2GiB", values=False), gputrace.record() as trace:
        net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)]).cuda()
        with contextlib.suppress(torch.OutOfMemoryError):
            # of the last layer there is no room for the output
            net(torch.empty(38_000, 1024, device="cuda"))
    (advice,) = (remedy for remedy in trace.oom.remedies if "batch" in remedy)
    assert trace.oom.verdict == "too much in use" and trace.oom.holders.rows[0][1] == "activations"
    assert (
        advice.startswith("Take a smaller batch: activations and this request, ")
        and "%" not in advice
    )


def test_of_a_leak_no_smaller_batch_is_the_cure(card):
    with running_out() as trace:
        net, kept = nn.Linear(64, 64).cuda(), []
        for _ in range(100):
            x = torch.zeros(1 << 18, 64, device="cuda")
            kept.append(torch.tanh(net(x)))
    (advice,) = (remedy for remedy in trace.oom.remedies if "batch" in remedy)
    assert advice.startswith(
        "Memory grows by 128 MiB a step, so a smaller batch only puts the error off"
    )


def test_holes_that_would_have_served_one_step_more_are_not_why_a_loop_ran_out(card):
    with running_out() as trace:
        holes = [take(8) for _ in range(6)]
        del holes[::2]  # 36 MiB are free in pieces at the end
        kept = []
        for _ in range(100):
            kept.append(take(12).repeat(2))
    oom = trace.oom
    assert (
        oom.verdict == "too much in use"
        and "1.84 GiB are live, 24 MiB more each step, and 22 MiB of what the" in oom.reason
    )
    assert oom.remedies[0].startswith("Memory grows by 24 MiB a step") and not any(
        "less is needed" in told for told in oom.remedies
    )


@pytest.mark.slow
def test_a_gradient_of_parameters_does_not_shrink_with_the_batch():
    def train_once(rows):
        # 256 MiB each, and their gradients
        net = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(4)]).cuda()
        net(torch.randn(rows, 8192, device="cuda")).sum().backward()

    def advice(rows):
        with gputrace.record() as trace, contextlib.suppress(torch.OutOfMemoryError):
            train_once(rows)
        return [remedy for remedy in trace.oom.remedies if "batch" in remedy]

    with virtualgpu.use(gpus=1, memory="2GiB", values=False):
        (told,) = advice(64)
        assert told.startswith("A smaller batch alone would not do") and "does not shrink" in told
        assert advice(1)  # as it says


def test_a_request_beyond_the_card(card):
    with running_out() as trace:
        take(3000)
    oom = trace.oom
    assert oom.verdict == "larger than the GPU"
    assert "test_explanation.py" in oom.reason and "2.93 GiB" in oom.reason
    assert "1.877 GiB at most" in oom.remedies[0]


def test_a_request_beyond_all_measure(card):
    with running_out() as trace:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    assert trace.oom.verdict == "larger than the GPU" and "more than 1 EB" in trace.oom.reason


def leave_holes():
    """Leave a segment that was cut into smaller blocks, most of which have been freed."""
    big = [take(700), take(700)]
    del big
    pieces = [take(50) for _ in range(28)]
    return pieces[::4]


def test_fragmentation(card):
    with running_out() as trace:
        kept = leave_holes()
        take(600)
    oom = trace.oom
    assert oom.verdict == "fragmentation"
    assert "1.025 GiB are free" in oom.reason and "in 8 pieces of at most 150 MiB" in oom.reason
    assert (
        "expandable_segments:True" in oom.remedies[0] and "max_split_size_mb:600" in oom.remedies[1]
    )
    assert "7 blocks, 350 MiB" in oom.remedies[-1] and len(kept) == 7


@pytest.mark.parametrize(
    ("setting", "suggested"),
    [("expandable_segments:True", []), ("max_split_size_mb:1000", ["expandable_segments:True"])],
)
def test_settings_in_force_are_not_suggested(monkeypatch, setting, suggested):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with virtualgpu.use(gpus=1, memory="2GiB"), running_out() as trace:
        kept = leave_holes() if suggested else [take(15) for _ in range(120)][::2]
        take(600)
    assert trace.oom.verdict == "fragmentation" and kept
    advice = str(trace.oom.remedies)
    assert [
        name for name in ("expandable_segments:True", "max_split_size_mb") if name in advice
    ] == suggested
    if not suggested:
        assert sizes(trace.oom)["reserved but unallocated"] == "900.00 MiB"


def test_settings_that_would_not_help_are_not_suggested(card):
    """The blocks share segments of 20 MiB, in which no setting makes space."""
    with running_out() as trace:
        big = take(1600)
        del big
        kept = [take(5) for _ in range(320)][::2]
        take(600)
    oom = trace.oom
    assert oom.verdict == "fragmentation" and len(kept) == 160
    assert len(oom.remedies) == 1 and oom.remedies[0].startswith(
        "Free what keeps these segments in place"
    )


def test_cached_by_another_stream(card):
    with running_out() as trace:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            cached = take(1500)
            del cached
            kept = take(100)
        take(800)
    oom = trace.oom
    assert oom.verdict == "cached by another stream" and kept.is_cuda
    assert "1.367 GiB in 1 piece of at most 1.367 GiB, free in segments of stream 1" in oom.reason
    assert "record_stream" in oom.remedies[0] and "1 block, 100 MiB" in oom.remedies[1]


def test_the_stream_of_the_request_counts(card):
    """The request comes from the side stream here, in reverse to the test above."""
    with running_out() as trace:
        cached = take(1500)
        del cached
        kept = take(100)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            take(800)
    assert trace.oom.verdict == "cached by another stream" and kept.is_cuda
    assert "It ran on stream 1" in trace.oom.reason


@pytest.fixture
def neighbour(card):
    """Another process that holds 1000 MiB of the first GPU."""
    allocator = hardware.machine().gpus[0].allocator
    others, processes = allocator._others, allocator._processes
    allocator._others = lambda: others() + 1000 * MiB
    allocator._processes = lambda: [*processes(), (4711, 1000 * MiB)]
    return allocator


def test_another_process(neighbour):
    with running_out() as trace:
        kept = take(400)
        take(600)
    oom = trace.oom
    assert oom.verdict == "another process" and kept.is_cuda
    assert oom.remedies[0] == "End process 4711 (1000 MiB) if it is yours."
    assert (
        sizes(oom)["process 4711"] == "1000.00 MiB"
        and "Other processes hold 1000 MiB" in oom.reason
    )


def test_another_process_that_the_driver_hides(neighbour):
    neighbour._processes = lambda: [(os.getpid(), CONTEXT + neighbour.reserved)]
    with running_out() as trace:
        kept = take(400)
        take(600)
    assert trace.oom.verdict == "another process" and kept.is_cuda
    assert "nvidia-smi" in trace.oom.remedies[0]
    assert situation_of(trace).others == pytest.approx(1000 * MiB, abs=MiB)


def test_a_container_knows_this_process_by_another_number(card):
    allocator = hardware.machine().gpus[0].allocator
    allocator._processes = lambda: [(98765, CONTEXT + allocator.reserved)]
    with running_out() as trace:
        kept = take(1500)
        take(600)
    assert trace.oom.verdict == "too much in use" and kept.is_cuda
    assert "most likely this one" in meanings(trace.oom)["process 98765"]


@pytest.mark.parametrize("caught", [False, True])
def test_a_memory_limit(card, caught):
    """The limit is known even without the error's message, because the GPU had space left."""
    torch.cuda.set_per_process_memory_fraction(0.25)
    with contextlib.suppress(torch.OutOfMemoryError), gputrace.record() as trace:
        kept = take(400)
        with contextlib.suppress(torch.OutOfMemoryError if caught else ()):
            take(200)
    oom = trace.oom
    assert oom.verdict == "a memory limit" and kept.is_cuda and bool(trace.error) != caught
    if not caught:
        assert "A limit of 512 MiB" in oom.reason and sizes(oom)["allowed"] == "512.00 MiB"
    assert "set_per_process_memory_fraction" in oom.remedies[0]


def test_an_error_caught_in_the_block(card):
    with gputrace.record() as trace:
        kept = [take(100) for _ in range(18)]
        with contextlib.suppress(torch.OutOfMemoryError):
            take(200)
        kept.clear()
    oom = trace.oom
    assert trace.error == "" and oom.verdict == "too much in use"
    assert "the allocator's own figures" in oom.numbers.caption
    assert (
        sizes(oom)["outside"] == size_text(CONTEXT)
        and sizes(oom)["allocated by PyTorch"] == "1.76 GiB"
    )


def test_the_last_of_two_is_explained(card):
    with gputrace.record() as trace:
        for size, device in ((3000, "cuda:0"), (2500, "cuda:1")):
            with contextlib.suppress(torch.OutOfMemoryError):
                take(size, device)
    assert trace.oom.title.startswith("Out of memory on cuda:1") and "2.441 GiB" in trace.oom.reason


def test_of_two_the_one_that_left_the_block(card):
    with running_out() as trace:
        try:
            take(3000)
        except torch.OutOfMemoryError:
            with contextlib.suppress(torch.OutOfMemoryError):
                take(2500)
            raise
    assert "2.93 GiB" in trace.oom.reason


def test_lost_events(card):
    kept = []
    with running_out(max_events=5) as trace:
        while True:
            kept.append(take(100))
    oom = trace.oom
    assert oom.verdict == "too much in use"
    assert f"{trace.lost} events were lost" in meanings(oom)["allocated by PyTorch"]
    assert oom.holders.rows == () and sizes(oom)["allocated by PyTorch"] == "1.86 GiB"


def test_lost_events_that_hide_the_reason(card):
    with running_out(max_events=5) as trace:
        kept = leave_holes()
        take(600)
    assert trace.oom.verdict == "not known" and kept
    assert "larger max_events" in trace.oom.remedies[0]


def test_a_stored_trace_explains_the_same(card, tmp_path):
    with running_out() as trace:
        kept = leave_holes()
        take(600)
    trace.save(tmp_path / "trace.npz")
    assert repr(gputrace.Trace.load(tmp_path / "trace.npz").oom) == repr(trace.oom) and kept


def test_as_html(card):
    """The HTML is well formed, and source lines are text in a font for code."""
    from xml.etree import ElementTree

    with running_out() as trace:
        assert "<b>" and take(3000)
    html = trace.oom._repr_html_()
    ElementTree.fromstring(f"<div>{html}</div>")
    assert "<b>" not in html and "<code>" in html


@pytest.fixture
def small_share():
    """A real GPU with a limit of 2 GiB, without memory of earlier tests.

    An error and the frames in its traceback hold each other, so they must be collected.
    """
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(
        2 * GiB / torch.cuda.get_device_properties(0).total_memory
    )
    yield
    torch.cuda.set_per_process_memory_fraction(before)


@pytest.mark.gpu
def test_on_a_real_gpu_a_limit(small_share):
    with running_out() as trace:
        kept = [take(100) for _ in range(15)]
        take(800)
    assert trace.oom.verdict == "a memory limit" and kept
    assert sizes(trace.oom)["allowed"] == "2.00 GiB"
    for name in (
        "tried to allocate",
        "total capacity",
        "allocated by PyTorch",
        "reserved but unallocated",
    ):
        assert sizes(trace.oom)[name] in trace.error, name


@pytest.mark.gpu
def test_on_a_real_gpu_fragmentation(small_share):
    with running_out() as trace:
        kept = leave_holes()
        take(900)
    assert trace.oom.verdict == "fragmentation" and len(kept) == 7
    assert sizes(trace.oom)["reserved but unallocated"] in trace.error


@pytest.mark.gpu
def test_on_a_real_gpu_another_stream(small_share):
    with gputrace.record() as trace:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            cached = take(1500)
            del cached
            kept = take(100)
        with contextlib.suppress(torch.OutOfMemoryError):
            take(800)
    assert trace.oom.verdict == "cached by another stream" and kept.is_cuda
    assert "It ran on the default stream" in trace.oom.reason
