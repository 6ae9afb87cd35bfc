"""Numbers with units for tables and figures: bytes in KiB, MiB or GiB, and rates in GB/s."""

from typing import Any

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number_text(value: float, digits: int = 4) -> str:
    """Write a number with this many significant digits.

    Larger numbers are written as whole numbers. From 1e15 on, they have an exponent.
    """
    if 10**digits - 0.5 <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, such as "1 block" or "2 blocks"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the binary unit that suits a number of bytes, as (bytes per unit, name)."""
    power = 0
    while power < len(_BINARY) - 1 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return 1024**power, _BINARY[power]


def byte_text(nbytes: float) -> str:
    """Write a number of bytes, such as 64 KiB or 1.5 MiB."""
    size, unit = byte_unit(nbytes)
    return f"{number_text(nbytes / size)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit that suits a time, as (seconds per unit, name)."""
    return next((unit for unit in _TIMES if abs(seconds) >= unit[0]), _TIMES[-1])


def time_text(seconds: float) -> str:
    """Write a time in seconds with a suitable unit, such as 17.6 µs or 2.43 ms."""
    size, unit = time_unit(seconds)
    return f"{number_text(seconds / size, 3)} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Write a rate, such as 0.227 GB/s or 4.14 TB/s."""
    size, unit = 1e9, "GB/s"
    if abs(bytes_per_second) >= 999.5e9:
        size, unit = 1e12, "TB/s"
    return f"{number_text(bytes_per_second / size, 3)} {unit}"


_TEXTS = {"bytes": byte_text, "seconds": time_text, "bytes per second": rate_text}


def text(value: Any, unit: str) -> str:
    """Write a value from a column of a result. None, a missing value, becomes a dash.

    The text has the unit only if this module knows the unit. See `beside_name` for other units.
    """
    if value is None:
        return "–"
    if unit in _TEXTS and not isinstance(value, str):
        return _TEXTS[unit](value)
    if isinstance(value, float):
        return number_text(value)
    return str(value)


def beside_name(unit: str) -> str:
    """Return what follows the name of a column with this unit, such as ", furlong".

    It is empty if the values have the unit.
    """
    if not unit or unit in _TEXTS:
        return ""
    return f", {unit}"


def text_with_unit(value: Any, unit: str) -> str:
    """Write a value with its unit, whether this module knows the unit or not."""
    if not unit or unit in _TEXTS:
        return text(value, unit)
    return f"{text(value, unit)} {unit}"
