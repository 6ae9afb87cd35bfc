"""Errors of an allocator that runs out of memory, and memory limits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from virtualgpu.allocator import OutOfMemory
from virtualgpu.allocator.oom import size_text

from .scripted import GiB, MiB, allocator, figure


def test_the_memory_fraction_limits_what_is_reserved():
    memory = allocator(1 * GiB, processes=lambda: [(4711, 3 * MiB)], others=lambda: 24 * MiB)
    memory.set_memory_fraction(100 / 1024)
    memory.malloc(512)
    with pytest.raises(OutOfMemory) as error:
        memory.malloc(101 * MiB)
    assert (
        error.value.message
        == str(error.value)
        == (
            "CUDA out of memory. Tried to allocate 102.00 MiB. GPU 0 has a total capacity of "
            "1024.00 MiB of which 998.00 MiB is free. "
            "Process 4711 has 3.00 MiB memory in use. 100.00 MiB allowed; Of the allocated memory "
            "512 bytes is allocated by PyTorch, "
            "and 2.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
            "memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )
    )
    assert (error.value.requested, error.value.segment_size, error.value.allowed) == (
        101 * MiB,
        102 * MiB,
        100 * MiB,
    )
    assert (error.value.total, error.value.free, error.value.allocated, error.value.reserved) == (
        GiB,
        998 * MiB,
        512,
        2 * MiB,
    )
    assert (figure(memory, "num_ooms"), figure(memory, "num_alloc_retries")) == (1, 1)
    memory.set_memory_fraction(1)
    memory.malloc(101 * MiB)


def test_others_take_memory_away():
    memory = allocator(64 * MiB, others=lambda: 60 * MiB)
    assert memory.free_bytes() == 4 * MiB
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 20\.00 MiB"):
        memory.malloc(2 * MiB)


@pytest.mark.parametrize("expandable", [False, True])
def test_nobody_takes_memory_between_the_look_and_the_taking(expandable):
    told, claiming = [], []

    @contextmanager
    def claim() -> Iterator[None]:
        claiming.append(True)
        yield
        claiming.pop()

    def others() -> int:
        told.append(("looks", bool(claiming)))
        return 0

    def driver(action: str, stream: int) -> None:
        told.append((action, bool(claiming)))

    memory = allocator(
        64 * MiB, f"expandable_segments:{expandable}", others=others, driver=driver, claiming=claim
    )
    memory.free(memory.malloc(2 * MiB))
    taking = "segment_map" if expandable else "segment_alloc"
    assert told == [("looks", True), (taking, True)] and not claiming


def test_the_text_tells_what_is_asked_for_free_allocated_and_kept():
    memory = allocator(total=64 * MiB)
    memory.malloc(5 * MiB)
    with pytest.raises(OutOfMemory) as caught:
        memory.malloc(50 * MiB)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 64.00 MiB "
        "of which 44.00 MiB is free. "
        "Of the allocated memory 5.00 MiB is allocated by PyTorch, and 15.00 MiB is reserved by "
        "PyTorch but unallocated."
    )


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction):
    memory = allocator()
    with pytest.raises(ValueError, match="between 0 and 1"):
        memory.set_memory_fraction(fraction)
    assert memory.memory_fraction == 1.0


def test_an_exabyte_is_refused_without_a_retry():
    memory = allocator()
    with pytest.raises(OutOfMemory) as error:
        memory.malloc(1 << 60)
    assert str(error.value) == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert figure(memory, "num_ooms") == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MiB, "1024.00 KiB"),
        (GiB, "1024.00 MiB"),
        (3 * GiB, "3.00 GiB"),
    ],
)
def test_sizes_in_error_texts(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.10.0+cu128", "PYTORCH_ALLOC_CONF=expandable_segments:True .*#environment-variables"),
        ("2.13.0", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True .*#optimizing-memory-usage"),
    ],
)
def test_the_text_follows_the_version(version, words):
    with pytest.raises(OutOfMemory, match=words):
        allocator(MiB, version=version).malloc(1)
