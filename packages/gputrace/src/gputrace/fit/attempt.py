"""Attempt: a few steps of an unmodified script on virtual GPUs without values."""

import os
import signal

import virtualgpu
from gputrace.fit import script_processes
from gputrace.fit.measurement import Measurement
from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.script_processes import Ended, ScriptProcesses
from virtualgpu.script import run_script

NO_GPU = (
    "it put nothing on the GPU. It may need an option of its own to use the GPU, "
    "such as --device cuda"
)


def attempt(wish: Wish, folder: str) -> Outcome:
    """Run the script in this process, which should end afterwards.

    The GPUs, the hooks and the patches of the change are not removed. Processes that the script
    starts leave their outcomes in `folder`.
    """
    gpus = virtualgpu.use(
        wish.gpus, like=wish.like, memory=wish.memory, values=False, host=wish.host
    )
    processes = ScriptProcesses(wish, folder, os.getpid())
    processes.put_in_place()
    measurement = Measurement(wish, gpus, folder)
    signal.signal(script_processes.STOP, measurement.stop)
    others: list[Ended] = []

    def run() -> None:
        try:
            run_script(wish.script, wish.arguments, wish.module)
        finally:
            measurement.is_over()
            others.extend(processes.end())

    own = measurement.of(run)
    outcome = script_processes.together(own, others, gpus.profile.context_bytes)
    if outcome.fits and not (outcome.failed or outcome.allocated):
        outcome.failed = NO_GPU
    return outcome
