"""PyTorch's own tables and files of torch.profiler, with virtual time."""

import json

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import virtualgpu
from virtualgpu.clock.machine_clock import Span

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA


@pytest.fixture
def step():
    """Run one training step of a small network."""
    with virtualgpu.use(1, like="H200"):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.ones(256, 512)

        def step():
            with record_function("forward"):
                loss = model(x.cuda()).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        step()
        yield step


def profiled(step, **options):
    with profile(**options) as found:
        step()
    return found


def test_the_table_has_the_devices_columns_the_same_on_each_run(step):
    tables = [
        profiled(step, activities=[CPU, CUDA]).key_averages().table(sort_by="cuda_time_total")
        for _ in range(2)
    ]
    assert tables[0] == tables[1] and "Self CUDA time total" in tables[0]


def test_a_kernel_is_its_operators_and_their_times_are_the_clocks(step):
    begin = virtualgpu.host_time()
    found = profiled(step)
    took = (virtualgpu.host_time() - begin) * 1e6
    rows = {row.key: row for row in found.key_averages()}
    assert rows["aten::addmm"].count == rows["addmm"].count == 2
    assert rows["aten::addmm"].device_time_total == rows["addmm"].self_device_time_total > 0
    assert (
        rows["addmm"].device_type == DeviceType.CUDA
        and rows["aten::linear"].device_time_total == rows["addmm"].self_device_time_total
    )
    # 0.5 MB of pageable memory
    assert rows["aten::to"].device_time_total == rows["Memcpy HtoD"].self_device_time_total > 40
    # the copy from pageable memory and the loss that is read
    assert rows["cudaStreamSynchronize"].count == 2
    assert not {"PythonDispatchMode", "PythonSubclass"} & rows.keys() and not [
        key for key in rows if "virtual clock" in key
    ]
    assert 0.7 * took < sum(row.self_cpu_time_total for row in rows.values()) <= took


def test_each_work_of_the_gpu_is_there_once_where_the_clock_had_it(step):
    begin, heard, clock = virtualgpu.host_time(), [], virtualgpu.current().machine.clock
    hear = heard.append
    clock.listen(hear)
    found = profiled(step, activities=[CUDA])
    clock.unlisten(hear)
    spans = [what for what in heard if isinstance(what, Span)]
    events = [event.time_range for event in found.events() if event.device_type == DeviceType.CUDA]
    assert [time.start for time in events] == pytest.approx(
        [1e6 * (span.start - begin) for span in spans], abs=0.01
    )
    assert [time.elapsed_us() for time in events] == pytest.approx(
        [1e6 * span.duration for span in spans], abs=0.01
    )
    # the calls that wait take host time
    assert {event.device_type for event in found.events()} == {
        DeviceType.CPU,
        DeviceType.CUDA,
    }
    assert not [event for event in found.events() if event.name.startswith("aten::")]


def test_the_file_for_chrome_has_the_devices_lanes_and_an_arrow_to_each_kernel(step, tmp_path):
    profiled(step).export_chrome_trace(str(tmp_path / "trace.json"))
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert {"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "cuda_runtime"} < {
        entry["cat"] for entry in slices
    }
    kernels = [entry for entry in slices if entry["cat"] == "kernel"]
    assert {(entry["pid"], entry["tid"]) for entry in kernels} == {(0, 7)}
    assert not [
        entry
        for entry in entries
        if "virtual clock" in entry["name"] or entry["name"].startswith("Python")
    ]
    operators = {
        entry["args"]["External id"]: entry for entry in slices if entry["cat"] == "cpu_op"
    }
    for kernel in kernels:
        operator, arrow = operators[kernel["args"]["External id"]], kernel["args"]["correlation"]
        (begin,) = (
            entry
            for entry in entries
            if entry["ph"] == "s" and entry["cat"] == "ac2g" and entry["id"] == arrow
        )
        assert (
            operator["name"] == f"aten::{kernel['name']}"
            and operator["ts"] - 0.01 <= begin["ts"] <= operator["ts"] + operator["dur"]
        )
        assert (begin["pid"], begin["tid"]) == (operator["pid"], operator["tid"]) and begin[
            "ts"
        ] <= kernel["ts"]


def test_a_schedule_records_the_steps_that_it_names(step, tmp_path):
    found = []

    def ready(profiler):
        found.append([event.count for event in profiler.key_averages() if event.key == "addmm"])
        profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))

    with profile(
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1), on_trace_ready=ready
    ) as profiler:
        for _ in range(5):
            step()
            profiler.step()
    assert found == [[4]] and (tmp_path / "trace.json.gz").stat().st_size > 1000


def test_stacks_and_shapes_are_there(step):
    found = profiled(step, with_stack=True, record_shapes=True)
    shapes = [
        row.input_shapes
        for row in found.key_averages(group_by_input_shape=True)
        if row.key == "aten::addmm"
    ]
    assert [[512], [256, 512], [512, 512], [], []] in shapes
    assert [
        event
        for event in found.events()
        if event.name == "addmm" and event.device_type == DeviceType.CUDA
    ]


def test_the_profiler_of_autograd_has_the_same_rows(step):
    with torch.autograd.profiler.profile(use_device="cuda") as found:
        step()
    assert {row.key for row in found.key_averages()} >= {"aten::addmm", "addmm", "Memcpy HtoD"}


def test_of_the_host_alone_it_tells_this_computers_times(step):
    found = profiled(step, activities=[CPU])
    assert "aten::addmm" in found.key_averages().table() and not [
        event for event in found.events() if event.name == "addmm"
    ]


@pytest.mark.parametrize("options", [{"profile_memory": True}])
def test_what_is_not_there_raises_an_error_that_says_so(options, step):
    with pytest.raises(
        NotImplementedError,
        match="profile_memory of torch.profiler .* is not supported by the virtual GPU",
    ):
        profiled(step, **options)
    found = profiled(step)
    with pytest.raises(
        NotImplementedError,
        match="experimental_event_tree of torch.profiler's results is not supported",
    ):
        found.profiler.kineto_results.experimental_event_tree()


def test_ranges_for_nsight_wait_for_the_gpu_and_no_more(step):
    x = torch.ones(1 << 24, device="cuda")
    with torch.autograd.profiler.emit_nvtx() as ranges:
        (x + x).sum()
        with (
            pytest.raises(RuntimeError, match="NVTX annotation context manager is not reentrant"),
            ranges,
        ):
            pass
    assert torch.cuda.current_stream().query()
    with torch.autograd.profiler.emit_nvtx(enabled=False) as ranges:
        assert ranges is None


def test_all_is_as_it_was_afterwards(step):
    before = vars(torch.Tensor)["to"], torch.autograd._supported_activities()
    profiled(step)
    assert (
        (vars(torch.Tensor)["to"], torch.autograd._supported_activities())
        == before
        == (before[0], {CPU, CUDA})
    )
    virtualgpu.use(None)
    assert torch.autograd._supported_activities() == torch.profiler.supported_activities() != set()
