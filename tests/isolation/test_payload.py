"""What cannot be sent to another process is refused before one is started, and named."""

import threading

import pytest
import torch

import labkit
from labkit.isolation import payload

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    def started(*arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("labkit.isolation.IsolatedProcess", started)


@pytest.fixture(scope="module")
def x():
    with labkit.use(virtual=True, quiet=True):
        yield torch.ones(3, device="cuda")


def refusal(function, *args, **keywords) -> str:
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(function, *args, **keywords)
    assert (caught.value.kind, caught.value.trace) == ("argument", None)
    return str(caught.value)


def test_arguments():
    def f(*args, **keywords): ...

    cannot = "cannot be sent to another process (TypeError: cannot pickle '_thread.lock' object): make it inside the function."
    assert refusal(f, 1, [LOCK]) == f"argument 2 of f() {cannot}"
    assert refusal(f, 1, key=LOCK) == f"argument key= of f() {cannot}"


def test_variables_that_a_function_uses():
    lock = LOCK
    assert refusal(lambda: lock).startswith("the variable lock, which <lambda>() uses, cannot be sent")
    assert refusal(lambda: LOCK).startswith("the variable LOCK, which <lambda>() uses, cannot be sent")
    assert refusal(LOCK.acquire).startswith("the function acquire() cannot be sent")


def test_tensors_of_a_gpu(x):
    def f(*args): ...

    holds = "holds a tensor on cuda:0, whose memory belongs to this process: make it inside the function, or send x.cpu()."
    assert refusal(f, x) == f"argument 1 of f() {holds}"
    assert refusal(f, {"model": [torch.nn.Linear(3, 3).cuda()]}) == f"argument 1 of f() {holds}"
    assert refusal(lambda: x) == f"the variable x, which <lambda>() uses, {holds}"
    assert refusal(f, x.untyped_storage()) == f"argument 1 of f() {holds}"


def test_tensors_of_the_host_go_and_come(x, tmp_path):
    sent = {
        "weight": torch.nn.Parameter(torch.ones(2)),
        "view": torch.arange(6).view(2, 3)[:, 1],
        "shape only": torch.ones(2, device="meta"),
    }
    sent["computed"] = sent["weight"] * 2
    payload.pack(tmp_path / "sent", sent)
    got = payload.unpack(tmp_path / "sent")
    assert got["view"].tolist() == [1, 4] and got["computed"].tolist() == [2, 2]
    assert got["weight"].requires_grad and got["shape only"].shape == (2,)


@pytest.mark.parametrize("function", [3, None, "train"])
def test_no_function(function):
    with pytest.raises(TypeError, match=r"is no function: call labkit.isolated\(function, arguments...\)"):
        labkit.isolated(function)


@pytest.mark.parametrize("timeout", [0, -1, "60", True, float("nan"), float("inf")])
def test_no_time(timeout):
    with pytest.raises(ValueError, match="choose a positive number of seconds, or None for no limit"):
        labkit.isolated(len, [], timeout=timeout)
