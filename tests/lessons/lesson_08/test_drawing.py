"""The drawing of a block that two processes share."""

import pytest

import labkit
from gpulessons.lesson_08.drawing import IN_USE, STUCK, Moment, plot_block

SIZE = 32 << 20
SENT = Moment("sent", True, True, SIZE)
DELETED_HERE = Moment("deleted here", False, True, SIZE)
DELETED_THERE = Moment("deleted there", False, False, SIZE)
FREE = Moment("ipc_collect", False, False, 0)


@pytest.fixture(autouse=True)
def one_gpu():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


def test_the_title_names_the_moment_when_nobody_uses_the_block():
    figure = plot_block([SENT, DELETED_HERE, DELETED_THERE, FREE])
    assert figure.title == "deleted there: nobody uses the block, and 32 MiB stay allocated"
    assert "Sent: 32 MiB allocated, the count is 1, P1 and P2 have a tensor in it." in figure.alt
    assert "Deleted there: 32 MiB allocated, the count is 0, nobody has a tensor" in figure.alt
    assert "Ipc_collect: the block is free." in figure.alt


def test_a_block_that_is_never_stuck_has_another_title():
    assert plot_block([SENT, FREE]).title == "The block is free as soon as nobody uses it"


def test_each_moment_shows_the_count_and_who_holds_the_block(drawn):
    plot_block([SENT, DELETED_HERE, DELETED_THERE, FREE])
    [canvas] = drawn
    texts = [text.get_text() for text in canvas.axes[0].texts]
    assert texts.count("1") == 2 and texts.count("0") == 1
    assert texts.count("data") == 1 and texts.count("kept") == 2
    assert texts.count(IN_USE) == texts.count(STUCK) == texts.count("free") == 1


def test_no_moment_is_refused():
    with pytest.raises(ValueError, match="at least one moment"):
        plot_block([])
