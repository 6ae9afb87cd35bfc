"""Every solution in a notebook passes its check, plausible wrong answers fail it, and the stub counts as not attempted."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

import labkit
from labkit import lessons

FOLDER = Path(__file__).parents[2] / "notebooks"
TRIES = 3  # inputs are drawn afresh each time

# For each exercise, answers that a learner may well give, and a part of what the check says to each.
WRONG = {
    "00.1": {
        "on the CPU": ("def on_gpu(numbers): return torch.tensor(numbers)", "on cpu"),
        "as integers": ("def on_gpu(numbers): return torch.tensor(numbers, device='cuda').int()", "torch.int32"),
        "double precision": ("def on_gpu(numbers): return torch.tensor(numbers, dtype=torch.float64, device='cuda')", "torch.float64"),
        "their number": ("def on_gpu(numbers): return torch.zeros(len(numbers), device='cuda')", "holds"),
        "nothing returned": ("def on_gpu(numbers): torch.tensor(numbers, device='cuda')", "NoneType"),
    },
    "01.1": {
        "positions on the CPU": ("def padding_mask(lengths, size): return torch.arange(size) < lengths[:, None]", "RuntimeError"),
        "on the current device": (
            "def padding_mask(lengths, size): return torch.arange(size, device='cuda') < lengths.cuda()[:, None]",
            "What does lengths.device",
        ),
        "through the CPU": ("def padding_mask(lengths, size): return torch.arange(size) < lengths.cpu()[:, None]", "your mask is on cpu"),
        "one too many": (
            "def padding_mask(lengths, size): return torch.arange(size, device=lengths.device) <= lengths[:, None]",
            "some values are wrong",
        ),
        "as numbers": (
            "def padding_mask(lengths, size): return (torch.arange(size, device=lengths.device) < lengths[:, None]).float()",
            "torch.float32",
        ),
        "by get_device": (
            "def padding_mask(lengths, size): return torch.arange(size, device=lengths.get_device()) < lengths[:, None]",
            "RuntimeError",
        ),
    },
    "01.2": {
        "one level": ("def move(batch, device): return {k: v.to(device) for k, v in batch.items()}", "AttributeError"),
        "in place": (
            """
def move(batch, device):
    if isinstance(batch, (list, dict)):
        for key in (batch if isinstance(batch, dict) else range(len(batch))):
            batch[key] = move(batch[key], device)
        return batch
    if isinstance(batch, tuple):
        return tuple(move(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
""",
            "leave it as it was",
        ),
        "copies what is there": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch.to(device, copy=True) if isinstance(batch, torch.Tensor) else batch
""",
            "copied all the same",
        ),
        "tuples become lists": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [move(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
""",
            "became a list",
        ),
        "always the current device": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return (batch if batch.is_cuda else batch.cuda()) if isinstance(batch, torch.Tensor) else batch
""",
            "not on cuda",
        ),
    },
    "01.3": {
        "four bytes each": (
            """
def bytes_per_device(model):
    total = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + 4 * tensor.numel()
    return total
""",
            "Do all dtypes have the same size?",
        ),
        "no buffers": (
            """
def bytes_per_device(model):
    total = {}
    for tensor in model.parameters():
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    return total
""",
            "you counted",
        ),
        "the first parameter's device": (
            """
def bytes_per_device(model):
    tensors = [*model.parameters(), *model.buffers()]
    return {str(tensors[0].device): sum(tensor.numel() * tensor.element_size() for tensor in tensors)}
""",
            "the model is on",
        ),
        "shared weights twice": (
            """
def bytes_per_device(model):
    total = {}
    for tensor in model.state_dict().values():
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    return total
""",
            "you counted",
        ),
        "one number": ("def bytes_per_device(model): return sum(p.numel() for p in model.parameters())", "returned int"),
    },
    "01.4": {
        "not put back": (
            "def on_device(index, work):\n    torch.cuda.set_device(index)\n    return work()",
            "afterwards|after work raised",
        ),
        "not after an exception": (
            """
def on_device(index, work):
    before = torch.cuda.current_device()
    torch.cuda.set_device(index)
    result = work()
    torch.cuda.set_device(before)
    return result
""",
            "after work raised an exception",
        ),
        "always back to device 0": (
            """
def on_device(index, work):
    torch.cuda.set_device(index)
    try:
        return work()
    finally:
        torch.cuda.set_device(0)
""",
            "was 1 before and 0",
        ),
        "the exception swallowed": (
            """
def on_device(index, work):
    with torch.cuda.device(index):
        try:
            return work()
        except Exception:
            return None
""",
            "kept it to itself",
        ),
        "a device for tensors only": (
            "def on_device(index, work):\n    with torch.device('cuda', index):\n        return work()",
            "it saw device",
        ),
        "no result": ("def on_device(index, work):\n    with torch.cuda.device(index):\n        work()", "did not return"),
    },
    "01.5": {
        "one after the other": (
            "def copy_while(source, device, work):\n    copy = source.to(device)\n    work()\n    return copy",
            "one after the other",
        ),
        "work first": (
            """
def copy_while(source, device, work):
    work()
    copy = source.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    return copy
""",
            "one after the other",
        ),
        "no waiting": (
            "def copy_while(source, device, work):\n    copy = source.to(device, non_blocking=True)\n    work()\n    return copy",
            "before the copy had arrived",
        ),
        "waiting too early": (
            """
def copy_while(source, device, work):
    copy = source.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    work()
    return copy
""",
            "one after the other",
        ),
        "from pageable memory": (
            """
def copy_while(source, device, work):
    copy = source.clone().to(device, non_blocking=True)
    work()
    torch.cuda.synchronize(device)
    return copy
""",
            "one after the other",
        ),
        "no work": (
            "def copy_while(source, device, work):\n    copy = source.to(device)\n    return copy",
            "it ran 0 times",
        ),
    },
}


def exercise_cells() -> dict[str, tuple[str, str]]:
    """The source of the stub and of the solution of each exercise, by number."""
    found = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for index, cell in enumerate(cells):
            if "exercise" in cell.metadata.get("tags", []):
                number = re.search(r'labkit\.check\("([\d.]+)"', cells[index + 1].source)[1]
                found[number] = cell.source, re.search(r"```python\n(.*?)```", cells[index + 2].source, re.DOTALL)[1]
    return found


EXERCISES = exercise_cells()


def answer(source: str) -> Any:
    """The function that `source` defines, as a notebook would define it."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "labkit": labkit}
    exec(source, names)
    return next(value for name, value in names.items() if callable(value) and name not in ("torch", "nn", "labkit", "__builtins__"))


@pytest.fixture(scope="module", autouse=True)
def gpus():
    """Two GPUs: real ones where there are two, as for a learner."""
    with labkit.use(gpus=2, quiet=True):
        yield


@pytest.fixture(autouse=True)
def undisturbed(gpus):
    """A check leaves the current device and the memory of the GPUs as they were, whatever the answer."""
    torch.zeros(1, device="cuda:1")
    torch.cuda.set_device(1)
    allocated, reserved = memory()
    yield
    assert torch.cuda.current_device() == 1
    assert memory()[0] == allocated
    assert all(now <= before for now, before in zip(memory()[1], reserved, strict=True))


def memory() -> tuple[list[int], list[int]]:
    """Bytes allocated and reserved on each GPU."""
    return [torch.cuda.memory_allocated(index) for index in range(2)], [torch.cuda.memory_reserved(index) for index in range(2)]


def test_notebooks_and_checks_have_the_same_exercises():
    assert list(EXERCISES) == list(lessons.exercises())
    assert list(WRONG) == list(EXERCISES)
    assert all(len(answers) >= 3 for answers in WRONG.values())


@pytest.mark.parametrize("number", EXERCISES)
def test_the_stub_is_not_attempted(number):
    verdict = labkit.check(number, answer(EXERCISES[number][0]))
    assert (verdict.passed, repr(verdict), verdict.points) == (False, f"{number} not attempted", 0)


@pytest.mark.parametrize("number", EXERCISES)
def test_the_solution_passes(number):
    for _ in range(TRIES):
        verdict = labkit.check(number, answer(EXERCISES[number][1]))
        assert verdict.passed and verdict.points == 1, verdict
        assert repr(verdict).startswith(f"{number} Right.")


@pytest.mark.parametrize(("number", "name"), [(number, name) for number, answers in WRONG.items() for name in answers])
def test_a_wrong_answer_fails_and_is_told_why(number, name):
    source, hint = WRONG[number][name]
    for _ in range(TRIES):
        verdict = labkit.check(number, answer(source))
        assert not verdict.passed and verdict.points == 0, verdict
        assert repr(verdict).startswith(f"{number} Not yet: ")
        assert re.search(hint, verdict.message), verdict
