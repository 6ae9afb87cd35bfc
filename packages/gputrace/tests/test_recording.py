"""Recordings on virtual GPUs against what torch.cuda says, and on real ones where there are any."""

import contextlib
import functools
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gputrace
import virtualgpu
from gputrace import phases
from gputrace.events import ACTION_OF
from virtualgpu import front_end

MiB = 1 << 20


def train(steps=2, device="cuda"):
    """Take some training steps with a small model, and keep nothing of them."""
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        loss = net(torch.randn(128, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_figures_are_the_allocators(machine):
    torch.zeros(1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with gputrace.record() as trace:
        train()
        kept = torch.zeros(MiB, device="cuda")
    assert trace.peak == torch.cuda.max_memory_allocated()
    assert (trace.allocated[0], trace.reserved[0]) == before
    assert (trace.allocated[-1], trace.reserved[-1]) == (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
    )
    free, total = torch.cuda.mem_get_info()
    assert trace.timeline(0).used[-1] == total - free
    assert trace.lost == 0 and kept.is_cuda


def test_every_moment_is_the_allocators(machine):
    """After each event, the trace has as many reserved bytes as the allocator counted then."""
    from virtualgpu import hardware

    allocator = hardware.machine().gpus[0].allocator
    counted = []

    def listener(action, block, size):
        # The allocator tells of an event before it counts the free that it completes
        counted.append((action, allocator.reserved))

    with gputrace.record() as trace:
        allocator.listen(listener)
        train()
        allocator.unlisten(listener)
    grown = [reserved for action, reserved in counted]
    assert trace.timeline(0).reserved[1 : len(grown) + 1].tolist() == grown


def test_phases_are_found(machine):
    with gputrace.record() as trace:
        train(steps=2)
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "step"] * 2
    for earlier, later in zip(trace.phases, trace.phases[1:], strict=False):
        assert earlier.start < earlier.end <= later.start
    assert trace.line(trace.phases[1].stack).text == "loss.backward()"
    assert trace.line(trace.phases[2].stack).text == "optimizer.step()"


def test_a_step_that_fails_does_not_swallow_what_follows(machine):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            workspace = torch.zeros(MiB, device="cuda")
            if self.fails:
                raise ZeroDivisionError(f"after {workspace.nbytes} bytes")
            return super().step(closure)

    net = nn.Linear(64, 64, device="cuda")
    # PyTorch watches the step of a class once one of it was made: here of both
    torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = Failing(net.parameters(), lr=0.1)
    with gputrace.record() as trace:
        for optimizer.fails in (True, False):
            net(torch.randn(8, 64, device="cuda")).sum().backward()
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step()
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "step"] * 2
    broken = trace.phases[2]
    times = [
        event.time
        for event in trace.events
        if event.requested == 4 * MiB and event.action == ACTION_OF["alloc"]
    ]
    assert broken.start <= times[0] <= broken.end <= trace.phases[3].start


def test_a_step_and_a_backward_belong_to_the_line_that_called_them(machine):
    with gputrace.record() as trace:
        train()
    by_text = {entry.line.text: entry for entry in trace.lines()}
    # two matrices and two biases, each a multiple of 512 bytes or rounded up to one
    weights = 2 * 64 * 256 * 4 + 256 * 4 + 1024
    assert by_text["optimizer.step()"].delta > 2 * weights - 4096
    assert by_text["optimizer.zero_grad()"].delta < 0
    assert max(entry.peak for entry in trace.lines()) == trace.peak


def test_categories(machine):
    with gputrace.record() as trace:
        net = nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.randn(64, 512, device="cuda")).relu().sum().backward()
        optimizer.step()
    at_end = {name: int(layer[-1]) for name, layer in trace.layers().items()}
    weights = 512 * 512 * 4 + 512 * 4
    assert at_end["parameters"] == weights
    assert at_end["gradients"] == weights
    assert at_end["optimizer state"] == 2 * weights  # its two step counters stay on the CPU
    assert at_end["workspace"] == 2 * 32 * MiB + MiB  # two handles of cuBLAS, one of cuBLASLt
    assert trace.layers()["activations"].max() >= 2 * 64 * 512 * 4
    assert sum(at_end.values()) == torch.cuda.memory_allocated()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_parameters_and_what_a_backward_frees_again_is_in_flight(
    machine, checkpointed
):
    """Without checkpointing, at most the gradients of a layer's output and input are in flight.

    With checkpointing, the three results between layers are computed again, and they are in flight
    with one gradient.
    """
    rows, width = 4096, 256
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).cuda()
    x = torch.randn(rows, width, device="cuda", requires_grad=True)
    run = functools.partial(checkpoint, net, use_reentrant=False) if checkpointed else net
    run(x).sum().backward()
    x.grad = None
    net.zero_grad()
    with gputrace.record() as trace:
        run(x).backward(torch.ones_like(x))
    layers = trace.layers()
    assert layers["gradients"].max() == layers["gradients"][-1] == 4 * width * width * 4 + x.nbytes
    assert (
        layers["in flight"].max() == (4 if checkpointed else 2) * x.nbytes
        and layers["in flight"][-1] == 0
    )


def test_a_model_that_ends_with_its_backward_had_parameters(machine):
    """The model is freed when the function returns, right after its backward pass.

    No virtual time passes between the two. Its parameters must still be found.
    """

    def train_once():
        net = nn.Linear(512, 512, device="cuda")
        net(torch.randn(64, 512, device="cuda")).sum().backward()

    with gputrace.record() as trace:
        train_once()
    assert trace.layers()["parameters"].max() == 512 * 512 * 4 + 512 * 4


def test_layers_add_up_to_what_was_allocated(machine):
    held = torch.zeros(1000, device="cuda")
    with gputrace.record() as trace:
        train()
        del held
    assert (sum(trace.layers().values()) == trace.allocated).all()


def test_what_was_there_before_and_goes_keeps_its_category(machine):
    net = nn.Linear(512, 512, device="cuda")
    weights = 512 * 512 * 4 + 512 * 4
    with gputrace.record() as trace:
        del net
    parameters = trace.layers()["parameters"]
    assert (parameters[0], parameters[-1]) == (weights, 0)
    assert trace.layers()["other"].tolist() == [0] * len(trace.times)
    assert {
        block.state
        for segment in trace.segments("start")
        for block in segment.blocks
        if block.requested
    } == {"allocated"}


def test_recordings_in_one_another(machine):
    with gputrace.record() as outer:
        first = torch.zeros(MiB, device="cuda")
        with gputrace.record() as inner:
            second = torch.zeros(MiB, device="cuda")
        del first
    assert inner.allocated[0] == 4 * MiB and inner.peak == 8 * MiB
    assert outer.allocated[0] == 0 and outer.peak == 8 * MiB
    assert outer.allocated[-1] == second.nbytes


def test_recordings_that_overlap(machine):
    """Two threads record at the same time, and neither recording ends the other."""
    started, ended = threading.Event(), threading.Event()
    traces = {}

    def other():
        with gputrace.record() as traces["other"]:
            started.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    started.wait(10)
    with gputrace.record() as trace:
        torch.zeros(MiB, device="cuda")
    torch.zeros(3 * MiB, device="cuda")
    ended.set()
    thread.join()
    assert trace.peak == 4 * MiB
    assert traces["other"].peak == 12 * MiB


def test_peaks_and_history_of_the_user_stay(machine):
    torch.zeros(8 * MiB, device="cuda")
    torch.cuda.memory._record_memory_history()
    torch.zeros(1, device="cuda")
    peak = torch.cuda.max_memory_allocated()
    with gputrace.record():
        torch.zeros(MiB, device="cuda")
    torch.zeros(2, device="cuda")
    assert torch.cuda.max_memory_allocated() == peak
    allocated = [
        entry["size"]
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
        if entry["action"] == "alloc"
    ]
    assert allocated == [4, 4 * MiB, 8]
    torch.cuda.memory._record_memory_history(None)


def test_nothing_is_left_patched(machine):
    mark = torch.profiler.record_function
    before = (
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        mark.__enter__,
        mark.__exit__,
    )
    with pytest.raises(ZeroDivisionError), gputrace.record() as trace:
        torch.zeros(1, device="cuda")
        raise ZeroDivisionError
    assert (
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        mark.__enter__,
        mark.__exit__,
    ) == before
    assert phases._notes == phases._mark_notes == [] and phases._undo is None
    assert trace.peak == 512 and trace.error == ""


def test_parts_named_with_record_function_are_marks(machine):
    @torch.profiler.record_function("evaluation")
    def evaluate(model, x):
        return model(x)

    model, x = torch.nn.Linear(64, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    # its own record_function is not a mark of the user's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.record_function("before"), gputrace.record(timeline=True) as trace:
        for step in range(2):
            with torch.profiler.record_function(f"step {step}"):
                model(x).sum().backward()
                optimizer.step()
        evaluate(model, x)
        with torch.profiler.record_function("nothing"):
            pass
        torch.cuda.synchronize()
    assert [mark.name for mark in trace.marks] == ["step 0", "step 1", "evaluation"]
    ends = [trace.marks[0].start, *(mark.end for mark in trace.marks)]
    assert ends == sorted(ends) and ends[-1] == pytest.approx(
        trace.spans.end[trace.spans.device == 0].max()
    )
    backward = [trace.line(stack).text for stack in trace.spans.stack[trace.spans.backward]]
    assert set(backward) == {"model(x).sum().backward()"}


def test_what_is_lost_is_counted(machine):
    kept = []
    with gputrace.record(max_events=10) as trace:
        for _ in range(20):
            kept.append(torch.zeros(1, device="cuda"))
    assert len(trace.events) == 10
    assert trace.lost == 11  # a segment and ten blocks
    assert trace.allocated[-1] == 20 * 512 and trace.peak == 20 * 512
    assert "11 events were lost" in repr(trace)
    with pytest.raises(ValueError, match="11 events were lost"):
        trace.segments("peak")


def test_what_is_left_of_many_births_at_one_address_is_one_leak(machine):
    kept = None
    with gputrace.record(max_events=12) as trace:
        for _ in range(20):
            kept = None
            kept = torch.zeros(MiB, device="cuda")
    assert trace.lost and kept.is_cuda
    assert [leak.bytes for leak in trace.leaks()] == [4 * MiB]


def test_a_machine_that_is_taken_away_in_the_block(machine):
    with gputrace.record() as trace:
        torch.zeros(MiB, device="cuda")
        virtualgpu.use(None)
    assert trace.peak == 4 * MiB and trace.badge == "virtual GPU, modelled on NVIDIA H200"
    assert trace.leaks() == []


def test_a_generator_that_outlives_the_machine():
    def recorded():
        with gputrace.record() as trace:
            yield trace

    with virtualgpu.use(gpus=1):
        held_open = recorded()
        trace = next(held_open)
        torch.zeros(MiB, device="cuda")
    held_open.close()
    assert trace.peak == 4 * MiB and phases._notes == []


def test_a_child_that_is_forked_in_the_block_leaves_it_quietly(machine):
    with gputrace.record() as trace:
        torch.zeros(MiB, device="cuda")
        pid = os.fork()
        if pid:
            status = os.waitpid(pid, 0)[1]
    if not pid:
        os._exit(0 if phases._notes == [] and "is not finished" in repr(trace) else 1)
    assert status == 0 and trace.peak == 4 * MiB


def test_an_out_of_memory_error_is_kept():
    with (
        virtualgpu.use(gpus=1, memory="2GiB"),
        pytest.raises(torch.OutOfMemoryError),
        gputrace.record() as trace,
    ):
        torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    assert trace.error.startswith("CUDA out of memory. Tried to allocate 4.00 GiB.")
    assert [event.requested for event in trace.events] == [4 << 30]


def test_figures_before_the_end_are_refused(machine):
    with gputrace.record() as trace:
        assert "is not finished" in repr(trace)
        with pytest.raises(RuntimeError, match="is not finished"):
            print(trace.peak)
        with pytest.raises(RuntimeError, match="is not finished"):
            print(trace.events)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        print(trace.nonsense)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "many", None])
def test_a_bad_bound_is_refused(machine, bad):
    with pytest.raises(ValueError, match="max_events="):
        gputrace.record(max_events=bad)  # at the call, not when a `with` block begins


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to record")
    with pytest.raises(RuntimeError, match=rf"{front_end.name()}.use\(gpus=1\)"), gputrace.record():
        pass


def test_a_recording_is_the_same_every_time(machine):
    def recorded():
        torch.cuda.empty_cache()
        with gputrace.record() as trace:
            train()
        return trace

    recorded()  # CUDA's workspaces are there from now on
    first, second = recorded(), recorded()
    assert repr(first) == repr(second) and repr(first.lines()) == repr(second.lines())
    assert [(e.action, e.size) for e in first.events] == [(e.action, e.size) for e in second.events]


@pytest.mark.gpu
def test_on_a_real_gpu_to_the_byte():
    torch.zeros(1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with gputrace.record() as trace:
        train(steps=3)
        kept = [torch.zeros(n, device="cuda") for n in (1, 1000, 300_000, 4_000_000, 30_000_000)]
        del kept[2:4]
        kept.append(torch.zeros(2_999_000, device="cuda"))
    assert trace.lost == 0
    assert trace.peak == torch.cuda.max_memory_allocated()
    assert trace.allocated[-1] == torch.cuda.memory_allocated()
    assert trace.reserved[-1] == torch.cuda.memory_reserved()
    names = {
        "active_allocated": "allocated",
        "active_awaiting_free": "pending",
        "active_pending_free": "pending",
        "inactive": "free",
    }
    told = [
        (s["address"], [(b["size"], names[b["state"]]) for b in s["blocks"]])
        for s in torch.cuda.memory_snapshot()
        if s["device"] == 0
    ]
    assert [
        (s.address, [(b.size, b.state) for b in s.blocks]) for s in trace.segments("end", 0)
    ] == told
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "step"] * 3
    assert trace.line(trace.phases[1].stack).text == "loss.backward()"
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.gpu
def test_on_a_real_gpu_the_users_history_stays():
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        with gputrace.record() as trace:
            torch.zeros(MiB, device="cuda")
        assert torch._C._cuda_isHistoryEnabled()
        with gputrace.record() as outer, gputrace.record() as inner:
            torch.zeros(MiB, device="cuda")
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert (
        trace.allocated.max() - trace.allocated[0]
        == inner.peak - inner.allocated[0]
        == outer.peak - outer.allocated[0]
        == 4 * MiB
    )


def test_leaks_are_named(machine):
    history = []

    def forward(x):
        history.append(x * 2)

    with gputrace.record() as trace:
        forward(torch.zeros(MiB, device="cuda"))
        mine = torch.ones(1000, device="cuda")
    leaks = trace.leaks()
    assert [leak.bytes for leak in leaks] == [4 * MiB, 4096]
    assert leaks[0].line.text == "history.append(x * 2)" and "history[0]" in leaks[0].text
    assert "mine" in leaks[1].text
    del mine
    history.clear()
    assert trace.leaks() == []


def test_a_loaded_trace_knows_no_leaks(machine, tmp_path):
    with gputrace.record() as trace:
        kept = torch.zeros(1, device="cuda")
    trace.save(tmp_path / "a.trace")
    loaded = gputrace.Trace.load(tmp_path / "a.trace")
    assert repr(loaded) == repr(trace) and kept.is_cuda
    with pytest.raises(RuntimeError, match="loaded from a file"):
        loaded.leaks()
