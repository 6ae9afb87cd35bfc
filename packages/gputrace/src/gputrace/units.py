"""Numbers with their units, as tables and figures print them: bytes in KiB, MiB, GiB; rates in GB/s, as data sheets have them."""

from typing import Any

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number_text(value: float, digits: int = 4) -> str:
    """Return a number with that many digits, or as a whole number if it is larger.

    Numbers from 1e15 on have an exponent.
    """
    if 10**digits - 0.5 <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the binary unit that suits a number of bytes, and how many bytes it is."""
    power = 0
    while power < len(_BINARY) - 1 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return 1024**power, _BINARY[power]


def byte_text(nbytes: float) -> str:
    """Return a number of bytes as text, such as 64 KiB or 1.5 MiB."""
    size, unit = byte_unit(nbytes)
    return f"{number_text(nbytes / size)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit that suits a time, and how many seconds it is."""
    return next((unit for unit in _TIMES if abs(seconds) >= unit[0]), _TIMES[-1])


def time_text(seconds: float) -> str:
    """Return a time as text, such as 17.6 µs or 2.43 ms."""
    size, unit = time_unit(seconds)
    return f"{number_text(seconds / size, 3)} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Return a rate as text, such as 0.227 GB/s or 4.14 TB/s."""
    size, unit = (1e12, "TB/s") if abs(bytes_per_second) >= 999.5e9 else (1e9, "GB/s")
    return f"{number_text(bytes_per_second / size, 3)} {unit}"


_TEXTS = {"bytes": byte_text, "seconds": time_text, "bytes per second": rate_text}


def text(value: Any, unit: str) -> str:
    """Return a value of a result's column as text. None is a value that is not there.

    Only units that this module knows are part of the text. `beside_name` has the others.
    """
    if value is None:
        return "–"
    if unit in _TEXTS and not isinstance(value, str):
        return _TEXTS[unit](value)
    return number_text(value) if isinstance(value, float) else str(value)


def beside_name(unit: str) -> str:
    """Return what follows the name of a column with this unit, such as ", furlong"."""
    if not unit or unit in _TEXTS:
        return ""
    return f", {unit}"


def text_with_unit(value: Any, unit: str) -> str:
    """Return a value as text with its unit, whether this module knows the unit or not."""
    if not unit or unit in _TEXTS:
        return text(value, unit)
    return f"{text(value, unit)} {unit}"
