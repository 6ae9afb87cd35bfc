"""Every exercise notices what an answer changed, except for changes that are allowed."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import labkit
from labkit.checks import checking
from labkit.checks.checking import Check, right
from labkit.checks.left_behind import Followed


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def told(answer, *given, alters=()) -> str:
    """Return the verdict when a check gives the inputs `given` to an answer.

    `alters` says what the answer may change.
    """

    def observe(followed, _):
        with torch.cuda.device(1):
            result = followed(*given)
            if callable(result):
                result(torch.ones(2, device="cuda:1"))

    return checking.run(
        Check("98.2", lambda _: None, observe, lambda *_: right(), alters=alters), answer
    ).message


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda(1)


SETTINGS = {
    "current device is cuda:0": lambda: torch.cuda.set_device(0),
    "current stream of cuda:1": lambda: torch.cuda.set_stream(torch.cuda.Stream()),
    "default device is cuda": lambda: torch.set_default_device("cuda"),
    "default dtype is torch.float16": lambda: torch.set_default_dtype(torch.float16),
    "is_grad_enabled() is False": lambda: torch.set_grad_enabled(False),
    "what warnings do is ['error'": lambda: warnings.simplefilter("error"),
}


@pytest.mark.parametrize("said", SETTINGS)
def test_settings_for_all_that_follows(said):
    assert said in told(lambda: SETTINGS[said]())
    assert not torch.get_default_device().type.startswith("cuda") and torch.is_grad_enabled()


GIVEN = {
    "changed a list or dict": (lambda: [3, 1, 2], lambda given: given.sort()),
    "a list or dict that": (lambda: {"a": 1}, lambda given: given.pop("a")),
    "changed a tensor": (lambda: torch.ones(2, device="cuda"), lambda given: given.mul_(2)),
    "changed a list or dict that": (
        lambda: [torch.ones(2)],
        lambda given: given.append(given.pop().clone()),
    ),
    "BatchNorm1d is now in evaluation mode": (network, lambda model: model[1].eval()),
    "left 1 hook(s) behind": (
        network,
        lambda model: model[0].register_forward_hook(lambda *_: None),
    ),
    "on the model: 1.last": (network, lambda model: setattr(model[1], "last", 1)),
    "parameters require gradients": (network, lambda model: model[0].requires_grad_(False)),
    "from their GPU": (network, lambda model: model.cpu()),
    "changed the model's weights": (network, lambda model: nn.init.zeros_(model[0].weight)),
}


@pytest.mark.parametrize("said", GIVEN)
def test_what_was_given(said):
    make, change = GIVEN[said]
    assert said in told(lambda given: (change(given), None)[1], make())
    assert told(lambda given: [given].clear(), make()) == "Right."


@pytest.mark.parametrize(
    ("said", "alters"),
    [
        ("changed a list or dict", "values"),
        ("changed the model's weights", "values"),
        ("left 1 hook(s) behind", "hooks"),
    ],
)
def test_what_an_exercise_asks_for_may_be_altered(said, alters):
    make, change = GIVEN[said]
    assert told(lambda given: (change(given), None)[1], make(), alters=(alters,)) == "Right."


def test_functions_and_modules_that_an_answer_returns_are_followed_too():
    def makes_a_function():
        def get(x):
            torch.cuda.set_device(0)

        return get

    class Moves(nn.Module):
        def forward(self, x):
            torch.cuda.set_device(0)

    assert "the current device is cuda:0" in told(makes_a_function)
    assert "the current device is cuda:0" in told(Moves)
    assert told(nn.Identity) == "Right."


def test_tensors_are_not_kept_alive_by_being_looked_at():
    before = torch.cuda.memory_allocated()
    given = [torch.ones(2, device="cuda")]
    Followed(lambda tensors: given.clear(), ("values",))(given)
    assert torch.cuda.memory_allocated() == before


def test_other_processes_get_the_answer_itself():
    assert pickle.loads(pickle.dumps(Followed(len))) is len
    assert copy.copy(Followed(len)) is len


def test_a_warning_is_no_error_whatever_the_notebook_has_set():
    def warns():
        warnings.warn("once a process", stacklevel=1)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("error")
        assert told(warns) == "Right."
        with pytest.raises(UserWarning):
            warns()
