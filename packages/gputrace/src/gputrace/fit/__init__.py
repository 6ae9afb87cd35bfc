"""Will a training script fit, and how fast would it be?

The first steps of the script run on virtual GPUs of several models, without values.
"""

from gputrace.fit.outcome import Wish
from gputrace.fit.page import ScriptFailedError, answer
from gputrace.fit.processes import Process

__all__ = ["Process", "ScriptFailedError", "Wish", "answer"]
