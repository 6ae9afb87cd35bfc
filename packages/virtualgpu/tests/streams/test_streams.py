"""Streams and events of torch.cuda on a virtual machine."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from virtualgpu import errors


@pytest.fixture(autouse=True)
def used(machine):
    return machine


def busy() -> None:
    """Queue some milliseconds of work on the current stream."""
    torch.cuda._sleep(10_000_000)


def test_current_default_and_own_streams():
    own = torch.cuda.Stream()
    assert own != torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(own) as entered:
        assert entered is None
        assert torch.cuda.current_stream() == own
        with own:
            assert torch.cuda.current_stream() == own
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_stream_that_was_entered_is_no_garbage():
    own = torch.cuda.Stream()
    with own:
        pass
    left = weakref.ref(own)
    gc.disable()
    try:
        del own
        assert left() is None
    finally:
        gc.enable()


def test_a_stream_of_another_device_brings_its_device_along():
    other = torch.cuda.Stream(device=1, priority=-1)
    with torch.cuda.stream(other):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream(1) == other
        assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert (other.priority, other.device, other.device_index) == (-1, torch.device("cuda:1"), 1)


def test_streams_and_events_are_torchs_own_kinds():
    assert isinstance(torch.cuda.Stream(), torch.Stream)
    assert isinstance(torch.cuda.Event(), torch.Event)


def test_priorities():
    low, high = torch.cuda.Stream.priority_range()
    assert (low, high) == (0, -3)
    assert [torch.cuda.Stream(priority=p).priority for p in (1, 0, -1, -2, -3, -4)] == [
        0,
        0,
        -1,
        -2,
        -3,
        -3,
    ]


def test_events_of_two_devices_have_no_time_between_them():
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for index, event in enumerate(events):
        event.record(torch.cuda.current_stream(index))
        event.synchronize()
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        events[0].elapsed_time(events[1])


def test_the_generic_stream_serves_too():
    stream = torch.Stream("cuda:1")
    assert stream.device == torch.device("cuda:1")
    with stream:
        assert torch.accelerator.current_stream() == stream


def test_generic_streams_and_events_show_themselves_as_in_cpp():
    event = torch.Event("cuda:1")
    assert event.device == torch.device("cuda") and event.event_id == 0
    assert repr(event).startswith("torch.Event device_type=cuda, device_index=-1, event_flag=0")
    event.record(torch.cuda.current_stream(1))
    assert event.device == torch.device("cuda:1") and "device_index=1" in repr(event)
    assert torch.cuda.Event().device is None
    stream = torch.Stream("cuda:1")
    shown = f"torch.Stream device_type=cuda, device_index=1, stream_id={stream.stream_id}"
    assert repr(stream) == shown
    assert repr(torch.accelerator.current_stream()).startswith("torch.Stream device_type=cuda")


def test_a_stream_is_entered_again_inside_its_own_block():
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    with stream:
        with stream:
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == before


def test_a_cpu_tensor_records_no_stream():
    with pytest.raises(NotImplementedError, match="Could not run 'aten::record_stream'"):
        torch.ones(1).record_stream(torch.cuda.Stream())


def test_generic_streams_and_events_of_the_cpu_are_pytorchs():
    assert torch.Event("cpu").device == torch.Stream("cpu").device == torch.device("cpu")


def test_each_device_has_32_streams_of_a_priority():
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert len(set(streams)) == 32 and streams[0] == streams[32]
    assert torch.cuda.Stream(device=1) not in streams


def test_query_and_synchronize():
    stream = torch.cuda.Stream()
    assert stream.query()
    with torch.cuda.stream(stream):
        busy()
    assert not stream.query() and torch.cuda.current_stream().query()
    stream.synchronize()
    assert stream.query()
    busy()
    torch.cuda.synchronize()
    assert torch.cuda.current_stream().query()


def test_synchronize_waits_for_one_device_only():
    busy()
    torch.cuda.synchronize(1)
    assert not torch.cuda.current_stream(0).query()
    torch.cuda.synchronize("cuda:0")
    assert torch.cuda.current_stream(0).query()


def test_wait_stream_orders_two_streams():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        busy()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        end = torch.cuda.Event()
        end.record()
    assert not end.query()
    first.synchronize()
    assert end.query()


def test_events_time_what_lies_between_them():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert start.query()  # nothing has been recorded yet
    start.record()
    busy()
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert end.query()
    # an H200's clock is at most 1.98 GHz
    assert start.elapsed_time(end) == pytest.approx(10_000_000 / 1.98e9 * 1e3, rel=0.3)
    assert start.elapsed_time(end) > 0 > end.elapsed_time(start)


def test_an_event_may_be_waited_for_on_a_stream():
    stream = torch.cuda.Stream()
    busy()
    event = torch.cuda.current_stream().record_event()
    stream.wait_event(event)
    assert not stream.query()
    event.wait(torch.cuda.Stream(device=1))
    event.synchronize()


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            lambda e, t: e.elapsed_time(e),
            ValueError,
            "Both events must be created with argument 'enable_timing=True'",
        ),
        (
            lambda e, t: t.elapsed_time(t),
            ValueError,
            "Both events must be recorded before calculating elapsed time",
        ),
        (lambda e, t: torch.cuda.Stream(device="cpu"), ValueError, "cpu"),
        (
            lambda e, t: torch.cuda.Stream(device=9),
            errors.AcceleratorError,
            "invalid device ordinal",
        ),
        (lambda e, t: torch.cuda.Event(bogus=1), TypeError, "bogus"),
        (
            lambda e, t: e.record() or e.record(torch.cuda.Stream(1)),
            RuntimeError,
            "does not match recording stream's device",
        ),
        (
            lambda e, t: torch.cuda.ExternalStream(1),
            NotImplementedError,
            "not supported by the virtual GPU",
        ),
    ],
)
def test_mistakes(mistake, error, text):
    with pytest.raises(error, match=text):
        mistake(torch.cuda.Event(), torch.cuda.Event(enable_timing=True))


def test_unrecorded_events_hold_nothing_up():
    torch.cuda.Event().synchronize()
    torch.cuda.Event().wait()


def test_a_thread_starts_on_device_0_and_the_default_streams():
    def look() -> tuple[int, bool]:
        seen = (
            torch.cuda.current_device(),
            torch.cuda.current_stream() == torch.cuda.default_stream(),
        )
        torch.cuda.set_device(3)
        torch.cuda.set_stream(torch.cuda.Stream())
        return seen

    torch.cuda.set_device(2)
    torch.cuda.set_stream(torch.cuda.Stream())
    mine = torch.cuda.current_stream()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() == (0, True)
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (2, mine)


def test_memory_freed_on_its_own_stream_waits_for_no_one_but_recorded_ones():
    stream = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy()
        y = x * 2
    x.record_stream(stream)
    del x
    z = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    again = torch.ones(1, device="cuda")  # an allocation checks for frees that have waited
    assert torch.cuda.memory_allocated() == 2 * 4096 + 512
    del y, z, again


def test_a_node_of_a_backward_finds_its_forwards_stream_before_it_does_anything():
    found = {}

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            found["node"] = torch.cuda.current_stream()
            other.wait_stream(found["node"])
            with torch.cuda.stream(other):
                gradient = gradient * 2
                found["own choice"] = torch.cuda.current_stream()
            found["node"].wait_stream(other)
            return gradient

    forward, around, other = (torch.cuda.Stream() for _ in range(3))
    x = torch.ones(3, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: found.update(leaf=torch.cuda.current_stream()))
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        y = Noted.apply(x)
    around.wait_stream(forward)
    with torch.cuda.stream(around):
        y.sum().backward()
        assert torch.cuda.current_stream() == around
    assert found == {"node": forward, "own choice": other, "leaf": forward}


def test_streams_and_events_cannot_be_pickled(machine):
    with pytest.raises(TypeError, match="cannot pickle 'Stream' object"):
        copy.deepcopy(torch.cuda.Stream())
    with pytest.raises(TypeError, match="cannot pickle 'Event' object"):
        copy.deepcopy(torch.cuda.Event())
