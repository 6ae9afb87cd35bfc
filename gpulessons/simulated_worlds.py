"""Results of a script as rank 0 of several large worlds, each in a process of its own."""

import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.processes import forkserver
from labkit.processes.supervision import kill_job, rank_environment
from virtualgpu.script import check_script

AT_ONCE = 2  # processes: more would not be sooner done on two cores
_PROGRAM = str(Path(__file__).with_name("simulated_rank.py"))


def results(script: str | os.PathLike, worlds: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yield what the script leaves in `result` as rank 0 of each of these worlds, in their order.

    A world is `arguments` for the script, and `world`, `nodes`, `network`, `like` and `memory` as
    of `virtualgpu.simulated_world.set_up`. Each one runs in a process of its own.

    Raises RuntimeError with what a script raised.
    """
    check_script(script)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        started: list[Any] = []
        try:
            for number, world in enumerate(worlds):
                for ahead in range(len(started), min(number + AT_ONCE, len(worlds))):
                    started.append(_started(folder, os.fspath(script), ahead, worlds[ahead]))
                started[number].wait()
                yield _told(folder, number, world)
        finally:
            kill_job(folder)
            for process in started:
                process.wait()


def _started(folder: str, script: str, number: int, world: dict[str, Any]) -> Any:
    Path(folder, f"{number}.json").write_text(json.dumps(world))
    with Path(os.devnull).open("wb") as nowhere:
        return forkserver.popen(
            [_PROGRAM, folder, script, str(number)], rank_environment(folder), output=nowhere.fileno(), with_caller=True
        )


def _told(folder: str, number: int, world: dict[str, Any]) -> Any:
    file = Path(folder, f"{number}.result")
    kind, what = pickle.loads(file.read_bytes()) if file.exists() else ("ended", "its process ended without a word")
    if kind != "result":
        raise RuntimeError(f"rank 0 of {world['world']:,} simulated ranks: {what}")
    return what
