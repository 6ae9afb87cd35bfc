"""The experiments' faces: predict, run, compare. They measure nothing themselves."""

from labkit.widgets.base import Lab
from labkit.widgets.copies import CopySpeedLab
from labkit.widgets.memory import MemoryPanel

__all__ = ["CopySpeedLab", "Lab", "MemoryPanel"]
