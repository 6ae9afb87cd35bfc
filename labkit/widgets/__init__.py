"""The experiments' faces: predict, run, compare. They measure nothing themselves."""

from labkit.widgets.allocator import AllocatorLab
from labkit.widgets.base import Lab
from labkit.widgets.budget import BudgetLab
from labkit.widgets.claims import ClaimsPanel
from labkit.widgets.copies import CopySpeedLab
from labkit.widgets.formats import FormatLab
from labkit.widgets.leaks import LeakLab
from labkit.widgets.memory import MemoryPanel
from labkit.widgets.parallel import DataParallelLab
from labkit.widgets.pipeline import PipelineLab
from labkit.widgets.sharing import SharingLab
from labkit.widgets.streams import StreamsLab

__all__ = [
    "AllocatorLab",
    "BudgetLab",
    "ClaimsPanel",
    "CopySpeedLab",
    "DataParallelLab",
    "FormatLab",
    "Lab",
    "LeakLab",
    "MemoryPanel",
    "PipelineLab",
    "SharingLab",
    "StreamsLab",
]
