"""Figures of real GPUs that the text quotes are those of the recording that it names."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import torch

import labkit
import virtualgpu
from gpulessons import lesson_04
from gpulessons.lesson_04.labs.pipeline import waiting_share
from labkit.labs import Result, recorded_result

FOLDER = Path(__file__).parents[2] / "notebooks"
MIB = 1 << 20


def text(lesson: str) -> str:
    return "\n".join(
        cell.source
        for cell in nbformat.read(FOLDER / lesson, as_version=4).cells
        if cell.cell_type == "markdown"
    )


def micro(name: str) -> dict[str, float]:
    """Return the figures in micro.json about one small benchmark on an H200."""
    folder = Path(virtualgpu.__file__).parents[2] / "benchmarks" / "timing"
    return json.loads((folder / "micro.json").read_text(encoding="utf-8"))[name]


def test_a_real_h200_takes_as_long_for_a_product_as_lesson_0_says():
    quoted = re.search(
        r"A real H200 took ([\d.]+) ms for this product", text("00_start_here.ipynb")
    )
    assert round(micro("matmul 2048 torch.float32")["ms"], 2) == float(quoted[1])


def test_an_h200_s_context_is_the_recorded_one():
    quoted = re.search(r"(\d+) MiB on a real H200", text("08_sharing_memory.ipynb"))
    recorded = recorded_result("shared_model").column("context", way="one server", process="server")
    assert [int(quoted[1])] == [round(nbytes / MIB) for nbytes in recorded]


def printed(lesson: str, cell: str) -> str:
    """Return the text that is stored as the output of a cell in a lesson.

    `lesson` is the file's name, and `cell` the id of the cell.
    """
    [found] = [
        each for each in nbformat.read(FOLDER / lesson, as_version=4).cells if each.id == cell
    ]
    texts = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in found.outputs
    ]
    return "\n".join(texts)


def test_the_sine_costs_no_time_and_the_product_60_times_as_lesson_1_says():
    assert "takes as long as `x + 1`, and `x @ x` takes 60 times as long" in text(
        "01_device_basics.ipynb"
    )
    shown = re.findall(
        r"^(x.*?)  +([\d.]+) (µs|ms)$", printed("01_device_basics.ipynb", "gpu"), re.MULTILINE
    )
    times = {name: float(number) * {"µs": 1e-6, "ms": 1e-3}[unit] for name, number, unit in shown}
    assert times["x.sin()"] == times["x + 1"]
    assert round(times["x @ x"] / times["x + 1"], -1) == 60
    recorded = micro("elementwise n=16777216")  # it has no sine; relu moves the same bytes as x + 1
    assert 0.9 < recorded["exp_ms"] / recorded["relu_ms"] < 1.1
    assert 50 < micro("matmul 4096 torch.float32")["ms"] / recorded["relu_ms"] < 80


def test_4_kib_take_about_a_tenth_of_the_time_of_4_mib_as_lesson_1_says():
    quoted = re.search(
        r"A tenth is the best answer: it is 1/(\d+). A copy takes 15 to 30 µs to start",
        text("01_device_basics.ipynb"),
    )
    figure = printed("01_device_basics.ipynb", "size")
    shown = re.search(r"4 KiB take 1/(\d+) of the time of 4 MiB", figure)
    assert 5 < int(shown[1]) < 20 and shown[1] == quoted[1]
    smallest = [float(time) for time in re.findall(r"([\d.]+) µs at size 4 KiB", figure)]
    assert len(smallest) == 4 and all(15 <= time <= 30 for time in smallest)  # virtual and recorded
    recorded = recorded_result("copy_speed").by("size", "seconds", memory="pinned", direction="h2d")
    assert 5 < recorded[4 << 20] / recorded[4 << 10] < 20
    assert recorded[64 << 10] < 1.5 * recorded[4 << 10]


def test_a_narrow_step_is_limited_by_its_launches_as_lesson_1_says():
    """In a narrow step, the GPU waits most of the time.

    The step takes as long as the one in lesson 1.
    """
    assert "so short that the GPU waits most of the time" in text("01_device_basics.ipynb")
    with labkit.use(gpus=1, virtual=True, quiet=True):
        layers = [torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)]
        model = torch.nn.Sequential(*layers).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.ones(64, 16, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()

        step()
        step()
        with labkit.record() as trace:
            step()
    working = re.match(r"The GPU worked (\d+)%", trace.plot_timeline().title)
    assert int(working[1]) < 20
    step_time = re.search(r"cuda +(\d+) µs", printed("01_device_basics.ipynb", "use"))
    assert trace.end * 1e6 == pytest.approx(int(step_time[1]), rel=0.05)


def test_a_loop_that_reads_each_loss_takes_the_sum_of_the_times_as_lesson_2_says():
    lesson = text("02_streams.ipynb")
    prepares, computes = map(
        float, re.search(r"this takes ([\d.]+) ms, and the GPU needs ([\d.]+) ms", lesson).groups()
    )
    shown = re.findall(
        r"^(False|True) +([\d.]+) ms$", printed("02_streams.ipynb", "cost"), re.MULTILINE
    )
    times = {name == "True": float(number) for name, number in shown}
    never, always = map(
        float,
        re.search(
            r"never read,[^.]* take ([\d.]+) ms.*every step, they take ([\d.]+) ms", lesson
        ).groups(),
    )
    assert [round(times[False]), times[True]] == [never, always]
    assert times[False] / 10 == pytest.approx(computes, rel=0.05)
    # they are quoted with one digit
    assert times[True] / 10 == pytest.approx(computes + prepares, rel=0.1)


def test_two_streams_gain_something_only_in_between_as_lesson_2_says():
    """Check the gains in the stored figure, and those of a recorded H200."""
    quoted = re.search(
        r"largest in between\. A small kernel .* gained at most ([\d.]+) times",
        text("02_streams.ipynb"),
    )
    figure = printed("02_streams.ipynb", "gain")
    virtual, recorded = (
        {int(width): float(gain) for gain, width in re.findall(r"([\d.]+) at width (\d+)", part)}
        for part in figure.split("Recorded")
    )
    for gain in (virtual, recorded):
        assert max(gain[64], gain[4096]) < 1.05 < 1.1 < max(gain.values())
    assert f"{max(recorded.values()):.1f}" == quoted[1]


def test_copies_slow_the_step_down_on_a_t4_as_lesson_3_says():
    quoted = re.search(r"Copies take ([\d.]+) of ([\d.]+) ms\.", text("03_data_parallel.ipynb"))
    pattern = r"Copies take ([\d.]+) ms of the step, which takes ([\d.]+) ms"
    found = re.search(pattern, printed("03_data_parallel.ipynb", "slow"))
    assert quoted.groups() == found.groups()
    assert float(found[1]) / float(found[2]) > 0.8


def test_four_real_h200s_are_slower_than_one_as_lesson_3_says():
    lesson = text("03_data_parallel.ipynb")
    slower = re.search(r"Four real ones were ([\d.]+) times slower", lesson)
    seconds = recorded_result("data_parallel_step").by("gpus", "seconds", model="small")
    assert f"{seconds[4] / seconds[1]:.1f}" == slower[1]

    ways = re.search(r"took ([\d.]+) ms with DDP and ([\d.]+) ms with DataParallel", lesson)
    recorded = recorded_result("ddp_beside_data_parallel")
    for way, quoted in zip(("DistributedDataParallel", "DataParallel"), ways.groups(), strict=True):
        [taken] = recorded.column("seconds", model="small", way=way, gpus=4)
        assert f"{taken * 1e3:.1f}" == quoted


def milliseconds(number: str, unit: str) -> float:
    return float(number) * {"µs": 1e-3, "ms": 1, "s": 1e3}[unit]


def test_four_gpus_are_slower_than_one_and_two_micro_batches_faster_as_lesson_4_says():
    lesson = "04_model_parallelism.ipynb"
    assert "Four GPUs are slower than one!" in text(lesson)
    times = re.findall(r"^(\d) +([\d.]+) (ms|s)$", printed(lesson, "puzzle-step"), re.MULTILINE)
    one, _, four = (milliseconds(*time) for _, *time in times)
    assert 1 < four / one < 1.5
    assert "Only `compute_first` is faster." in text(lesson)
    times = re.findall(
        r"^(\w+ first) +(\d) +([\d.]+) (ms|s)$", printed(lesson, "orders"), re.MULTILINE
    )
    found = {(order, int(count)): milliseconds(*time) for order, count, *time in times}
    assert found["copy first", 1] / found["copy first", 2] < 1.05
    assert found["compute first", 1] / found["compute first", 2] > 1.2


def recorded_in_lesson_4(name: str) -> Result:
    file = Path(lesson_04.__file__).parent / "recordings" / f"{name}_h200.json"
    return Result.from_json(file.read_text(encoding="utf-8"))


def test_real_h200s_lose_with_32_micro_batches_what_lesson_4_says():
    lesson = text("04_model_parallelism.ipynb")
    speed_up = re.search(
        r"The dashed line was recorded on real H200s: ([\d.]+) and ([\d.]+) times", lesson
    )
    whole = recorded_in_lesson_4("split_seconds").by(
        "micro_batches", "split_seconds", order="compute first"
    )
    assert [f"{whole[1] / whole[count]:.1f}" for count in (8, 32)] == list(speed_up.groups())
    share = re.search(r"the adding was only ([\d.]+) of ([\d.]+) ms", lesson)
    layer = recorded_in_lesson_4("layer_seconds")
    lost = [
        1e3 * (seconds[32] - seconds[8])
        for seconds in (
            layer.by("micro_batches", "layer_seconds", adding=adding) for adding in (True, False)
        )
    ]
    assert [f"{lost[0] - lost[1]:.1f}", f"{lost[0]:.1f}"] == list(share.groups())


def test_four_real_h200s_take_as_long_as_lesson_4_says():
    quoted = re.search(
        r"there, one GPU took ([\d.]+) ms and four took ([\d.]+) ms",
        text("04_model_parallelism.ipynb"),
    )
    seconds = recorded_in_lesson_4("step_seconds").by("gpus", "step_seconds")
    assert [f"{seconds[gpus] * 1e3:.1f}" for gpus in (1, 4)] == list(quoted.groups())


def test_adding_gradients_is_most_of_what_32_micro_batches_lose_as_lesson_4_says():
    lesson = "04_model_parallelism.ipynb"
    quoted = re.search(
        r"takes (\d+) ms longer than with 8.*only (\d+) ms longer.*other (\d+) ms", text(lesson)
    )
    times = re.findall(
        r"^(\d+) +(True|False) +([\d.]+) ms$", printed(lesson, "adding"), re.MULTILINE
    )
    found = {(int(count), adding): float(time) for count, adding, time in times}
    lost, rest = found[32, "True"] - found[8, "True"], found[32, "False"] - found[8, "False"]
    assert [round(lost), round(rest), round(lost - rest)] == [
        int(number) for number in quoted.groups()
    ]
    assert rest < lost / 2


def test_more_micro_batches_gain_what_lesson_4_says():
    lesson = "04_model_parallelism.ipynb"
    gains = re.search(r"The cell measures ([\d.]+) and ([\d.]+) times", text(lesson))
    figure = printed(lesson, "sweep").partition("Recorded")[0]
    shown = re.search(
        r"([\d.]+) times at micro batches 8, ([\d.]+) times at micro batches 32", figure
    )
    assert gains.groups() == shown.groups()


def test_gpus_wait_as_long_under_both_schedules_on_real_h200s_as_lesson_4_says():
    quoted = re.search(
        r"On four real H200s, with two layers on each, both schedules waited (\d+)%",
        text("04_model_parallelism.ipynb"),
    )
    recorded = recorded_result("pipeline_step")
    assert recorded.parameters["layers"] == "2+2+2+2"
    shares = {waiting_share(recorded, schedule) for schedule in ("GPipe", "1F1B")}
    assert {f"{100 * share:.0f}" for share in shares} == {quoted[1]}


def test_settings_help_on_a_real_h200_as_lesson_5_says():
    """The recording is of an earlier experiment with the same blocks, requests and settings."""
    lesson = "05_caching_allocator.ipynb"
    assert "A real H200 gave the same three numbers for 64 MiB." in text(lesson)
    [cell] = [
        cell for cell in nbformat.read(FOLDER / lesson, as_version=4).cells if cell.id == "settings"
    ]
    shown = "\n".join(str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs)
    recording = Result.from_json(
        (FOLDER.parent / "docs" / "measured" / "fragmentation_h200.json").read_text()
    )
    names = {
        "default": "expandable_segments:False",
        "expandable_segments": "expandable_segments:True",
    }
    rows = [row for row in recording.rows if row["block"] == 64 * MIB]
    assert len(rows) == 3
    for row in rows:
        setting = names.get(row["setting"], row["setting"])
        assert re.search(
            rf"^{setting} +64 MiB +{row['largest'] // MIB} MiB$", shown, re.MULTILINE
        ), setting


def test_float16_makes_large_products_faster_on_a_real_h200_as_lesson_7_says():
    pattern = r"two 8192 × 8192 matrices took ([\d.]+) ms in float32 and ([\d.]+) ms in float16"
    quoted = re.search(pattern, text("07_half_precision.ipynb"))
    times = [micro(f"matmul 8192 torch.{dtype}")["ms"] for dtype in ("float32", "float16")]
    assert [f"{time:.1f}" for time in times] == list(quoted.groups())


def test_autocast_shortens_one_network_on_a_real_h200_and_not_another_as_lesson_7_says():
    pattern = (
        r"a step of BERT from (\d+) to (\d+) ms. A step of ResNet-50 became no shorter: (\d+) and "
        r"(\d+) ms"
    )
    quoted = re.search(pattern, text("07_half_precision.ipynb"))
    folder = Path(virtualgpu.__file__).parents[2] / "benchmarks" / "timing"
    recorded = json.loads((folder / "networks.json").read_text(encoding="utf-8"))["H200"]
    names = ("bert adamw", "bert bf16", "resnet50 adamw", "resnet50 bf16")
    times = [recorded["milliseconds"][name] for name in names]
    assert [f"{time:.0f}" for time in times] == list(quoted.groups())


def test_half_precision_pays_for_the_wide_network_only_as_lesson_7_says():
    lesson = "07_half_precision.ipynb"
    assert "makes the wide network several times as fast, and the small one slower" in text(lesson)
    row = r"^(float\d+) +(\d+) +(\d+) +([\d.]+) (ms|s) +([\d.]+) (MiB|GiB)$"
    shown = re.findall(row, printed(lesson, "cost"), re.MULTILINE)
    times = {(form, width): milliseconds(time, unit) for form, width, _, time, unit, _, _ in shown}
    peaks = {
        (form, width): float(peak) * {"MiB": 1, "GiB": 1024}[unit]
        for form, width, *_, peak, unit in shown
    }
    assert times["float16", "64"] > 1.1 * times["float32", "64"]
    assert times["float16", "1024"] < times["float32", "1024"] / 3
    assert peaks["float16", "1024"] < 0.75 * peaks["float32", "1024"]


def test_autocast_doubles_the_time_of_a_tiny_layer_as_lesson_7_says():
    lesson = "07_half_precision.ipynb"
    assert "With autocast, `layer(x)` takes about twice as long." in text(lesson)
    shown = dict(
        re.findall(r"layer\(x\) with autocast (False|True): (\d+) µs", printed(lesson, "autocast"))
    )
    assert 1.6 < int(shown["True"]) / int(shown["False"]) < 2.8


def test_autocast_keeps_more_of_few_rows_and_less_of_many_as_lesson_7_says():
    lesson = "07_half_precision.ipynb"
    assert "With 64 rows it keeps several times as much." in text(lesson)
    assert "autocast saves two fifths" in text(lesson)
    shown = re.findall(
        r"^(\d+) +(float\d+) +([\d.]+) (MiB|GiB)$", printed(lesson, "kept"), re.MULTILINE
    )
    kept = {
        (rows, form): float(size) * {"MiB": 1, "GiB": 1024}[unit]
        for rows, form, size, unit in shown
    }
    assert kept["64", "float16"] > 4 * kept["64", "float32"]
    assert 0.5 < kept["32768", "float16"] / kept["32768", "float32"] < 0.65


def test_a_seventh_of_the_gradients_would_be_0_as_lesson_7_says():
    lesson = "07_half_precision.ipynb"
    assert "About a seventh would be 0." in text(lesson)
    assert "the figures leave these out" in text(lesson)  # the gradients that are 0 in float32
    lost = re.search(r"Become 0 in float16: (\d+)% without a factor", printed(lesson, "small"))
    assert 11 <= int(lost[1]) <= 18


LESSON_9 = "09_fitting_in_memory.ipynb"


def kinds_in_lesson_9(cell: str) -> dict[str, float]:
    """Return the GiB of each kind at the peak, as a cell of lesson 9 printed them."""
    found = re.findall(r"^([a-zP][\w' ]*?) +([\d.]+) GiB$", printed(LESSON_9, cell), re.MULTILINE)
    return {kind: float(size) for kind, size in found}


@pytest.mark.parametrize("cell", ["peak", "half", "checkpoints", "micro", "update"])
def test_the_kinds_of_bytes_add_up_to_the_peak_in_lesson_9(cell):
    kinds = kinds_in_lesson_9(cell)
    parts = [
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "in flight",
        "workspace",
        "other",
    ]
    assert sum(kinds[kind] for kind in parts) == pytest.approx(kinds["sum"], abs=0.02)


def test_the_peak_of_lesson_9_falls_with_each_change_and_is_quoted():
    lesson = text(LESSON_9)
    sums = [
        kinds_in_lesson_9(cell)["sum"]
        for cell in ("peak", "half", "checkpoints", "micro", "update")
    ]
    assert sums == sorted(sums, reverse=True)
    assert kinds_in_lesson_9("peak")["PyTorch's peak"] == sums[0]
    assert f"six rows need {sums[0]:.1f} GiB" in lesson
    assert f"The step now needs {sums[2]:.1f} GiB and no longer {sums[0]:.1f}" in lesson
    assert f"although it needs only {sums[4]:.2f} GiB" in lesson
    assert f"there were {kinds_in_lesson_9('half')['activations']:.2f} GiB of activations" in lesson
    free = re.search(r"([\d.]+) GiB are free", printed(LESSON_9, "use"))
    assert lesson.count(free[1]) >= 3 and sums[4] < float(free[1]) < sums[3]


def test_the_loss_of_lesson_9_keeps_and_makes_tensors_as_large_as_the_logits():
    logits = 6 * 4096 * 23000 * 4 / 2**30
    quoted = re.search(
        r"4 bytes, which is ([\d.]+) GiB.*?([\d.]+) GiB in flight", text(LESSON_9), re.DOTALL
    )
    assert quoted.groups() == (f"{logits:.1f}", f"{2 * logits:.1f}")
    assert kinds_in_lesson_9("peak")["in flight"] == pytest.approx(2 * logits, abs=0.02)
    assert "Beside the logits, the loss takes 3.0 times" in printed(LESSON_9, "loss")


def test_each_row_of_lesson_9_adds_as_much_but_the_first():
    rows = re.findall(r"^(\d) +([\d.]+) GiB$", printed(LESSON_9, "rows"), re.MULTILINE)
    found = {int(count): float(size) for count, size in rows}
    kinds = kinds_in_lesson_9("peak")
    fixed, row = kinds["parameters"] + kinds["optimizer state"], found[3] - found[2]
    quoted = re.search(
        r"Parameters and state, ([\d.]+) GiB.*adds ([\d.]+) GiB.*"
        r"need ([\d.]+) − ([\d.]+) = ([\d.]+) GiB. It needs ([\d.]+) GiB",
        text(LESSON_9),
        re.DOTALL,
    )
    expected = [fixed, row, found[2], row, found[2] - row, found[1]]
    assert [float(number) for number in quoted.groups()] == pytest.approx(expected, abs=0.06)
    assert found[1] > found[2] - row + 0.5
    assert found[6] == pytest.approx(found[2] + 4 * row, abs=0.1)
    assert "Three rows need about 23 GiB." in text(LESSON_9) and round(found[3]) == 23


def test_the_step_of_lesson_9_runs_on_a_t4_only_with_offloading():
    unallocated = re.search(
        r"([\d.]+) MiB is reserved by PyTorch but unallocated", printed(LESSON_9, "fit")
    )
    assert float(unallocated[1]) > 500 and "more than 500 MiB" in text(LESSON_9)
    shown = printed(LESSON_9, "offload")
    assert "It runs." in shown and "Kernels run during 0 ms" in shown


def test_the_fused_update_of_lesson_9_takes_least_memory_and_time():
    rows = re.findall(
        r"^(\w+) +([\d.]+) (B|MiB|GiB) +([\d.]+) ms$", printed(LESSON_9, "update"), re.MULTILINE
    )
    units = {"B": 0, "MiB": 1 / 1024, "GiB": 1}
    memory = {way: float(size) * units[unit] for way, size, unit, _ in rows}
    seconds = {way: float(taken) for way, _, _, taken in rows}
    assert max(memory, key=memory.get) == "foreach" and memory["fused"] == 0
    assert min(seconds, key=seconds.get) == "fused" and max(seconds, key=seconds.get) == "foreach"
    assert f"takes the most: {memory['foreach']:.1f} GiB" in text(LESSON_9)
    weights = re.search(
        r"as much as all gradients of this smaller GPT \((\d+) million weights", text(LESSON_9)
    )
    assert memory["foreach"] == pytest.approx(4e6 * int(weights[1]) / 2**30, abs=0.01)


def test_the_parts_of_the_activations_in_lesson_9_add_up():
    """The parts are the inputs of the blocks and of the head, the logits, the loss and copies."""
    quoted = re.search(
        r"only ([\d.]+) GiB.*logits are ([\d.]+) GiB in float16.*about ([\d.]+) GiB.*in float16, "
        r"([\d.]+) GiB",
        text(LESSON_9),
        re.DOTALL,
    )
    inputs, logits, copies, head = map(float, quoted.groups())
    parts = inputs + 4 * logits + copies + head
    assert kinds_in_lesson_9("checkpoints")["activations"] == pytest.approx(parts, abs=0.1)


def test_autocast_keeps_half_of_a_weight_until_the_backward_pass_in_lesson_9():
    shown = printed(LESSON_9, "half")
    assert "A product keeps 0.50 times" in shown and "After the with, 0.50 times" in shown


def test_the_prices_of_lesson_9_are_in_its_table():
    """Check the table's numbers, which are rounded, so that times may change a little."""
    rows = re.findall(
        r"^(T4|H200) +(.+?) +(\d+) ms, ([\d.]+) times", printed(LESSON_9, "costs"), re.MULTILINE
    )
    price = {(gpu, change): float(factor) for gpu, change, _, factor in rows}
    seconds = {(gpu, change): float(taken) for gpu, change, taken, _ in rows}
    for gpu in ("T4", "H200"):
        assert 0.08 < price[gpu, "half precision"] < 0.25
        assert 1.1 < price[gpu, "checkpoints"] < 1.34
        assert 1 < price[gpu, "micro-batches"] < 1.15
        assert 0.8 < price[gpu, "fused"] < 0.95
    more = {gpu: price[gpu, "offloading"] / price[gpu, "checkpoints"] for gpu in ("T4", "H200")}
    assert more["T4"] < 1.1 < 1.15 < more["H200"] < 1.35
    assert seconds["T4", "half precision"] > 20 * seconds["H200", "half precision"]
    added = {
        gpu: seconds[gpu, "offloading"] - seconds[gpu, "checkpoints"] for gpu in ("T4", "H200")
    }
    assert 30 < added["T4"] < 55 and 8 < added["H200"] < 17
    assert 2.5 < added["T4"] / added["H200"] < 4


def test_three_copies_take_more_than_three_times_the_server_s_memory_as_lesson_8_says():
    lesson = "08_sharing_memory.ipynb"
    assert "Three copies take more than three times as much" in text(lesson)
    shown = re.findall(
        r"^(copy|shared|server) +([\d.]+) (MiB|GiB)$", printed(lesson, "model"), re.MULTILINE
    )
    used = {way: float(size) * {"MiB": 1, "GiB": 1024}[unit] for way, size, unit in shown}
    assert used["copy"] > 3 * used["server"]
    assert used["server"] < used["shared"] < used["copy"]


def test_an_answer_without_synchronize_comes_too_early_as_lesson_8_says():
    lesson = "08_sharing_memory.ipynb"
    assert "It is not finished, and the last line prints 5, the old number." in text(lesson)
    shown = printed(lesson, "late")
    assert "synchronize False: finished at the answer: False" in shown
    assert "synchronize True: finished at the answer: True" in shown
    assert "P1 reads 5.0" in shown


LESSON_10 = "10_ddp_from_the_inside.ipynb"


def test_the_gradients_of_step_0_are_silently_not_averaged_in_lesson_10():
    assert re.findall(r"gradient: ([\d.]+)", printed(LESSON_10, "puzzle")) == ["2.0", "4.0"]
    shown = re.findall(
        r"(True|False), step (\d): (gradient [\d.]+|Expected)", printed(LESSON_10, "unused")
    )
    averaged = [("True", "0", "gradient 3.0"), ("True", "1", "gradient 3.0")]
    for own, rank in ((2.0, shown[:4]), (4.0, shown[4:])):
        assert rank == [("False", "0", f"gradient {own}"), ("False", "1", "Expected"), *averaged]


def test_the_first_step_has_one_bucket_in_lesson_10():
    assert "There is one in step 0, and there are two in step 1." in text(LESSON_10)
    counts = [
        line.count("all_reduce")
        for line in printed(LESSON_10, "buckets").splitlines()
        if "step" in line
    ]
    assert counts == [1, 2, 1, 2]


def test_most_of_the_sending_is_hidden_in_step_1_of_lesson_10():
    lesson = text(LESSON_10)
    assert "takes about 90 ms: 60 to compute and 30 to send" in lesson
    assert "Step 1 takes about 70 ms." in lesson
    times = re.findall(r"step (\d): (\d+) ms", printed(LESSON_10, "overlap"))
    milliseconds = {step: int(taken) for step, taken in times}
    assert 85 <= milliseconds["0"] <= 95 and 66 <= milliseconds["1"] <= 74
    hidden = re.search(
        r"0% of the collectives in step 0, (\d+)% in step 1", printed(LESSON_10, "overlap-figure")
    )
    assert int(hidden[1]) > 60
    [sent] = re.findall(
        r"collectives ([\d.]+) ms", printed(LESSON_10, "overlap-figure").partition("Cuda:1")[0]
    )
    assert float(sent) / 2 == pytest.approx(30, abs=3)  # two steps
    assert milliseconds["0"] - float(sent) / 2 == pytest.approx(60, abs=4)


def test_only_the_larger_batch_makes_two_t4s_much_faster_in_lesson_10():
    lesson = text(LESSON_10)
    assert "two T4s are about as fast as one" in lesson and "Only the larger batch does." in lesson
    rows = re.findall(
        r"width (\d+), (\d+) rows: .* ([\d.]+) times as fast", printed(LESSON_10, "pays")
    )
    factor = {(int(width), int(count)): float(times) for width, count, times in rows}
    assert 0.9 < factor[1024, 1024] < 1.2
    assert factor[4096, 1024] < 1.37 and factor[1024, 4096] > 1.43


def test_no_sync_sends_once_and_leaves_the_same_gradient_in_lesson_10():
    sent = "DDP sends four messages, then one, and then four again."
    assert f"{sent} The gradient is the same in all three." in text(LESSON_10)
    shown = re.findall(r"sent (\d), gradient (\S+)", printed(LESSON_10, "accumulate"))
    assert [int(count) for count, _ in shown] == [4, 1, 4, 4, 1, 4]
    assert len({gradient for _, gradient in shown}) == 1


def test_an_epoch_of_the_whole_script_has_eight_steps_in_lesson_10():
    assert "8 times: the effective batch is 16 × 2 × 2 = 64 rows" in text(LESSON_10)
    shown = re.findall(r"epoch (\d): (\d) steps of (\d+) rows", printed(LESSON_10, "whole"))
    assert shown == [(str(epoch), "8", "64") for epoch in range(3)]


SEVERAL_MACHINES = "12_several_machines.ipynb"


def milliseconds_in_lesson_12(cell: str) -> dict[tuple[str, ...], float]:
    """Return the milliseconds in the last column of a cell's table, by the texts before them."""
    rows = re.findall(r"^(\d+) +(.*?) *([\d.]+) ms$", printed(SEVERAL_MACHINES, cell), re.MULTILINE)
    return {
        tuple(part for part in (first, second) if part): float(last) for first, second, last in rows
    }


def test_lesson_12_says_how_much_slower_a_thousand_gpus_are_and_why():
    puzzle = milliseconds_in_lesson_12("puzzle")
    slower = puzzle["1024",] - puzzle["256",]
    latency = {
        gpus: float(ms)
        for gpus, ms in re.findall(
            r"(\d+) GPUs: .*12 times: +([\d.]+) ms", printed(SEVERAL_MACHINES, "latency")
        )
    }
    assert slower == pytest.approx(16, abs=2)
    assert latency["1024"] - latency["256"] == pytest.approx(17, abs=2)
    assert latency["1024"] > 15 * latency["8"]


def test_hybrid_sharding_keeps_a_thousand_gpus_as_fast_as_256_and_a_larger_batch_keeps_them_busy():
    times = milliseconds_in_lesson_12("hsdp")
    assert 0.8 < times["1024", "HSDP"] / times["256", "HSDP"] < 1.02
    assert times["1024", "FSDP"] > 1.2 * times["256", "FSDP"]
    assert times["1024", "FSDP, batch grows"] < 1.1 * times["8", "FSDP, batch grows"]


def test_the_threshold_of_lesson_12_is_right_within_what_it_says():
    times = milliseconds_in_lesson_12("threshold")
    ratio = {
        tokens: times[tokens, "measured"] / times[tokens, "derived"]
        for tokens, way in times
        if way == "measured"
    }
    assert all(0.8 < value < 1.2 for tokens, value in ratio.items() if tokens != "8192")
    assert 1.2 < ratio["8192"] < 1.45
    assert 4 < times["32768", "measured"] / times["1024", "measured"] < 6


def test_the_late_rank_of_lesson_12_waits_least_and_all_steps_are_alike():
    rows = re.findall(
        r"compute +([\d.]+) ms, all_reduce +([\d.]+) ms, step +([\d.]+) ms",
        printed(SEVERAL_MACHINES, "late"),
    )
    waits, steps = [float(row[1]) for row in rows], [float(row[2]) for row in rows]
    assert waits.index(min(waits)) == 2
    assert max(steps) < 1.05 * min(steps)


def test_the_rank_of_lesson_12_continues_after_the_last_complete_checkpoint():
    told = printed(SEVERAL_MACHINES, "dies")
    assert re.findall(r"step (\d)", told) == list("01212345")
    assert "same as without interruption: True" in told
