"""Races with the host, between devices and in a backward pass."""

import threading

import pytest
import torch

import virtualgpu
from virtualgpu.streams.race_reports import HOST, OVERWRITTEN, STALE

from .racing import RACES, here, kinds

pytestmark = pytest.mark.usefixtures("raced")


# The host


@RACES
def test_a_copy_to_the_host_is_not_there_before_the_host_has_waited():
    x = torch.arange(4.0, device="cuda")
    kept = torch.full((4,), 5.0).pin_memory()
    kept.copy_(x, non_blocking=True)
    made = x.to("cpu", non_blocking=True)
    assert kept.numpy().tolist() == [5.0] * 4 and made.tolist() == [0.0] * 4
    torch.cuda.synchronize()
    assert kept.tolist() == made.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert kinds() == [STALE] * 2 and {race.second.device for race in virtualgpu.races()} == {HOST}


@RACES
def test_a_race_names_operators_as_the_program_does():
    kept = torch.zeros(1).pin_memory()
    kept.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    kept.item()
    torch.softmax(kept, 0)
    assert {race.second.name for race in virtualgpu.races()} == {"item", "softmax"}


def test_a_copy_to_the_host_is_there_for_the_next_copy_of_the_stream():
    kept, back = torch.zeros(4).pin_memory(), torch.empty(3, dtype=torch.long, device="cuda")
    kept[:2].copy_(torch.ones(2, device="cuda"), non_blocking=True)
    back.copy_(kept[1:], non_blocking=True)
    assert back.tolist() == [1, 0, 0] and virtualgpu.races() == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda: here().synchronize(),
        lambda: here().record_event().synchronize(),
        torch.cuda.synchronize,
    ],
)
def test_and_is_there_after(wait):
    x = torch.arange(4.0, device="cuda")
    made = (x * 2).to("cpu", non_blocking=True)
    wait()
    assert made.sum() == 12
    assert virtualgpu.races() == []


def test_another_copy_does_not_help_but_one_later_on_the_stream_does():
    x = torch.arange(4.0, device="cuda")
    made = x.to("cpu", non_blocking=True)
    x.sum().item()
    assert made.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert virtualgpu.races() == []


@RACES
def test_a_copy_from_the_host_carries_what_the_host_writes_meanwhile():
    source = torch.ones(4).pin_memory()
    target = source.to("cuda", non_blocking=True)
    source.fill_(3)
    torch.cuda.synchronize()
    assert target.tolist() == [3.0] * 4
    assert kinds() == [OVERWRITTEN]


def test_pageable_memory_is_waited_for():
    source = torch.ones(4)
    target = source.to("cuda", non_blocking=True)
    source.fill_(3)
    back = torch.empty(4)
    back.copy_(target, non_blocking=True)
    assert back.tolist() == [1.0] * 4
    assert virtualgpu.races() == []


def test_taking_the_machine_away_ends_what_is_under_way():
    virtualgpu.use(None)
    with virtualgpu.use(gpus=1):
        made = torch.ones(2, device="cuda").to("cpu", non_blocking=True)
    assert made.tolist() == [1.0, 1.0]


# Several devices


def test_a_copy_between_gpus_is_ordered_on_both_sides():
    torch.cuda.Stream()  # compared from here on
    a = torch.ones(100, device="cuda:0") * 2
    b = a.to("cuda:1")
    c = b + 1
    b.copy_(a * 5)
    assert (c.sum().item(), b.sum().item()) == (300, 1000)
    assert virtualgpu.races() == []


@RACES
def test_but_not_with_other_streams_of_theirs(side):
    a = torch.ones(100, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        a.mul_(2)
    b = a.to("cuda:1")
    assert b.sum().item() == 100 and kinds() == [STALE]


# The backward pass


def test_a_backward_runs_on_the_streams_of_its_forward(side):
    w = torch.ones(10, 10, device="cuda", requires_grad=True)
    side.wait_stream(here())
    seen = []
    with torch.cuda.stream(side):
        y = w * 2
        y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()) or gradient * 1)
        z = torch.ops.aten.relu(y).sum()
    here().wait_stream(side)
    z.backward()
    assert w.grad.sum().item() == 200
    assert seen == [side] and here() == torch.cuda.default_stream()
    assert virtualgpu.races() == []


def test_a_forward_on_two_streams_needs_no_order_of_the_users_in_its_backward(side):
    w = torch.ones(10, 10, device="cuda", requires_grad=True)
    side.wait_stream(here())
    a = (w @ w).relu()
    with torch.cuda.stream(side):
        b = (w @ w).sin()
    here().wait_stream(side)
    (a + b).sum().backward()
    assert w.grad is not None
    assert virtualgpu.races() == []


def test_nodes_of_two_threads_that_have_the_same_number_are_told_apart(side):
    """Check nodes of two threads, each of which counts from 0, as in DataParallel."""
    w = torch.ones(10, device="cuda", requires_grad=True)
    side.wait_stream(here())
    seen, kept = [], []

    def forward(stream):
        with torch.cuda.stream(stream):
            y = w * 2
            y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
            kept.append(y.sum())

    for stream in (side, torch.cuda.default_stream()):
        thread = threading.Thread(target=forward, args=(stream,))
        thread.start()
        thread.join()
    kept[1].backward()
    assert seen == [torch.cuda.default_stream()]
