"""An experiment that only a click on Stop ends, so that a test can click at any speed."""

import inspect


def endless(lab):
    """Let the lab's next experiment repeat its first point ten times per second, without end."""
    import time
    from contextlib import closing

    experiment = lab.experiment

    def next_experiment():
        del lab.experiment
        run = experiment()
        run.total, run.points = 1_000_000, again_and_again(run.points)
        return run

    def again_and_again(points):
        with closing(points):
            row = next(points)
            while True:
                yield row
                time.sleep(0.1)

    lab.experiment = next_experiment


ENDLESS = inspect.getsource(endless)  # as a cell, from which other cells call it
