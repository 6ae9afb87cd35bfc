"""The figure of memory that varies from run to run."""

from gpulessons.lesson_10.labs import plot_ddp_memory
from labkit.labs import recorded_result


def test_every_value_of_the_recording_is_a_mark_and_a_word(drawn):
    recorded = recorded_result("ddp_memory")
    figure = plot_ddp_memory(recorded)
    assert figure.title == "12 runs of one program: peaks from 1.39 to 1.58 GiB"
    (axes,) = drawn[-1].axes
    assert sum(len(line.get_ydata()) for line in axes.lines) == len(recorded.rows)
    assert "Second step: " in figure.alt and "allocated 1.01 GiB or 841.8 MiB." in figure.alt
    assert figure.alt.endswith("Recorded on 2× NVIDIA H200, torch 2.11.")


def test_it_varies_by_the_gradients_of_fifty_million_parameters():
    recorded = recorded_result("ddp_memory")
    few, many = recorded.column("bytes", point="second step", kind="allocated")
    assert round((many - few) / 4e6) == 50
