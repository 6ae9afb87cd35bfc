"""Which processes isolated runs have left."""

import psutil

from labkit.isolation.process import MARK


def left_over(folder: str) -> list[psutil.Process]:
    """The processes of runs whose files lie below `folder`, and that are alive."""
    found = []
    for process in psutil.process_iter():
        try:
            if folder in process.environ().get(MARK, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
