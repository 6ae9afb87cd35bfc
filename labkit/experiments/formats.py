"""What each number format makes of a computation: every number and every result on the way rounded to it, and the bits of the last."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.experiments.computation import Computation, evaluated, parse
from labkit.experiments.result import Row, Run

COLUMNS = {"format": "", "value": "", "exact": "", "sign": "", "exponent": "", "fraction": ""}
BADGE = "computed bit by bit, each step rounded to the nearest"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign bit, then the bits of the exponent, then those of the fraction.

    The rules are those of IEEE 754: to the nearest, of two the even one, subnormal numbers, infinities. A format that is not `infinite`
    has only one pattern for what is no number (and its negative), and keeps its largest number where others turn to infinity, as GPUs
    convert to float8 e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022).
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        if self.infinite:
            return (2 - 2.0**-self.fraction_bits) * 2.0**self.bias
        return (2 - 2.0 ** (1 - self.fraction_bits)) * 2.0 ** (self.bias + 1)

    @property
    def smallest(self) -> float:
        """The smallest number above 0: a subnormal one."""
        return 2.0 ** (1 - self.bias - self.fraction_bits)

    def rounded(self, x: float) -> float:
        """The number of this format next to `x`."""
        if x == 0 or not math.isfinite(x):
            return x if self.infinite or not math.isinf(x) else math.copysign(self.largest, x)
        step = self._step(x)
        value = round(x / step) * step  # Python rounds halves to even
        if abs(value) <= self.largest:
            return math.copysign(value, x)
        return math.copysign(math.inf if self.infinite else self.largest, x)

    def _step(self, x: float) -> float:
        """From `x` to the next number: subnormal numbers are all as far apart as the smallest normal ones."""
        exponent = max(math.frexp(x)[1] - 1, 1 - self.bias)
        return 2.0 ** (exponent - self.fraction_bits)

    def pattern(self, x: float) -> tuple[str, str, str]:
        """Sign, exponent and fraction of `x`, a number of this format, as strings of 0 and 1."""
        ones = 2**self.exponent_bits - 1
        if math.isnan(x):
            exponent, fraction = ones, (2 ** (self.fraction_bits - 1) if self.infinite else 2**self.fraction_bits - 1)
        elif math.isinf(x):
            exponent, fraction = ones, 0
        else:
            units = round(abs(x) / self._step(x)) if x else 0  # with the leading one, which is not stored
            normal = units >= 2**self.fraction_bits
            exponent = math.frexp(x)[1] - 1 + self.bias if normal else 0
            fraction = units - 2**self.fraction_bits if normal else units
        sign = "1" if math.copysign(1, x) < 0 and not math.isnan(x) else "0"
        return sign, f"{exponent:0{self.exponent_bits}b}", f"{fraction:0{self.fraction_bits}b}"


FORMATS = (
    Format("float32", 8, 23),
    Format("tf32", 8, 10),  # of matrix products' factors only: no tensor has it
    Format("bfloat16", 8, 7),
    Format("float16", 5, 10),
    Format("float8 e5m2", 5, 2),
    Format("float8 e4m3", 4, 3, infinite=False),
)
FLOAT64 = Format("float64", 11, 52)  # Python's own, with which the others are compared
ASKED = "float16"  # whose result learners predict


def number_formats(computation: str) -> Run:
    """What each format makes of a computation such as "0.1 + 0.2", "300**2" or "sum(0.01, 1000)"; one row a format.

    Each number in it and the result of each operation is rounded to the format. `value` is what comes out, `exact` what float64 makes
    of the same, `sign`, `exponent` and `fraction` are the bits of `value`. Needs no GPU.

    Raises ValueError, saying what is allowed, for text that is no computation.
    """
    parsed = parse(computation)
    evaluated(parsed, FLOAT64.rounded)  # a mistake shows before the first point
    return Run("number_formats", {"computation": parsed.text}, COLUMNS, BADGE, len(FORMATS), _points(parsed))


def _points(computation: Computation) -> Iterator[Row]:
    exact = evaluated(computation, FLOAT64.rounded)
    for form in FORMATS:
        value = evaluated(computation, form.rounded)
        sign, exponent, fraction = form.pattern(value)
        yield {"format": form.name, "value": value, "exact": exact, "sign": sign, "exponent": exponent, "fraction": fraction}
