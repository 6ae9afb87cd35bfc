"""Captures of CUDA graphs, and what they refuse as CUDA does."""

from collections.abc import Callable

import pytest
import torch

from virtualgpu.errors import AcceleratorError

pytestmark = pytest.mark.usefixtures("graphed")
IN_CAPTURE, BEFORE = (
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_a_capture_computes_nothing() -> None:
    x, made = torch.ones(3, device="cuda"), []
    state = torch.cuda.get_rng_state()
    captured(lambda: made.extend([x.add_(1), x + 1, torch.rand(3, device="cuda")]))
    assert x.tolist() == [1, 1, 1] and made[1].tolist() == made[2].tolist() == [0, 0, 0]
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.requires_grad_().prod().backward(),
        lambda x: x.requires_grad_().cumprod(0).sum().backward(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: (
            torch.cuda.Event().record(torch.cuda.default_stream())
            or torch.cuda.default_stream().query()
        ),
    ],
)
def test_whoever_waits_ends_the_capture(waits: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(AcceleratorError, match=BEFORE) as found:
        captured(lambda: waits(x))
    assert IN_CAPTURE in str(found.value.__context__)


def test_an_event_of_the_capture_cannot_be_waited_for() -> None:
    with pytest.raises(AcceleratorError, match=BEFORE) as found:
        captured(lambda: torch.cuda.current_stream().record_event().synchronize())
    assert "last recorded in a capturing stream" in str(found.value.__context__)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    "copies",
    [lambda x: x.cpu(), lambda x: torch.ones(3).cuda(), lambda x: torch.tensor([1], device="cuda")],
)
def test_only_pinned_memory_is_copied(copies: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(
        RuntimeError, match="during CUDA graph capture unless the CPU tensor is pinned"
    ):
        captured(lambda: copies(x))


def test_pinned_memory_is_read_and_written_at_each_replay() -> None:
    here, there, made = torch.ones(3).pin_memory(), torch.zeros(3).pin_memory(), []
    graph = captured(
        lambda: (
            made.append(here.to("cuda", non_blocking=True) * 2),
            there.copy_(made[0], non_blocking=True),
        )
    )
    assert there.tolist() == [0, 0, 0]
    for value in (1.0, 7.0):
        here.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert there.tolist() == [2 * value] * 3


def test_streams_join_and_have_to_come_back() -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()

    def forked(joins: bool) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        if joins:
            torch.cuda.current_stream().wait_stream(side)

    captured(lambda: forked(True)).replay()
    assert x.tolist() == [2, 2, 2]
    with pytest.raises(AcceleratorError, match="capturing stream has unjoined work"):
        captured(lambda: forked(False))
    assert not side.is_capturing()


def test_work_from_outside_cannot_be_waited_for() -> None:
    outside = torch.cuda.default_stream().record_event()
    with pytest.raises(AcceleratorError, match=BEFORE) as found:
        captured(outside.wait)
    assert "dependency created on uncaptured work in another stream" in str(found.value.__context__)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_generators_are_registered() -> None:
    generator, made = torch.Generator("cuda"), []
    with pytest.raises(RuntimeError, match="not in capture mode"):
        captured(lambda: torch.rand(3, device="cuda", generator=generator))
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        made.append(torch.rand(3, device="cuda", generator=generator))
        with pytest.raises(
            RuntimeError,
            match="Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture",
        ):
            torch.cuda.get_rng_state()
    for _ in range(2):
        state = generator.get_state()
        graph.replay()
        assert torch.equal(
            made[0],
            torch.rand(3, device="cuda", generator=generator.clone_state().set_state(state)),
        )


def test_memory_that_is_gone_is_told() -> None:
    x, made = [torch.ones(3, device="cuda")], []
    graph = captured(lambda: made.append(x[0] + 1))
    x.clear()
    with pytest.warns(UserWarning, match=r"a tensor of size \[3\] that was freed"):
        graph.replay()


def test_an_index_out_of_range_asserts_at_the_replay() -> None:
    weight, index, made = torch.ones(4, 2, device="cuda"), torch.full((1,), 9, device="cuda"), []
    graph = captured(lambda: made.append(torch.nn.functional.embedding(index, weight)))
    torch.cuda.synchronize()
    graph.replay()
    with pytest.raises(AcceleratorError, match="device-side assert"):
        torch.cuda.synchronize()


def test_a_stream_of_another_gpu_joins() -> None:
    x, y, there = (
        torch.ones(3, device="cuda:0"),
        torch.ones(3, device="cuda:1"),
        torch.cuda.Stream(1),
    )

    def both() -> None:
        x.add_(1)
        there.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(there):
            y.copy_(x, non_blocking=True)
            y.mul_(5)
        torch.cuda.current_stream(0).wait_stream(there)

    graph = captured(both)
    assert y.tolist() == [1, 1, 1]
    allocated = torch.cuda.memory_allocated(1)
    graph.replay()
    torch.cuda.synchronize(1)
    assert y.tolist() == [10, 10, 10] and torch.cuda.memory_allocated(1) == allocated


def test_collectives_are_refused() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(NotImplementedError, match="a collective in a CUDA graph"):
        captured(lambda: (x.add_(1), torch.ops._c10d_functional.all_reduce(x, "sum", "0")))
