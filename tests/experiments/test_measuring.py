"""`labkit.seconds` and `labkit.measure` on functions of all kinds."""

import json
import math
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import pytest
import torch

import labkit
from labkit.experiments.result import Result


@pytest.fixture
def gpu():
    with labkit.use(gpus=2, like="T4", virtual=True, quiet=True):
        yield


@pytest.fixture
def gpu_without_values():
    """A virtual GPU without values, on which large products take this computer no time."""
    with labkit.use(gpus=2, like="T4", virtual=True, values=False, quiet=True):
        yield


def product_seconds(size, gpus=1):
    matrices = [torch.ones(size, size, device=f"cuda:{gpu}") for gpu in range(gpus)]

    def step():
        for matrix in matrices:
            matrix @ matrix

    return labkit.seconds(step)


# Seconds of a step


def test_seconds_are_those_of_the_clock_of_the_gpus(gpu_without_values):
    small, large = product_seconds(256), product_seconds(2048)
    assert 0 < small < large < 1
    assert labkit.seconds(lambda: None) < small


def test_seconds_wait_for_all_gpus_and_streams(gpu_without_values):
    matrix = torch.ones(2048, 2048, device="cuda:1")
    stream = torch.cuda.Stream(1)

    def step():
        with torch.cuda.stream(stream):
            matrix @ matrix

    assert labkit.seconds(step) > product_seconds(2048) / 2


def test_the_first_calls_do_not_count_and_the_median_does(gpu_without_values):
    calls = []

    def step():
        calls.append(None)
        for _ in range({0: 100, 1: 100, 3: 50}.get(len(calls) - 1, 1)):
            torch.ones(1024, 1024, device="cuda").sum()

    slow_calls_left_out = labkit.seconds(step)
    assert len(calls) == 5
    assert labkit.seconds(step, repeats=1, warm_up=0) == pytest.approx(slow_calls_left_out, rel=0.5)
    assert len(calls) == 6


def test_seconds_refuse_what_is_no_function(gpu):
    with pytest.raises(TypeError, match=r"a function without arguments.*You gave 1.5"):
        labkit.seconds(1.5)
    with pytest.raises(ValueError, match="repeats=0"):
        labkit.seconds(print, repeats=0)
    with pytest.raises(ValueError, match="warm_up=-1"):
        labkit.seconds(print, warm_up=-1)


def test_seconds_refuse_a_step_whose_code_does_not_run(gpu):
    ran = []

    def generator():
        ran.append(1)
        yield

    async def coroutine():
        ran.append(1)

    async def both():
        ran.append(1)
        yield

    for step, kind in (
        (generator, "generator"),
        (coroutine, "coroutine"),
        (both, "async_generator"),
    ):
        with pytest.raises(TypeError, match=f"returned a {kind}, so its code did not run"):
            labkit.seconds(step)
        with pytest.raises(TypeError, match="so its code did not run"):
            labkit.seconds(lambda step=step: step())
    assert ran == []


def test_without_gpus_nothing_is_measured():
    with pytest.raises(RuntimeError, match=r"no GPU is in use: labkit.use\(gpus=1\)"):
        labkit.seconds(print)
    with pytest.raises(RuntimeError, match=r"no GPU is in use: labkit.use\(gpus=1\)"):
        labkit.measure(product_seconds, {"size": 4})


# What a measurement returns


def test_every_combination_is_a_row_and_the_last_argument_varies_fastest(gpu):
    times = labkit.measure(product_seconds, {"gpus": [1, 2], "size": [256, 512]}, values=False)
    assert [(row["gpus"], row["size"]) for row in times] == [(1, 256), (1, 512), (2, 256), (2, 512)]
    assert times.columns == {"gpus": "", "size": "", "product_seconds": "seconds"}
    assert times.arguments == ["gpus", "size"] and times.measured == ["product_seconds"]
    assert times.badge == "virtual GPU, modelled on NVIDIA Tesla T4"
    assert times.parameters == {"gpus": [1, 2], "size": [256, 512]}


def test_the_same_measurement_gives_the_same_numbers(gpu):
    first, second = (labkit.measure(product_seconds, {"size": 512}) for _ in range(2))
    assert first == second


def test_a_dictionary_gives_several_columns_with_units(gpu):
    def step(rows):
        return {"loss": 1 / rows, "peak": 4096 * rows, "copy_bytes": 1024, "backward_seconds": 0.5}

    result = labkit.measure(step, {"rows": [1, 2]}, units={"peak": "bytes"})
    assert repr(result).splitlines() == [
        "virtual GPU, modelled on NVIDIA Tesla T4",
        "rows  loss  peak   copy bytes  backward seconds",
        "1     1     4 KiB  1 KiB       500 ms",
        "2     0.5   8 KiB  1 KiB       500 ms",
    ]
    assert ">8 KiB</td>" in result._repr_html_()


@pytest.mark.parametrize(
    ("function", "column"),
    [
        (lambda size: size, "value"),
        (partial(product_seconds, gpus=1), "product_seconds"),
    ],
)
def test_a_function_that_returns_one_number_names_its_column(gpu, function, column):
    assert labkit.measure(function, {"size": 64}).measured == [column]


def test_an_object_that_can_be_called_has_the_name_of_its_class(gpu):
    class Doubled:
        def __call__(self, size):
            return 2 * size

    assert labkit.measure(Doubled(), {"size": 64}).column("Doubled") == [128]


def test_a_function_named_as_its_argument_gives_a_value(gpu):
    def size(size):
        return size

    assert labkit.measure(size, {"size": 64}).rows == [{"size": 64, "value": 64}]


def test_arguments_of_all_kinds_have_a_text_in_the_table(gpu):
    def nbytes(dtype, optimizer, note=None):
        return torch.zeros(4, dtype=dtype, device="cuda").nbytes

    optimizers = [torch.optim.SGD, torch.optim.Adam]
    grid = {"dtype": [torch.float16, torch.float32], "optimizer": optimizers, "note": None}
    result = labkit.measure(nbytes, grid, units={"nbytes": "bytes"})
    assert result.column("dtype", optimizer="Adam") == ["float16", "float32"]
    assert result.column("nbytes", optimizer="SGD") == [8, 16]
    assert Result.from_json(result.to_json()) == result


def test_numbers_of_numpy_become_plain_numbers(gpu):
    def doubled(size):
        return {"integer": numpy.int64(2 * size), "real": numpy.float32(0.5), "fits": size < 2}

    result = labkit.measure(doubled, {"size": numpy.array([1, 2])})
    assert json.loads(result.to_json())["rows"] == [
        {"size": 1, "integer": 2, "real": 0.5, "fits": True},
        {"size": 2, "integer": 4, "real": 0.5, "fits": False},
    ]


def test_truth_values_of_numpy_are_numbers_and_grid_values(gpu):
    def agrees(flag):
        return {"same": numpy.bool_(flag), "is_true": flag == True}  # noqa: E712

    for values in ([numpy.True_, numpy.False_], numpy.array([True, False])):
        result = labkit.measure(agrees, {"flag": values})
        assert result.rows == [
            {"flag": flag, "same": flag, "is_true": flag} for flag in (True, False)
        ]
        assert {type(value) for row in result for value in row.values()} == {bool}
        assert Result.from_json(result.to_json()) == result


def test_a_grid_without_arguments_is_one_call(gpu):
    assert labkit.measure(lambda: 2, {}).rows == [{"value": 2}]


def test_without_values_virtual_gpus_compute_nothing_while_it_measures(gpu):
    def total(rows):
        mean = torch.randn(rows, device="cuda").mean().item()
        return {"known": mean == mean}  # NaN is not equal to itself

    assert labkit.measure(total, {"rows": 4}).column("known") == [True]
    assert labkit.measure(total, {"rows": 4}, values=False).column("known") == [False]
    assert float(torch.ones(4, device="cuda").sum()) == 4


@pytest.mark.gpu(2)
def test_on_real_gpus_values_are_always_computed():
    def total(rows):
        return {"sum": float(torch.ones(rows, device="cuda").sum())}

    with labkit.use(gpus=2, virtual=False, quiet=True):
        assert labkit.measure(total, {"rows": [4, 8]}, values=False).column("sum") == [4, 8]
        times = labkit.measure(product_seconds, {"gpus": [1, 2], "size": 512})
        assert (
            times.badge.startswith("measured on NVIDIA")
            and min(times.column("product_seconds")) > 0
        )


def test_tensors_of_one_combination_do_not_count_for_the_next(gpu):
    def held_bytes(size):
        held = torch.cuda.memory_allocated()
        cycle = [torch.ones(size, device="cuda")]
        cycle.append(cycle)
        return held

    result = labkit.measure(held_bytes, {"size": [1 << 20, 1 << 21, 1 << 22]})
    assert len(set(result.column("held_bytes"))) == 1


def test_each_call_has_its_own_peak(gpu):
    def peak(n):
        torch.ones(n * 2**18, device="cuda")
        return torch.cuda.max_memory_allocated() / 2**20

    torch.ones(2**26, device="cuda")
    assert labkit.measure(peak, {"n": [64, 8]}).column("peak") == [64, 8]


def test_a_call_leaves_no_settings_to_the_next_call_or_to_the_notebook(gpu):
    def settings():
        device = torch.ones(1, device="cuda").device.index
        stream = torch.cuda.current_stream().cuda_stream
        dtype = torch.ones(1).dtype
        return device, stream, dtype, torch.get_default_device(), torch.is_grad_enabled()

    def draws():
        return (
            random.random(),
            numpy.random.rand(),
            torch.rand(1).item(),
            torch.rand(1, device="cuda").item(),
        )

    found = []

    def changes(n):
        found.append((settings(), draws()))
        torch.cuda.set_device(1)
        torch.cuda.set_stream(torch.cuda.Stream(1))
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cuda")
        torch.set_grad_enabled(False)
        torch.manual_seed(n)
        random.seed(n)
        numpy.random.seed(n)
        if n == 1:
            raise KeyError("lost")
        return n

    before = settings()
    labkit.measure(changes, {"n": [1, 2, 3]})
    assert [each[0] for each in found] == [before] * 3 and settings() == before
    assert [each[1] for each in found] == [draws()] * 3


def test_only_one_thread_measures_at_a_time(gpu):
    started, ended = threading.Event(), threading.Event()

    def waits(n):
        started.set()
        assert ended.wait(60)
        return labkit.seconds(lambda: labkit.seconds(lambda: None))

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(labkit.measure, waits, {"n": 1})
        assert started.wait(60)
        for call in (
            lambda: labkit.seconds(print),
            lambda: labkit.measure(product_seconds, {"size": 4}),
        ):
            with pytest.raises(RuntimeError, match="Another thread is measuring on these GPUs"):
                call()
        ended.set()
        assert first.result(60).column("waits")[0] > 0
    assert labkit.measure(product_seconds, {"size": 4}).rows


def test_calls_share_no_lists_and_labels_are_those_of_the_grid(gpu):
    def total(sizes, n):
        sizes.append(n)
        if n == 3:
            raise ValueError("three")
        return len(sizes)

    sizes = [1, 2]
    result = labkit.measure(total, {"sizes": [sizes], "n": [1, 2, 3]})
    assert result.column("total") == [3, 3] and result.column("sizes") == ["[1, 2]"] * 2
    assert result.failures[0]["arguments"] == {"sizes": "[1, 2]", "n": 3}
    assert sizes == [1, 2]


def test_a_column_of_texts_may_have_the_name_of_a_unit(gpu):
    result = labkit.measure(lambda sleep_seconds: 1, {"sleep_seconds": ["a", "b"]})
    assert repr(result).splitlines()[2].split() == ["a", "1"]


# What is refused


@pytest.mark.parametrize(
    ("grid", "error", "said"),
    [
        (
            {"width": 4},
            TypeError,
            "product_seconds cannot be called with this grid: missing a required .*'size'. "
            "Its arguments are size, gpus. The grid gives width by name.",
        ),
        (
            {"size": 1, "width": 4},
            TypeError,
            "got an unexpected keyword argument 'width'. Its arguments are size, gpus.",
        ),
        ({"gpus": 1}, TypeError, "missing a required .*'size'. Its arguments are size, gpus."),
        ({"size": []}, ValueError, r"grid\['size'\] is empty. Give at least one value."),
        ({"size": [1, 2, 1]}, ValueError, r"grid\['size'\] has 1 more than once."),
        ({"size": {1, 2}}, TypeError, r"grid\['size'\] is a set. Give one value, or a list"),
        ({"size": iter([1])}, TypeError, r"grid\['size'\] is a list_iterator"),
        ([1, 2], TypeError, "The grid is a dictionary from arguments to values"),
    ],
)
def test_a_grid_that_does_not_fit_the_function_is_refused_before_it_runs(gpu, grid, error, said):
    with pytest.raises(error, match=said):
        labkit.measure(product_seconds, grid)


def test_what_is_no_function_is_refused(gpu):
    with pytest.raises(TypeError, match="Give labkit a function to call.*You gave 0.5"):
        labkit.measure(0.5, {})


def test_a_function_of_any_named_arguments_takes_every_grid(gpu):
    assert labkit.measure(lambda **named: len(named), {"a": 1, "b": 2}).column("value") == [2]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.ones(()), r"step returned a tensor. Return a number, for example with `.item\(\)`."),
        (
            None,
            "step returned None. Return a number or a dictionary of numbers. Does it end with "
            "`return`",
        ),
        ("fast", "step returned a str. Return a number or a dictionary of numbers."),
        ({"loss": torch.ones(())}, "step returned a tensor as 'loss'"),
        ({"loss": None}, "step returned None as 'loss'"),
        ({}, "step returned an empty dictionary"),
        ({1: 2}, "step returned a dictionary with the key 1"),
        ({"n": 2}, "step returned a number named 'n', which is also an argument"),
    ],
)
def test_a_function_that_returns_no_numbers_is_refused(gpu, returned, said):
    def step(n):
        return returned

    with pytest.raises(TypeError, match=said):
        labkit.measure(step, {"n": [1, 2, 3]})


@pytest.mark.parametrize("returned", [None, "fast", 10**400])
def test_a_combination_without_a_number_fails_alone_wherever_it_is(gpu, returned):
    def step(n):
        return returned if n == 3 else n

    for order in ([3, 1, 2], [1, 2, 3]):
        result = labkit.measure(step, {"n": order})
        assert result.column("step") == [1, 2]
        assert [failure["arguments"] for failure in result.failures] == [{"n": 3}]


@pytest.mark.parametrize(("function", "grid"), [(abs, {"x": 1}), (math.pow, {"x": [1, 2], "y": 2})])
def test_a_function_of_positions_is_refused(gpu, function, grid):
    said = "cannot be called with this grid: .*positional.only.*The grid gives x.* by name"
    with pytest.raises(TypeError, match=said):
        labkit.measure(function, grid)


def test_every_error_has_a_text(gpu, capsys):
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    def step(n):
        if n == 1:
            raise AssertionError
        if n == 2:
            raise SilentError
        return n

    result = labkit.measure(step, {"n": [1, 2, 3]})
    assert [failure["error"] for failure in result.failures] == [
        "AssertionError (no message)",
        "SilentError: (its message cannot be read: RuntimeError)",
    ]
    assert result.column("step") == [3]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"values": 0}, TypeError, "values=0: choose True or False"),
        ({"units": ["bytes"]}, TypeError, "units=.*give a dictionary"),
        (
            {"units": {"peak": "bytes"}},
            ValueError,
            "units has the column 'peak'. The columns are n, value",
        ),
    ],
)
def test_wrong_options_are_refused(gpu, options, error, said):
    with pytest.raises(error, match=said):
        labkit.measure(lambda n: n, {"n": 1}, **options)


# What fails or is interrupted


def test_a_combination_that_fails_is_reported_and_the_others_are_kept(gpu, capsys):
    def used_bytes(size):
        return torch.zeros(size, dtype=torch.uint8, device="cuda").nbytes

    result = labkit.measure(used_bytes, {"size": [1 << 40, 1 << 10, 1 << 20]})
    assert result.column("size") == [1 << 10, 1 << 20]
    assert (
        "used_bytes failed for size 1099511627776. OutOfMemoryError: CUDA out of"
        in capsys.readouterr().out
    )
    [failure] = result.failures
    assert failure["arguments"] == {"size": 1 << 40}
    assert repr(result).splitlines()[-2].split() == ["1099511627776", "failed"]
    assert "OutOfMemoryError" in repr(result).splitlines()[-1]
    assert "OutOfMemoryError" in result._repr_html_()
    assert Result.from_json(result.to_json()) == result


def test_a_failed_combination_holds_no_memory(gpu):
    def used_bytes(fails):
        tensor = torch.zeros(1 << 20, device="cuda")
        if fails:
            raise ValueError(f"{tensor.numel()} numbers")
        return torch.cuda.memory_allocated() - tensor.nbytes

    held = torch.cuda.memory_allocated()
    assert labkit.measure(used_bytes, {"fails": [True, False]}).column("used_bytes") == [held]


def test_if_every_combination_fails_the_first_error_is_raised(gpu, capsys):
    def step(width):
        return undefined_name + width  # noqa: F821

    with pytest.raises(NameError, match="undefined_name") as caught:
        labkit.measure(step, {"width": [1, 2]})
    assert caught.value.__notes__ == [
        "All 2 combinations failed. This is the error of the first one."
    ]
    assert caught.traceback[-1].name == "step"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_fails_alone(gpu, capsys, number):
    result = labkit.measure(lambda n: number if n == 1 else n, {"n": [1, 2]})
    assert result.rows == [{"n": 2, "value": 2}]
    assert (
        f"value failed for n 1. ValueError: value returned {number} as value"
        in capsys.readouterr().out
    )


def test_a_number_that_needs_values_says_so(gpu):
    def loss(rows):
        return torch.randn(rows, device="cuda").mean().item()

    with pytest.raises(ValueError, match="With values=False, virtual GPUs compute no numbers"):
        labkit.measure(loss, {"rows": 8}, values=False)


def test_other_columns_than_before_fail(gpu, capsys):
    result = labkit.measure(lambda n: {"a" if n == 1 else "b": n}, {"n": [1, 2]})
    assert result.rows == [{"n": 1, "a": 1}]
    assert "value returned b. Before, it returned a." in capsys.readouterr().out


def test_an_interrupt_keeps_the_rows_and_says_so(gpu, capsys):
    def step(n):
        if n == 3:
            signal.raise_signal(signal.SIGINT)
        return n

    result = labkit.measure(step, {"n": [1, 2, 3, 4]})
    assert result.column("step") == [1, 2]
    assert (
        capsys.readouterr().out == "Interrupted after 2 of 4 combinations. The result has 2 rows.\n"
    )
    with pytest.raises(KeyboardInterrupt):
        labkit.measure(step, {"n": [3, 4]})


def test_an_interrupt_keeps_the_failures(gpu, capsys):
    def step(n):
        if n == 2:
            signal.raise_signal(signal.SIGINT)
        raise ValueError("no room")

    result = labkit.measure(step, {"n": [1, 2, 3]})
    assert result.rows == [] and result.failures[0]["arguments"] == {"n": 1}
    assert (
        "Interrupted after 1 of 3 combinations. The result has 0 rows." in capsys.readouterr().out
    )
    assert "no room" in repr(result)


# The progress


def test_a_terminal_shows_the_progress_and_nothing_is_left(gpu, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    labkit.measure(lambda n: n, {"n": [10, 20]})
    shown = capsys.readouterr().err.split("\r")
    assert [line.strip() for line in shown if line.strip()] == [
        "value: 0 of 2 done, now n 10",
        "value: 1 of 2 done, now n 20",
    ]
    assert shown[-1] == "" and shown[-2] == " " * len(shown[-3])


def test_a_program_whose_errors_go_to_a_file_shows_nothing(gpu, capsys):
    labkit.measure(lambda n: n, {"n": [10, 20]})
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_a_bar_and_its_stored_output_is_empty(gpu, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    updates = []

    class Handle:
        def update(self, data, raw):
            updates.append(data)

    monkeypatch.setattr(
        "IPython.display.display", lambda *shown, **options: updates.append(shown[0]) or Handle()
    )
    with capture_output():
        labkit.measure(lambda n: n, {"n": [10, 20]})
    assert updates[0] == updates[-1] == {"text/plain": ""}
    assert (
        '<progress value="1" max="2"></progress> value: 1 of 2 done, now n 20'
        in updates[2]["text/html"]
    )


def test_a_backward_pass_that_runs_out_of_memory_leaves_the_next_call_all_of_it():
    """Autograd passes the error on from a thread of its own, with another traceback.

    The memory that the failed pass holds must be freed in this case, too.
    """

    def peak(gpus):
        total = torch.cuda.get_device_properties(0).total_memory
        count = int(0.7 * total / 2**28)
        places = [index * gpus // count for index in range(count)]
        layers = [torch.nn.Linear(8192, 8192, bias=False, device=f"cuda:{gpu}") for gpu in places]
        x = torch.ones(8, 8192, device="cuda:0")
        for layer in layers:
            x = layer(x.to(layer.weight.device))
        x.sum().backward()
        return torch.cuda.max_memory_allocated(0) / total

    with labkit.use(gpus=2, virtual=True, quiet=True):
        result = labkit.measure(peak, {"gpus": [1, 2]}, values=False)
    assert [failure["arguments"] for failure in result.failures] == [{"gpus": 1}]
    [row] = result.rows
    assert 0.65 < row["peak"] < 0.72
