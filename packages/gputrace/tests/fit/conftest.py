"""What the tests of `fit` share: attempts in processes that need not import torch."""

from collections.abc import Callable

import pytest

from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import Runner

from ..warm_processes import WarmProcesses


@pytest.fixture(scope="session")
def run(warm_processes: WarmProcesses) -> Callable[[Wish], Outcome]:
    """A function that makes one attempt and returns its outcome."""

    def attempt(wish: Wish) -> Outcome:
        [(_, outcome)] = Runner(warm_processes.start).run_all([wish])
        return outcome

    return attempt
