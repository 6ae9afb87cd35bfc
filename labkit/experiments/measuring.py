"""Measure a function of one's own: `seconds` of a step, and `measure` for a grid of arguments."""

import contextlib
import copy
import gc
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from statistics import median
from typing import Any

import numpy as np
import torch

from labkit import machine
from labkit.checks.checking import plural
from labkit.checks.settings import settings_kept
from labkit.checks.undisturbed import random_state_kept
from labkit.experiments.fingerprints import fingerprint
from labkit.experiments.grid import checked_grid, in_words, label, name_of
from labkit.experiments.progress_bar import ProgressBar
from labkit.experiments.result import Result
from labkit.experiments.result_data import Failure, Row, unit_of
from labkit.labs.experiment import Run, checked_count

CLOCK_DIGITS = 12  # later digits are rounding errors of the clock's differences
LONGEST_ERROR = 100  # characters of an error message that are shown


_measuring = threading.RLock()  # held by the thread that measures


class UnitsError(ValueError):
    """Error for `units` that name a column which does not exist."""


@contextlib.contextmanager
def _only_this_thread() -> Iterator[None]:
    """Raise RuntimeError if another thread is measuring, because the times would mix."""
    if not _measuring.acquire(blocking=False):
        raise RuntimeError(
            "Another thread is measuring on these GPUs, and each would count the other's time. "
            "Measure in one thread after the other."
        )
    try:
        yield
    finally:
        _measuring.release()


def seconds(step: Callable[[], object], repeats: int = 3, warm_up: int = 2) -> float:
    """Call `step()` several times, and return the median time of a call, in seconds.

    The clock is that of the GPUs in use. Each time starts when all GPUs are idle and ends when all
    work of the call is done::

        x = torch.ones(1024, 1024, device="cuda")
        labkit.seconds(lambda: x @ x)

    Args:
        step: a function without arguments. What it returns is ignored.
        repeats: the number of calls that are timed.
        warm_up: the number of calls before these, which are not timed.

    Raises:
        TypeError: `step` is not a function, or it returns a generator or a coroutine.
        ValueError: `repeats` is less than 1, or `warm_up` is less than 0.
        RuntimeError: no GPU is in use, or another thread is measuring.
    """
    used = machine.in_use()
    if not callable(step):
        raise TypeError(
            "Give labkit.seconds a function without arguments, such as `labkit.seconds(step)`. "
            f"You gave {step!r}."
        )
    checked_count("repeats", repeats)
    if type(warm_up) is not int or warm_up < 0:
        raise ValueError(f"warm_up={warm_up!r}: give a whole number, 0 or more")
    times = []
    with _only_this_thread():
        for _ in range(warm_up + repeats):
            machine.synchronize()
            start = used.host_time()
            _check_that_it_ran(step())
            machine.synchronize()
            times.append(used.host_time() - start)
    return round(median(times[warm_up:]), CLOCK_DIGITS)


def _check_that_it_ran(outcome: object) -> None:
    """Raise TypeError if a call returned a generator or a coroutine, because no code ran yet."""
    if inspect.isgenerator(outcome) or inspect.iscoroutine(outcome):
        outcome.close()
    elif not inspect.isasyncgen(outcome):
        return
    raise TypeError(
        f"The step returned a {type(outcome).__name__}, so its code did not run. "
        "Give labkit.seconds a function that does the work when it is called."
    )


def measure(
    function: Callable[..., Any],
    grid: Mapping[str, Any],
    *,
    values: bool = True,
    units: Mapping[str, str] | None = None,
) -> Result:
    """Call `function` for every combination of the grid, and return a table of its results.

    This example makes six calls, and the table has six rows::

        def step_seconds(gpus, width):
            ...
            return labkit.seconds(step)

        times = labkit.measure(step_seconds, {"gpus": [1, 2, 4], "width": [1024, 4096]})
        times.plot("gpus", "speed-up", by="width")

    Args:
        function: returns one number, or a dictionary of numbers with the same names each time.
        grid: for each argument one value, or a list, tuple, range or array of values. Put a value
            that is itself a list into a list: `[[1, 2]]`.
        values: with False, virtual GPUs keep memory, order and time but compute no numbers, which
            makes large networks affordable. Numbers that are read from a tensor are then nan or an
            error. Make tensors inside the function, because older tensors lose their values. It
            changes nothing on real GPUs.
        units: units of columns, such as `{"peak": "bytes"}`. The columns `seconds` and `bytes`, and
            those whose names end in `_seconds` or `_bytes`, have their units without it. The table
            and the figure name units of your own beside the column.

    Each call starts with its own peak of memory: `torch.cuda.max_memory_allocated` does not count
    what earlier calls used. The memory that PyTorch keeps reserved stays reserved. Each call
    also starts with the same random numbers and the same settings of PyTorch, such as the current
    GPU, the default dtype, TF32 and `cudnn.benchmark`. After the call they have their old values.

    A combination that fails is reported, and the others are kept. An interrupt keeps what was
    measured so far.

    Raises:
        TypeError: the function cannot be called with these arguments.
        ValueError: the grid has an empty list or a value twice, or `units` names a column that does
            not exist.
        RuntimeError: no GPU is in use, or another thread is measuring.
        Exception: if every combination fails, the error of the first one. It is a TypeError if the
            function does not return numbers, and a ValueError if it returns nan or inf.
    """
    measurement = Measurement(function, grid, values=values, units=units)
    with _only_this_thread(), ProgressBar(measurement.name, measurement.total) as bar:
        measurement.on_start = bar.show
        measurement.on_failure = bar.print
        try:
            for _ in measurement:
                pass
        except KeyboardInterrupt:
            if not measurement.done:
                raise
            bar.print(
                f"Interrupted after {measurement.done} of {measurement.total} combinations. "
                f"The result has {plural(len(measurement.rows), 'row')}."
            )
    return measurement.result()


class Measurement(Run):
    """A measurement under way. Each row calls the function for the next combination that works."""

    def __init__(
        self,
        function: Callable[..., Any],
        grid: Mapping[str, Any],
        *,
        values: bool = True,
        units: Mapping[str, str] | None = None,
    ) -> None:
        """Check the arguments. Raises what `measure` raises before it calls the function."""
        self._machine = machine.in_use()
        self._function = function
        self._grid = checked_grid(function, grid)
        if not isinstance(values, bool):
            raise TypeError(f"values={values!r}: choose True or False")
        self._values = values
        self._units = _checked_units(units)
        self._first_error: Exception | None = None
        self.failures: list[Failure] = []
        self.on_start: Callable[[int, str], None] = lambda done, text: None
        self.on_failure: Callable[[str], None] = lambda text: None
        super().__init__(
            name=name_of(function),
            parameters=self._grid.labels(),
            columns={},
            badge=self._machine.badge,
            total=len(self._grid),
            points=self._rows_that_work(),
        )

    @property
    def done(self) -> int:
        """How many combinations were tried."""
        return len(self.rows) + len(self.failures)

    def result(self) -> Result:
        """Return the rows measured so far."""
        columns = self.columns or {name: unit_of(name) for name in self.parameters}
        return Result(
            self.name,
            self.parameters,
            columns,
            list(self.rows),
            self.badge,
            failures=list(self.failures),
            code=fingerprint(self._function),
        )

    def _rows_that_work(self) -> Iterator[Row]:
        for arguments in self._grid.combinations():
            # The function may change a list, so the labels are made before the call.
            labels = {name: label(value) for name, value in arguments.items()}
            self.on_start(self.done, in_words(labels))
            with _only_this_thread():
                row = self._row(arguments, labels)
            if row is not None:
                yield row
        if not self.rows and self._first_error is not None:
            if self.total > 1:
                self._first_error.add_note(
                    f"All {self.total} combinations failed. This is the error of the first one."
                )
            raise self._first_error

    def _row(self, arguments: dict[str, Any], labels: dict[str, Any]) -> Row | None:
        """Call the function once, and return the row of the result.

        `labels` are the arguments as the row shows them. If the call fails, store the reason and
        return None.
        """
        held = self._allocated()
        for gpu in range(self._machine.count):
            torch.cuda.reset_peak_memory_stats(gpu)
        try:
            numbers = self._numbers(self._call(arguments))
        except Exception as error:
            self._failed(labels, error)
            return None
        finally:
            # Tensors in reference cycles would count for the next combination.
            if any(now > before for now, before in zip(self._allocated(), held, strict=True)):
                gc.collect()
        if not self.columns:
            self.columns = self._columns(list(numbers))
        return labels | numbers

    def _call(self, arguments: dict[str, Any]) -> Any:
        """Call the function with copies of the arguments' lists and dictionaries.

        The function may change the copies.
        """
        own = {
            name: copy.deepcopy(value) if isinstance(value, list | dict) else value
            for name, value in arguments.items()
        }
        with random_state_kept(), settings_kept():
            if self._values:
                return self._function(**own)
            with self._machine.without_values():
                return self._function(**own)

    def _allocated(self) -> list[int]:
        return [torch.cuda.memory_allocated(gpu) for gpu in range(self._machine.count)]

    def _failed(self, labels: dict[str, Any], error: Exception) -> None:
        _free_locals(error)
        if self._first_error is None:
            self._first_error = error
        text = _shortened(_error_text(error))
        self.failures.append({"arguments": labels, "error": text})
        if self.total > 1:
            self.on_failure(f"{self.name} failed for {in_words(labels)}. {text}")

    def _numbers(self, outcome: Any) -> dict[str, float]:
        """Return what the function returned as named numbers.

        Raises TypeError for anything but numbers, and ValueError for a number that is not finite or
        for other columns than before.
        """
        if isinstance(outcome, dict):
            numbers = {name: _number(value, self.name, name) for name, value in outcome.items()}
            self._check_names(list(numbers))
        else:
            column = self.name
            if column in self.parameters:
                column = "value"
            numbers = {column: _number(outcome, self.name, None)}
        expected = [name for name in self.columns if name not in self.parameters]
        if expected and set(expected) != set(numbers):
            raise ValueError(
                f"{self.name} returned {', '.join(numbers)}. "
                f"Before, it returned {', '.join(expected)}."
            )
        for name, value in numbers.items():
            if not _is_finite(value):
                why = ""
                if not self._values:
                    why = " With values=False, virtual GPUs compute no numbers."
                raise ValueError(
                    f"{self.name} returned {_number_text(value)} as {name}. "
                    f"Only finite numbers can be measured.{why}"
                )
        return numbers

    def _check_names(self, names: list[Any]) -> None:
        if not names:
            raise TypeError(
                f"{self.name} returned an empty dictionary. Return at least one number."
            )
        for name in names:
            if not isinstance(name, str):
                raise TypeError(
                    f"{self.name} returned a dictionary with the key {name!r}. "
                    "The keys name columns, so use texts."
                )
            if name in self.parameters:
                raise TypeError(
                    f"{self.name} returned a number named {name!r}, which is also an argument. "
                    "Give it another name."
                )

    def _columns(self, measured: list[str]) -> dict[str, str]:
        columns = {name: unit_of(name) for name in [*self.parameters, *measured]}
        for name in self._units:
            if name not in columns:
                raise UnitsError(
                    f"units has the column {name!r}. The columns are {', '.join(columns)}."
                )
        return columns | self._units


def _checked_units(units: Mapping[str, str] | None) -> dict[str, str]:
    if units is None:
        return {}
    if not isinstance(units, Mapping) or not all(isinstance(unit, str) for unit in units.values()):
        raise TypeError(
            f"units={units!r}: give a dictionary from columns to units, such as {{'peak': 'bytes'}}"
        )
    return dict(units)


def _number(value: Any, function: str, key: str | None) -> float:
    """Return a value that the function returned as a plain number.

    `function` is the function's name, and `key` the name of the value in a dictionary, for the
    message of the TypeError that is raised for anything else.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    returned = f"a {type(value).__name__}"
    advice = "Return a number or a dictionary of numbers."
    if isinstance(value, torch.Tensor):
        returned, advice = "a tensor", "Return a number, for example with `.item()`."
    elif isinstance(value, np.ndarray):
        returned, advice = "an array", "Return a number, for example with `.item()`."
    elif value is None:
        returned = "None"
        if key is None:
            advice += " Does it end with `return`?"
    if key is not None:
        returned += f" as {key!r}"
    raise TypeError(f"{function} returned {returned}. {advice}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _number_text(value: float) -> str:
    """Return the number as text. Whole numbers beyond the largest float are not written out."""
    if isinstance(value, int) and not _is_finite(value):
        return "a number that is too large"
    return str(value)


def _error_text(error: Exception) -> str:
    """Return the class name and the message of an error, even if its message cannot be read."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    if not message:
        return f"{type(error).__name__} (no message)"
    return f"{type(error).__name__}: {message}"


def _free_locals(error: BaseException) -> None:
    """Free the local variables of a failed call, which may hold tensors.

    The traceback keeps its lines.
    """
    chained: BaseException | None = error
    while chained is not None:
        with contextlib.suppress(RuntimeError):
            traceback.clear_frames(chained.__traceback__)
        _free_callers(chained)
        chained = chained.__context__


def _free_callers(error: BaseException) -> None:
    """Free the local variables of the functions that called the one where the traceback begins.

    An error that autograd passes on in another thread lacks these functions in its traceback.
    """
    if error.__traceback__ is None:
        return
    frame = error.__traceback__.tb_frame.f_back
    while frame is not None:
        with contextlib.suppress(RuntimeError):  # the function still runs
            frame.clear()
        frame = frame.f_back


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= LONGEST_ERROR:
        return line
    return line[:LONGEST_ERROR].rsplit(" ", 1)[0] + " …"
