"""Events of several processes, with one process as both, and a handle from another number."""

import pytest
import torch

import virtualgpu
from virtualgpu.errors import AcceleratorError
from virtualgpu.processes import shared_events
from virtualgpu.processes.shared_events import HANDLE_BYTES

CYCLES = 50_000_000  # about 25 ms


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """A list of the seconds that the host really waited."""
    seconds = []
    monkeypatch.setattr(shared_events, "wait", seconds.append)
    with virtualgpu.use(2, like="H200"):
        yield seconds


def elsewhere(event):
    """Return the same event as another process would open it."""
    address = event.ipc_handle().partition(b":")[2]
    return torch.cuda.Event.from_ipc_handle(
        event.device, (b"0:" + address).ljust(HANDLE_BYTES, b"\0")
    )


def test_what_one_process_records_another_waits_for(waited):
    event = torch.cuda.Event(interprocess=True)
    other = elsewhere(event)
    assert event.query() and other.query() and other.device == torch.device("cuda:0")
    torch.cuda._sleep(CYCLES)
    event.record()
    assert not other.query() and not event.query()
    other.synchronize()
    assert other.query() and 0.01 < sum(waited) < 0.1
    assert event.query()  # what has happened there has happened here, too


def test_who_has_received_an_event_may_record_it(waited):
    event = torch.cuda.Event(interprocess=True)
    other = elsewhere(event)
    torch.cuda._sleep(CYCLES)
    event.record()
    event.synchronize()
    assert not waited  # its own recording
    torch.cuda._sleep(CYCLES)
    other.record()
    assert not event.query()
    event.synchronize()
    assert event.query() and len(waited) == 1


def test_a_stream_waits_for_an_event_of_another_process():
    event = torch.cuda.Event(interprocess=True)
    other = elsewhere(event)
    torch.cuda._sleep(CYCLES)
    event.record()
    stream, start, end = (
        torch.cuda.Stream(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    start.record(stream)
    other.wait(stream)
    end.record(stream)
    torch.cuda.synchronize()
    assert 10 < start.elapsed_time(end) < 100


def test_it_belongs_to_the_gpu_where_it_is_exported_first():
    event = torch.cuda.Event(interprocess=True)
    assert event.device is None
    with torch.cuda.device(1):
        assert len(event.ipc_handle()) == HANDLE_BYTES
    event.ipc_handle()
    assert event.device == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            lambda: torch.cuda.Event(interprocess=True, enable_timing=True).record(),
            AcceleratorError,
            "invalid argument",
        ),
        (lambda: torch.cuda.Event().ipc_handle(), AcceleratorError, "invalid resource handle"),
        (
            lambda: torch.cuda.Event.from_ipc_handle(0, b""),
            RuntimeError,
            "expects byte-like object of size 64, but got 0",
        ),
        (
            lambda: torch.cuda.Event.from_ipc_handle(0, b"0:/proc/0/fd/0:0".ljust(64, b"\0")),
            AcceleratorError,
            "invalid resource handle",
        ),
        (
            lambda: torch.cuda.Event.from_ipc_handle(
                0, torch.cuda.Event(interprocess=True).ipc_handle()
            ),
            AcceleratorError,
            "invalid device context",
        ),
    ],
)
def test_mistakes_with_shared_events(mistake, error, text):
    with pytest.raises(error, match=text):
        mistake()
