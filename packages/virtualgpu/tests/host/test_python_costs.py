"""Host time of Python around operators: calls of modules, replicas, threads, views and memory."""

import threading
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from virtualgpu import profiles
from virtualgpu.ops.work import LISTED

H200 = profiles.load("H200")
LAUNCH = H200.launch_seconds


@pytest.fixture
def machine():
    with virtualgpu.use(gpus=4, like="H200", values=False) as used:
        torch.cuda.init()
        yield used


def host_seconds(work) -> float:
    """Return the host's seconds of the second of two runs, because the first fills caches."""
    work()
    start = virtualgpu.host_time()
    work()
    return virtualgpu.host_time() - start


def wall_seconds(work) -> float:
    def done() -> None:
        work()
        for gpu in range(4):
            torch.cuda.synchronize(gpu)

    return host_seconds(done)


class Nothing(nn.Module):
    def forward(self, x):
        return x


def test_a_modules_call_takes_host_time(machine):
    assert host_seconds(lambda: Nothing()(None)) == pytest.approx(H200.module_seconds)
    assert host_seconds(lambda: nn.Sequential(Nothing(), Nothing())(None)) == pytest.approx(
        3 * H200.module_seconds
    )


def test_hooks_and_tracebacks_are_as_without(machine):
    seen = []

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError(x)

    module = nn.Sequential(Nothing(), Fails())
    module[0].register_forward_hook(lambda *args: seen.append("forward"))
    module.register_forward_pre_hook(lambda *args: seen.append("before"))
    with pytest.raises(ValueError) as error:
        module(7)
    assert seen == ["before", "forward"]
    frames = [frame.filename for frame in traceback.extract_tb(error.value.__traceback__)]
    assert not any("/virtualgpu/" in name for name in frames if name != __file__)
    assert (
        not torch.nn.modules.module._global_forward_hooks
        and not torch.nn.modules.module._global_forward_pre_hooks
    )


def test_what_is_taken_away_leaves_no_trace():
    def found() -> list:
        optimizer = torch.optim.Optimizer
        return [
            *(torch._C._get_tracing_state, getattr(torch._C, "_is_tracing", None)),
            *(nn.Module._replicate_for_data_parallel, nn.Module.zero_grad),
            *(optimizer._optimizer_step_code, optimizer.zero_grad),
        ]

    before = found()
    with virtualgpu.use(gpus=1):
        assert sum(now is not then for now, then in zip(found(), before, strict=True)) == 5
    assert found() == before


def test_an_operator_takes_a_launch_and_what_its_output_takes(machine):
    x = torch.randn(64, device="cuda")
    assert host_seconds(lambda: x.add_(1)) == pytest.approx(LAUNCH)
    assert host_seconds(lambda: x + 1) == pytest.approx(LAUNCH + H200.allocate_seconds)
    assert host_seconds(lambda: x.view(8, 8)) == pytest.approx(H200.view_seconds)
    assert host_seconds(lambda: torch.empty(64, device="cuda")) == pytest.approx(
        H200.allocate_seconds
    )


def test_autograd_takes_time_for_each_node_that_it_makes(machine):
    p = torch.randn(64, device="cuda", requires_grad=True)
    an_operator = LAUNCH + H200.allocate_seconds
    assert host_seconds(lambda: p.sin()) == pytest.approx(an_operator + H200.record_seconds)
    assert host_seconds(lambda: p.view(8, 8)) == pytest.approx(
        H200.view_seconds + H200.record_seconds
    )
    with torch.no_grad():
        assert host_seconds(lambda: p.sin()) == pytest.approx(an_operator)
    with torch.inference_mode():
        assert host_seconds(lambda: p.sin()) == pytest.approx(an_operator)


def backward_seconds(make) -> float:
    """Return the host's seconds of a backward pass, in its second run.

    `make` gets a leaf and returns the tensor to differentiate.
    """
    leaf = torch.randn(64, device="cuda", requires_grad=True)
    seconds = 0.0
    for _ in range(2):
        leaf.grad = None
        result = make(leaf)
        gradient = torch.ones_like(result)
        start = virtualgpu.host_time()
        result.backward(gradient)
        seconds = virtualgpu.host_time() - start
    return seconds


def test_a_backward_pass_takes_its_nodes_and_their_operators(machine):
    an_operator = LAUNCH + H200.allocate_seconds
    leaf = H200.node_seconds + H200.leaf_seconds + H200.view_seconds  # the gradient is detached
    once = H200.backward_seconds + leaf
    assert backward_seconds(lambda x: x.view(8, 8)) == pytest.approx(
        once + H200.node_seconds + H200.view_seconds
    )
    assert backward_seconds(torch.sin) == pytest.approx(once + H200.node_seconds + 2 * an_operator)


def test_nodes_that_only_hand_a_gradient_on_take_time_too(machine):
    few = backward_seconds(lambda x: x.sin().cos())
    many = backward_seconds(lambda x: (x.sin() + 1 + 1 + 1).cos())
    assert many - few == pytest.approx(3 * H200.node_seconds)


def test_where_several_threads_make_nodes_their_numbers_say_nothing(machine):
    """Check this because each thread counts its own nodes.

    Otherwise the time would depend on earlier work of the process.
    """
    few = backward_seconds(lambda x: x.sin().cos())

    def elsewhere() -> None:
        torch.ones(2, device="cuda", requires_grad=True).sin()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert backward_seconds(lambda x: (x.sin() + 1 + 1 + 1).cos()) == pytest.approx(few)


def trained(count: int) -> list[torch.Tensor]:
    """Return `count` parameters with gradients, and one more without."""
    made = [torch.randn(64, device="cuda", requires_grad=True) for _ in range(count + 1)]
    for parameter in made[:-1]:
        parameter.grad = torch.ones_like(parameter)
    return made


def test_an_optimizer_takes_time_for_each_parameter_with_a_gradient(machine):
    few, many = (torch.optim.SGD(trained(count), 0.1) for count in (2, 12))
    assert host_seconds(few.step) > H200.optimizer_seconds + LAUNCH
    an_item = (host_seconds(many.step) - host_seconds(few.step)) / 10
    assert an_item == pytest.approx(H200.parameter_seconds + LISTED * LAUNCH)


def test_clearing_gradients_takes_time_for_each(machine):
    module = nn.Linear(4, 4, device="cuda")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    clears = H200.zero_grad_seconds + 2 * H200.gradient_seconds
    named = 2 * H200.cpu_launch_seconds  # an optimizer names its steps for profilers
    for owner, seconds in ((torch.optim.SGD(trained(2), 0.1), clears + named), (module, clears)):
        start = virtualgpu.host_time()
        owner.zero_grad()
        assert virtualgpu.host_time() - start == pytest.approx(seconds)
    assert module.weight.grad is None


def test_an_operator_on_lists_of_the_host_goes_through_them(machine):
    few, many = ([torch.zeros(4) for _ in range(count)] for count in (2, 12))
    longer = host_seconds(lambda: torch._foreach_add_(many, 1)) - host_seconds(
        lambda: torch._foreach_add_(few, 1)
    )
    assert longer == pytest.approx(10 * H200.cpu_listed_seconds, rel=0.01)


def test_reading_a_number_of_the_host_takes_less_than_an_operator(machine):
    number = torch.zeros(())
    assert host_seconds(number.item) == pytest.approx(H200.cpu_item_seconds)
    assert H200.cpu_item_seconds < H200.cpu_launch_seconds / 3


def test_a_few_rows_of_a_large_table_take_little_time(machine):
    table = torch.empty(1 << 20, 1 << 10, device="cuda")
    rows = torch.zeros(16, dtype=torch.int64, device="cuda")
    assert wall_seconds(lambda: nn.functional.embedding(rows, table)) < 1e-4
    assert wall_seconds(lambda: table.index_select(0, rows)) < 1e-4
    assert wall_seconds(lambda: table.sum()) > 5e-4


def test_memory_from_the_driver_takes_longer_than_from_the_cache(machine):
    def fresh() -> None:
        torch.cuda.empty_cache()
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    cached = host_seconds(lambda: torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    assert cached == pytest.approx(H200.allocate_seconds)
    expected = (
        H200.empty_cache_seconds + H200.free_seconds + H200.malloc_seconds + H200.allocate_seconds
    )
    assert host_seconds(fresh) == pytest.approx(expected, rel=0.1)


def test_freeing_waits_for_the_gpu(machine):
    x = torch.randn(8192, 8192, device="cuda")
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start = virtualgpu.host_time()
    x @ x
    launched = virtualgpu.host_time() - start
    torch.cuda.empty_cache()
    assert launched < 1e-3 < 2e-2 < virtualgpu.host_time() - start


def test_replicas_take_time_by_module_and_tensor(machine):
    def replicate(depth: int, gpus: int) -> float:
        net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)]).cuda()
        return host_seconds(lambda: nn.parallel.replicate(net, list(range(gpus))))

    # A layer has two tensors and is a child itself. Each tensor is also broadcast and becomes a
    # view.
    layer = H200.replicate_seconds + 3 * H200.attribute_seconds
    assert replicate(20, 2) - replicate(10, 2) > 2 * 10 * layer
    assert replicate(20, 4) - replicate(20, 2) > 2 * 20 * layer


def test_a_broadcast_reaches_all_gpus_as_soon_as_one(machine):
    """Check this because NCCL passes the bytes on over links that all work at the same time."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    two, four = (
        wall_seconds(lambda n=n: nn.parallel.comm.broadcast(x, list(range(n)))) for n in (2, 4)
    )
    assert two == pytest.approx((1 << 30) / H200.p2p_bytes_per_second, rel=0.05)
    assert four == pytest.approx(two, rel=0.05)


def test_a_thread_takes_time_to_start_and_threads_wait_for_one_lock(machine):
    x = [torch.randn(64, device=f"cuda:{gpu}") for gpu in range(4)]

    def work(gpu: int) -> None:
        for _ in range(20):
            x[gpu].add_(1)

    def threads(count: int) -> None:
        started = [threading.Thread(target=work, args=(gpu,)) for gpu in range(count)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    alone = H200.thread_seconds + 20 * LAUNCH
    assert host_seconds(lambda: threads(1)) == pytest.approx(alone, rel=0.25)
    # Two threads launch more slowly at once than one after the other, because each of them has to
    # wake up for each of its launches.
    assert host_seconds(lambda: threads(4)) > 2 * 4 * alone


def test_two_large_kernels_on_two_streams_take_as_long_as_one_after_the_other(machine):
    x = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()

    def one_stream() -> None:
        x @ x
        x @ x

    def two_streams() -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                x @ x

    assert wall_seconds(two_streams) == pytest.approx(wall_seconds(one_stream), rel=0.05)


def test_convolutions_that_fill_a_part_of_the_gpu_run_at_once_on_two_streams(machine):
    # few tiles, long sums
    x, weight = (
        torch.randn(1, 4096, 8, 8, device="cuda"),
        torch.randn(64, 4096, 3, 3, device="cuda"),
    )
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()

    def on(chosen) -> float:
        def work() -> None:
            for stream in chosen:
                with torch.cuda.stream(stream):
                    for _ in range(10):
                        F.conv2d(x, weight)

        return wall_seconds(work)

    assert on(streams) < 0.7 * on([streams[0]] * 2)


def test_cublas_splits_long_sums_but_hardly_with_a_bias(machine):
    """Check a linear layer of 256 rows, 1024 to 1024, which took 27 µs with its bias on an H200.

    If its sums were split, it would take 19 µs. The times are in small_kernels.json.
    """
    x = torch.empty(256, 1024, device="cuda")
    microseconds = {}
    for bias in (False, True):
        layer = nn.Linear(1024, 1024, bias=bias, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.no_grad():
            layer(x)
            torch.cuda._sleep(10**6)  # the launch is made before the kernel can start
            begin.record()
            layer(x)
            end.record()
        end.synchronize()
        microseconds[bias] = 1e3 * begin.elapsed_time(end)
    assert microseconds[True] == pytest.approx(27, rel=0.15)
    assert microseconds[False] < 0.8 * microseconds[True]
