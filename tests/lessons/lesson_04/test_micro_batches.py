"""A batch in micro-batches, measured and drawn."""

import pytest
import torch

import labkit
from gpulessons.lesson_04.labs import pipeline_splits, plot_pipeline_splits
from gpulessons.lesson_04.labs.micro_batches import COLUMNS, COMPUTE_FIRST, COPY_FIRST, compute_first, copy_first, split_gain
from labkit.labs import Result, collect, recorded_result

SMALL = {"repeats": 1, "layers": 4, "width": 4096, "batch": 8192}


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_who_computes_first_meets_the_formula_and_who_copies_first_is_late(like):
    with labkit.use(gpus=2, like=like, quiet=True):
        result = collect(pipeline_splits([1, 2, 4], **SMALL))
    early, late = split_gain(result, COMPUTE_FIRST), split_gain(result, COPY_FIRST)
    assert early[2] == pytest.approx(4 / 3, rel=0.12) and early[4] == pytest.approx(8 / 5, rel=0.12)
    assert late[2] == pytest.approx(1, rel=0.05) and late[4] == pytest.approx(8 / 6, rel=0.12)


def test_the_recording_tells_of_both_programs():
    recording = recorded_result("pipeline_splits")
    gain = split_gain(recording, COPY_FIRST)
    assert gain[2] == pytest.approx(1, rel=0.02) and gain[8] == pytest.approx(1.5, rel=0.05) and gain[64] < 1.1
    gain = split_gain(recording, COMPUTE_FIRST)
    assert gain[2] > 1.25 and gain[8] > 1.5 and gain[64] < 1.1


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_both_programs_give_the_outputs_of_one_batch(parts):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        torch.manual_seed(0)
        first, second = (torch.nn.Linear(4, 4, device=f"cuda:{index}") for index in range(2))
        x = torch.randn(5, 4, device="cuda:0")
        whole = second(first(x).to("cuda:1"))
        for program in (copy_first, compute_first):
            assert torch.allclose(torch.cat(program(first, second, x.chunk(parts))), whole, atol=1e-6)


def test_the_recording_is_found_for_the_default_sizes_only():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        assert pipeline_splits([1, 8]).result().recorded().column("splits", program="compute first") == [1, 8]
        assert pipeline_splits([1, 8], layers=4).result().recorded() is None


def test_bad_arguments_and_too_few_gpus_are_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True), pytest.raises(RuntimeError, match="needs labkit.use"):
        pipeline_splits()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match=r"splits=\[0\]: give one or more whole numbers from 1 to 8192"):
            pipeline_splits([0])
        with pytest.raises(ValueError, match="layers=3: give an even number"):
            pipeline_splits(layers=3)
        with pytest.raises(ValueError, match="width=1.5: give a whole number"):
            pipeline_splits(width=1.5)


@pytest.mark.gpu(2)
def test_two_real_gpus_say_the_same():
    with labkit.use(gpus=2, virtual=False, quiet=True):
        result = collect(pipeline_splits([1, 2, 8, 64]))
    assert split_gain(result, COPY_FIRST)[2] < 1.1 < split_gain(result, COMPUTE_FIRST)[2]
    assert split_gain(result, COMPUTE_FIRST)[64] < split_gain(result, COMPUTE_FIRST)[2]  # from where on depends on the host


def sweep(seconds, badge="measured on paper", **more) -> Result:
    """A result from {program: {splits: seconds}}."""
    rows = [{"splits": n, "program": program, "seconds": took} for program, values in seconds.items() for n, took in values.items()]
    return Result("pipeline_splits", {"splits": [1, 2, 4]}, COLUMNS, rows, badge, **more)


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({1: 2.0, 2: 1.4, 4: 1.0}, "4 micro-batches are 2.0 times as fast as one"),
        ({1: 2.0, 2: 1.0, 4: 1.5}, "2 micro-batches are 2.0 times as fast as one; 4 are slower again"),
        ({1: 1.0, 2: 1.0, 4: 1.5}, "The batch in one piece is fastest"),
        ({2: 1.0}, "Not measured yet: a batch whole and cut"),
        ({}, "Not measured yet: a batch whole and cut"),
    ],
)
def test_the_title_of_a_sweep_names_the_best_number_of_parts(seconds, title):
    assert plot_pipeline_splits(sweep({"compute first": seconds})).title == title


def test_solid_is_measured_dashed_is_recorded_dotted_the_formula(drawn):
    measured = sweep({"copy first": {1: 2.0, 2: 2.0}, "compute first": {1: 2.0, 2: 1.4}})
    recorded = sweep({"copy first": {1: 0.2, 2: 0.2}}, "recorded on 4× NVIDIA H200", origin={"machine": "4x NVIDIA H200"})
    figure = plot_pipeline_splits(measured, recorded)
    (axes,) = drawn[-1].axes
    assert [line.get_linestyle() for line in axes.lines] == ["--", "-", "-", ":"]
    assert list(axes.lines[-1].get_ydata()) == pytest.approx([1.0, 4 / 3])
    assert "formula" in [text.get_text() for text in axes.texts]
    assert figure.alt == (
        "2 micro-batches are 1.4 times as fast as one. "
        "Copy first takes 2 s with 1, 2 s with 2; compute first takes 2 s with 1, 1.4 s with 2. "
        "Recorded on 4× NVIDIA H200: copy first takes 200 ms with 1, 200 ms with 2. Measured on paper."
    )
