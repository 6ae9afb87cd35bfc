"""The lab of the allocator, on a virtual GPU."""

import pytest
import torch

import labkit
from labkit.widgets import AllocatorLab

MIB = 1 << 20


@pytest.fixture
def lab():
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        yield AllocatorLab()


def do(lab, action, predicted, **choices) -> str:
    lab.action.value = action
    lab.answer.value = predicted
    for name, value in choices.items():
        getattr(lab, name).value = value
    lab.run_button.click()
    return lab.message.value


def test_each_step_is_predicted_and_judged(lab):
    assert "A new segment of 20 MiB: no free block of stream 0 was large enough. Now 20 MiB reserved, you predicted 5 MiB." in do(
        lab, "allocate", "5", size="5"
    )
    said = do(lab, "allocate", "20", size="15")
    assert "No new segment: a free block of this stream served the request. Now 20 MiB reserved, as you predicted." in said
    assert "1 of 2 predictions came true." in said
    assert "A 5 MiB, B 15 MiB" in lab.picture.value
    assert "its segment stays. Now 20 MiB reserved" in do(lab, "free", "0", block="B")
    assert "no segment was wholly free. Now 20 MiB reserved, as you predicted." in do(lab, "empty the cache", " 20.0 ")
    assert "A new segment of 12 MiB: no free block of stream 2" in do(lab, "allocate", "32", size="12", stream=2)
    do(lab, "free", "32", block="A")
    assert "20 MiB went back to the device: whole segments that were free. Now 12 MiB reserved" in do(lab, "empty the cache", "12")


@pytest.mark.parametrize(
    ("answer", "size", "message"),
    [
        ("", "5", "Your prediction is a number of MiB from 0 to 100000, such as 20; nothing is typed yet."),
        ("many", "5", "“many” is none."),
        ("-1", "5", "“-1” is none."),
        ("5", "0", "The size is a number of MiB greater than 0 and up to 1024, such as 20; “0” is none."),
        ("5", "nan", "“nan” is none."),
        ("5", "1e9", "“1e9” is none."),
    ],
)
def test_silly_input_gets_one_clear_message(lab, answer, size, message):
    said = do(lab, "allocate", answer, size=size)
    assert 'role="alert"' in said and message in said
    assert torch.cuda.memory_reserved() == 0


def test_there_must_be_a_block_to_free(lab):
    assert "There is no block to free yet: allocate one first." in do(lab, "free", "0")


def test_only_what_the_step_needs_is_shown(lab):
    assert (lab.size.layout.display, lab.block.layout.display) == (None, "none")
    lab.action.value = "free"
    assert (lab.size.layout.display, lab.stream.layout.display, lab.block.layout.display) == ("none", "none", None)


def test_out_of_memory_is_shown_and_the_lab_goes_on(lab):
    torch.cuda.set_per_process_memory_fraction(0.02)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB" in do(lab, "allocate", "500", size="500")
    assert "A new segment of 20 MiB" in do(lab, "allocate", "20", size="5")


def test_a_reset_gives_the_memory_back(lab):
    do(lab, "allocate", "20", size="5")
    lab.reset_button.click()
    assert (torch.cuda.memory_reserved(), lab.picture.value, list(lab.block.options)) == (0, "", [])
    assert "1 of 1 predictions came true." in do(lab, "allocate", "20", size="5")
    assert lab.figure().title == "5 MiB allocated, 20 MiB reserved in 1 segment"


def test_it_says_when_there_is_no_gpu():
    lab = AllocatorLab()
    assert "RuntimeError: no GPU is in use" in do(lab, "allocate", "20", size="5")
    assert repr(lab) == "AllocatorLab()"


def test_after_a_change_of_machines_a_reset_starts_anew(lab):
    do(lab, "allocate", "20", size="5")
    labkit.use(None)
    with labkit.use(like="H200", virtual=True, quiet=True):
        lab.reset_button.click()
        do(lab, "allocate", "20", size="5")
        assert "H200" in lab.picture.value
