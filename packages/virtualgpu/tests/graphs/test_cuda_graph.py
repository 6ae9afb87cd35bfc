"""Replays of CUDA graphs: their values, memory and time."""

import copy
import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu import VirtualGPUs

pytestmark = pytest.mark.usefixtures("graphed")


def test_a_training_step_is_the_same_as_without_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4)).cuda()
    eager = copy.deepcopy(model)
    x, y = torch.randn(5, 8, device="cuda"), torch.randn(5, 4, device="cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizers = [torch.optim.Adam(m.parameters(), capturable=True) for m in (model, eager)]
    side = torch.cuda.Stream()
    for m, optimizer in zip((model, eager), optimizers, strict=True):
        torch.cuda.manual_seed(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(m, optimizer, x)
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizers[0], x)
    for seed in range(3):
        data = torch.randn(5, 8, device="cuda")
        x.copy_(data)
        torch.cuda.manual_seed(seed)
        graph.replay()
        torch.cuda.manual_seed(seed)
        assert torch.equal(loss, step(eager, optimizers[1], data))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True)
    )


def test_make_graphed_callables() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    graphed = torch.cuda.make_graphed_callables(
        copy.deepcopy(model), (torch.randn(5, 8, device="cuda"),)
    )
    x = torch.randn(5, 8, device="cuda")
    for m in (model, graphed):
        m(x).square().sum().backward()
    assert all(
        torch.allclose(a.grad, b.grad)
        for a, b in zip(model.parameters(), graphed.parameters(), strict=True)
    )
    assert torch.equal(model(x), graphed(x))


def test_a_replay_is_one_launch_and_the_time_of_the_kernels(graphed: VirtualGPUs) -> None:
    x, many = torch.ones(1 << 20, device="cuda"), 50

    def add() -> torch.Tensor:
        y = x
        for _ in range(many):
            y = y + 1
        return y

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = add()
    times = []
    for run in (add, graph.replay):
        torch.cuda.synchronize()
        start = virtualgpu.host_time()
        run()
        launched = virtualgpu.host_time()
        torch.cuda.synchronize()
        times.append((launched - start, virtualgpu.host_time() - launched))
    (eager, _), (replayed, waited) = times
    assert replayed < eager / many * 2
    assert waited > 10 * replayed
    assert y[0].item() == many + 1


def test_its_memory_is_private_and_reused_by_who_shares_the_pool() -> None:
    x, pool = torch.ones(1000, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    with torch.cuda.graph(graphs[0], pool=pool):
        b = x + 1
        c = x + 2
    with torch.cuda.graph(graphs[1], pool=pool):
        d = b + 3
        del b
    with torch.cuda.graph(graphs[2], pool=pool):
        e = c + 4  # at the address of b
    assert {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()} == {
        (0, 0),
        pool,
    }
    for graph in graphs:
        graph.replay()
    assert (d[0].item(), e[0].item()) == (5, 7)
    graphs[1].replay()
    assert d[0].item() == 10


def test_a_result_outlives_its_graph() -> None:
    x = torch.ones(1000, device="cuda")
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    # half of it is for the generator's seed, on the capture's stream
    assert torch.cuda.memory_reserved() == before + (4 << 20)
    del graph
    torch.cuda.empty_cache()
    assert y[0].item() == 2 and torch.cuda.memory_reserved() == before + (2 << 20)
    del y
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_the_cache_is_not_emptied_during_a_capture() -> None:
    """Check that the call is ignored, as in PyTorch from 2.8 on (pull request 158152)."""
    x = torch.ones(1000, device="cuda")
    torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cached = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == cached
        x.add_(1)
    graph.replay()
    assert x[0].item() == 2


def test_what_a_graph_writes_is_raced_for(graphed: VirtualGPUs) -> None:
    x, graph, side = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y = x + 1
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    with pytest.warns(UserWarning, match=r"before `CUDA graph` on stream \d+ of cuda:0"):
        y.sum()


def test_events_of_the_program_happen_at_each_replay() -> None:
    x, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    with torch.cuda.graph(graph):
        start.record()
        y = x + 1
        end.record()
    graph.replay()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0 and y[0].item() == 2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_cuda_says(tmp_path: Path) -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        torch.ones(3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="already owns a captured graph"),
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        graph.capture_begin()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    assert "fill_" in (tmp_path / "graph.dot").read_text()
    with pytest.raises(NotImplementedError, match="raw_cuda_graph"):
        graph.raw_cuda_graph()
    graph.reset()
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"), torch.cuda.graph(graph):
        pass


@pytest.mark.parametrize("shares", [False, True])
def test_graphs_of_one_pool_spoil_each_other_if_nothing_orders_them(shares: bool) -> None:
    x, sides, graphs, made = (
        torch.ones(1000, device="cuda"),
        [torch.cuda.Stream() for _ in range(2)],
        [],
        [],
    )
    pool = torch.cuda.graph_pool_handle()
    for k in (1, 2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool if shares else None):
            y = x
            for _ in range(5):
                y = y * 2 + k
            made.append(y)
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="CUDA graph") if shares else nullcontext():
        for side, graph in zip(sides, graphs, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    assert ([y[0].item() for y in made] == [63, 94]) is not shares
