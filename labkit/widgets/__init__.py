"""The experiments' faces: predict, run, compare. They measure nothing themselves."""

from labkit.widgets.allocator import AllocatorLab as AllocatorLab
from labkit.widgets.base import Lab as Lab
from labkit.widgets.budget import BudgetLab as BudgetLab
from labkit.widgets.claims import ClaimsPanel as ClaimsPanel
from labkit.widgets.copies import CopySpeedLab as CopySpeedLab
from labkit.widgets.formats import FormatLab as FormatLab
from labkit.widgets.leaks import LeakLab as LeakLab
from labkit.widgets.memory import MemoryPanel as MemoryPanel
from labkit.widgets.parallel import DataParallelLab as DataParallelLab
from labkit.widgets.pipeline import PipelineLab as PipelineLab
from labkit.widgets.sharing import SharingLab as SharingLab
from labkit.widgets.streams import StreamsLab as StreamsLab
