"""Numbers with their units, as tables and figures print them: bytes in KiB, MiB, GiB; rates in GB/s, as data sheets have them."""

from typing import Any

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def byte_unit(nbytes: float) -> tuple[int, str]:
    """The binary unit that suits a number of bytes, and how many bytes it is."""
    power = 0
    while power < len(_BINARY) - 1 and nbytes >= 1024 ** (power + 1):
        power += 1
    return 1024**power, _BINARY[power]


def byte_text(nbytes: float) -> str:
    """64 KiB, 1.5 MiB."""
    size, unit = byte_unit(nbytes)
    return f"{nbytes / size:.4g} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that suits a time, and how many seconds it is."""
    return next((unit for unit in _TIMES if seconds >= unit[0]), _TIMES[-1])


def time_text(seconds: float) -> str:
    """17.6 µs, 2.43 ms."""
    size, unit = time_unit(seconds)
    return f"{seconds / size:.3g} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """0.227 GB/s, 11.9 GB/s, 4.14 TB/s."""
    size, unit = (1e12, "TB/s") if bytes_per_second >= 999.5e9 else (1e9, "GB/s")
    return f"{bytes_per_second / size:.3g} {unit}"


_TEXTS = {"bytes": byte_text, "seconds": time_text, "bytes per second": rate_text}


def text(value: Any, unit: str) -> str:
    """A value of a Result's column, with its unit; units not known here stand in the column's name. None is a value that is not there."""
    if value is None:
        return "–"
    if unit in _TEXTS and not isinstance(value, str):
        return _TEXTS[unit](value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
