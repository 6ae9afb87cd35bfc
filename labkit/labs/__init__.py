"""The parts of labs: the result of an experiment, and the widgets that show it.

An experiment is a function that returns a `Run`. Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from virtualgpu import front_end

if TYPE_CHECKING:
    from labkit.labs.experiment import Result as Result
    from labkit.labs.experiment import Run as Run
    from labkit.labs.experiment import collect as collect
    from labkit.labs.experiment import recorded_result as recorded_result
    from labkit.labs.panel import ExperimentPanel as ExperimentPanel
    from labkit.labs.panel import Panel as Panel
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)
