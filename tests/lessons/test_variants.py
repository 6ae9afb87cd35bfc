"""Variants of exercises for exams: right answers pass, wrong ones fail, no lesson solves them."""

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

import labkit
from labcourse.controls import control, wrong_answers
from labcourse.session import answer_in
from labkit import checks
from labkit.checks import checking

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VARIANTS = checks.variants()
RIGHT = {
    "01.101": """
def phrase_mask(starts, ends, size):
    positions = torch.arange(size, device=starts.device)
    return (positions >= starts[:, None]) & (positions < ends[:, None])
""",
    "00.101": """
def id_column(ids):
    return torch.tensor(ids, dtype=torch.int64, device="cuda")[:, None]
""",
    "02.101": """
def share_of_second(first, second):
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    first()
    middle.record()
    second()
    end.record()
    end.synchronize()
    return middle.elapsed_time(end) / start.elapsed_time(end)
""",
    "03.103": """
def mean_of_losses(losses, rows, gpu):
    sums = [loss.to(f"cuda:{gpu}") * count for loss, count in zip(losses, rows)]
    return sum(sums) / sum(rows)
""",
    "04.102": """
def seconds_with_copies(stage_seconds, copy_seconds, micro_batches):
    parts = [*stage_seconds, *copy_seconds]
    return sum(parts) + (micro_batches - 1) * max(parts)
""",
    "06.103": """
def train_reporting(model, optimizer, batches):
    largest, total, steps = [], 0, 0
    for x, y in batches:
        output = model(x)
        loss = nn.functional.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        largest.append(output.abs().max().item())
        total += loss.item()
        steps += 1
    return largest, total / steps
""",
    "07.104": """
def least_scale(gradients):
    def keeps(scale):
        return all(((g * scale).half() == 0).equal(g == 0) for g in gradients)

    scale = 1.0
    while not keeps(scale):
        scale *= 2
    while keeps(scale / 2):
        scale /= 2
    return scale
""",
    "09.102": """
def fewest_parts(step, rows):
    low, high = 1, rows + 1
    while low < high:
        parts = (low + high) // 2
        try:
            step(parts)
            high = parts
        except torch.OutOfMemoryError:
            low = parts + 1
    return low if low <= rows else None
""",
    "10.101": """
def equal_buffers(model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
        else:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
""",
    "05.104": """
def last_columns(outputs, count):
    return {name: table[:, -count:].clone() for name, table in outputs.items()}
""",
}
WRONG = wrong_answers((Path(__file__).parent / "wrong_answers_to_variants.txt").read_text())


def in_ranks(number):
    """Return the pytest marks of a test of a variant.

    The test is slow if the variant's answers run in ranks.
    """
    return [pytest.mark.slow] if checks.find(number).children else []


def verdict(number, source, seed):
    answer = answer_in(source)
    with labkit.use(gpus=2, virtual=True, quiet=True):
        return checking.run(checks.find(number), answer, seed)


def solution(number):
    """Return the lesson's solution of an exercise."""
    path = next(NOTEBOOKS.glob(f"{number[:2]}_*.ipynb"))
    cells = nbformat.read(path, as_version=4).cells
    text = next(cell.source for cell in cells if f"Solution of {number}<" in cell.source)
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


def numbers():
    return [variant.check.number for variant in VARIANTS.values()]


def test_each_variant_has_a_right_answer_here():
    assert sorted(RIGHT) == sorted(numbers())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [pytest.param(each, marks=in_ranks(each)) for each in RIGHT])
def test_a_right_answer_passes(number, seed):
    assert verdict(number, RIGHT[number], seed).passed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("number", "said", "source"),
    [
        pytest.param(number, said, source, id=f"{number} {title}", marks=in_ranks(number))
        for number, title, said, source in WRONG
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(number, said, source, seed):
    found = verdict(number, source, seed)
    assert not found.passed and re.search(said, found.message), found.message


def test_each_variant_has_at_least_six_wrong_answers():
    counted = Counter(number for number, *_ in WRONG)
    assert sorted(counted) == sorted(numbers())
    # Beside these there are the control and the solution of the lesson's exercise.
    assert min(counted.values()) >= 4


@pytest.mark.parametrize("number", [pytest.param(each, marks=in_ranks(each)) for each in VARIANTS])
def test_the_solution_of_the_lesson_is_wrong_for_the_variant(number):
    found = verdict(VARIANTS[number].check.number, solution(number), 3)
    assert not found.passed and found.message.startswith("Not yet")


@pytest.mark.parametrize("number", [pytest.param(each, marks=in_ranks(each)) for each in RIGHT])
def test_the_control_fails_as_it_says(number):
    pattern, source = control(number)
    found = verdict(number, source, 3)
    assert not found.passed and re.search(pattern, found.message), found.message


@pytest.mark.parametrize("number", numbers())
def test_the_stub_is_not_attempted_and_no_lesson_names_the_function(number):
    [variant] = [each for each in VARIANTS.values() if each.check.number == number]
    assert verdict(number, variant.stub, 3).message == "not attempted"
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(variant.name in cell.source for cell in cells)


def test_a_variant_replaces_an_exercise_of_its_lesson():
    assert VARIANTS["01.1"].check.number == "01.101"
    assert set(VARIANTS) <= set(checks.exercises())
    sections = {check.number: check.section for check in checks.exercises().values()}
    for number, variant in VARIANTS.items():
        assert variant.check.section == sections[number]
