"""The numbers of streams are PyTorch's, with 32 streams of each of four priorities in turn."""

import pytest
import torch

import virtualgpu
from virtualgpu.stream_numbers import POOL_STREAMS, StreamPool, priority_of, raw_stream, stream_name


@pytest.mark.parametrize("priority", [0, -1, -2, -3])
def test_a_pool_gives_out_32_streams_of_a_priority_and_then_the_first_again(priority):
    pool = StreamPool()
    given = [pool.take(priority) for _ in range(2 * POOL_STREAMS)]
    assert given[:POOL_STREAMS] == given[POOL_STREAMS:] and len(set(given)) == POOL_STREAMS
    assert {priority_of(stream) for stream in given} == {priority}
    suffix = f" of priority {priority}" if priority else ""
    assert [stream_name(stream) for stream in given[:3]] == [
        f"stream {number}{suffix}" for number in (1, 2, 3)
    ]


def test_priorities_that_do_not_exist_are_the_nearest_that_does():
    pool = StreamPool()
    assert [priority_of(pool.take(priority)) for priority in (5, -7)] == [0, -3]


def test_the_default_stream_and_those_of_cuda_have_no_name_of_the_pool():
    assert [stream_name(stream) for stream in (0, 2, 11, POOL_STREAMS << 5 | 3)] == [""] * 4
    assert priority_of(0) == priority_of(4096) == 0


def test_streams_have_addresses_apart_and_the_default_stream_none():
    pool = StreamPool()
    ids = [pool.take(priority) for priority in (0, -1) for _ in range(POOL_STREAMS)]
    assert len({raw_stream(device, stream) for device in range(8) for stream in ids}) == 8 * len(
        ids
    )
    assert raw_stream(3, 0) == 0 and raw_stream(0, 4096) == 4096


def test_torch_gets_them(fresh_gpus):
    first, second, urgent = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert [stream_name(stream.stream_id) for stream in (first, second, urgent)] == [
        "stream 1",
        "stream 2",
        "stream 1 of priority -1",
    ]
    assert stream_name(torch.cuda.Stream("cuda:1").stream_id) == "stream 1"
    assert [stream.priority for stream in (first, urgent)] == [0, -1]


@pytest.fixture
def fresh_gpus():
    with virtualgpu.use(gpus=2):
        yield
