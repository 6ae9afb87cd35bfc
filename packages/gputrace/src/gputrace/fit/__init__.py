"""Will it fit, and how fast would it be? A training script's first steps on virtual GPUs of several models, without values."""

from gputrace.fit.outcome import Wish
from gputrace.fit.page import ScriptFailedError, answer
from gputrace.fit.processes import Process

__all__ = ["Process", "ScriptFailedError", "Wish", "answer"]
