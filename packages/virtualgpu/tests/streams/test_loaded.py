"""Races of memory that gets its values without an operator with its first asynchronous reader."""

import io
import warnings

import pytest
import torch

import virtualgpu


def saved(value, zipped: bool = True) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return file


def loaded(folder):
    return torch.load(saved(torch.full((4,), 5.0, device="cuda")))


def loaded_from_the_host(folder):
    return torch.load(saved(torch.full((4,), 5.0)), map_location="cuda")


def loaded_from_an_old_file(folder):
    return torch.load(saved(torch.full((4,), 5.0, device="cuda"), zipped=False))


def loaded_from_a_mapped_file(folder):
    torch.save(torch.full((4,), 5.0), folder / "values.pt")
    return torch.load(folder / "values.pt", mmap=True, map_location="cuda")


def loaded_within_a_module(folder):
    layer = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 5.0)
    module = torch.load(saved(layer), map_location="cuda", weights_only=False)
    return module.weight.detach()[0]


def storage_of_bytes(folder):
    storage = torch.UntypedStorage(torch.full((4,), 5.0).view(torch.uint8).tolist(), device="cuda")
    return torch.empty(0, device="cuda").set_(storage, 0, (4,), (1,))


WAYS = [
    loaded,
    loaded_from_the_host,
    loaded_from_an_old_file,
    loaded_from_a_mapped_file,
    loaded_within_a_module,
    storage_of_bytes,
]


@pytest.fixture(params=["one stream", "stream before", "stream after"])
def make(request, tmp_path):
    """Return a function that makes a tensor, with a second stream before, after or not at all."""

    def make_with_stream(way):
        if request.param == "stream before":
            torch.cuda.Stream()
        x = way(tmp_path)
        if request.param == "stream after":
            torch.cuda.Stream()
        return x

    with virtualgpu.use(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield make_with_stream


@pytest.mark.parametrize("way", WAYS)
def test_an_asynchronous_copy_to_the_host_finds_the_values(make, way):
    x = make(way)
    found = x.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert found.tolist() == [5.0] * 4


@pytest.mark.parametrize("way", WAYS)
def test_an_asynchronous_copy_to_pinned_memory_finds_the_values(make, way):
    x = make(way)
    found = torch.zeros(4).pin_memory()
    found.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert found.tolist() == [5.0] * 4


@pytest.mark.parametrize("way", WAYS)
def test_another_stream_finds_the_values(make, way):
    x = make(way)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        doubled = x * 2
    stream.synchronize()
    assert doubled.tolist() == [10.0] * 4


def test_a_load_takes_the_time_of_a_copy_and_holds_the_host():
    with virtualgpu.use(1):
        values = saved(torch.ones(1 << 20))
        torch.ones(1, device="cuda")
        before = virtualgpu.host_time()
        torch.load(values, map_location="cuda")
        of_load = virtualgpu.host_time() - before
        values.seek(0)
        on_host = torch.load(values)
        before = virtualgpu.host_time()
        on_host.cuda()
        of_copy = virtualgpu.host_time() - before
    assert of_load >= of_copy * 0.9 > 0
