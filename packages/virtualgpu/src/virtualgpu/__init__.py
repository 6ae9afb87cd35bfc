"""`torch.cuda` on a computer without a GPU.

Numbers are real, because they are computed on the CPU. Memory, errors and the order of work follow
the rules of PyTorch and CUDA. Times come from a model and are the same in every run.

    import virtualgpu

    with virtualgpu.use(2, like="H200"):
        ...                             # ordinary PyTorch: torch.ones(3, device="cuda:1")

`python -m virtualgpu run script.py` does the same for a script. The public names are imported when
they are first used.
"""

from typing import TYPE_CHECKING

from virtualgpu import front_end

if TYPE_CHECKING:
    from virtualgpu import profiles as profiles
    from virtualgpu.machines import VirtualGPUs as VirtualGPUs
    from virtualgpu.machines import current as current
    from virtualgpu.machines import host_time as host_time
    from virtualgpu.machines import races as races
    from virtualgpu.machines import use as use
    from virtualgpu.streams.race_reports import Race as Race
    from virtualgpu.streams.race_reports import RaceWarning as RaceWarning
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)
