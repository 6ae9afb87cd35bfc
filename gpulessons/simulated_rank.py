"""The program that runs a script as rank 0 of a simulated world, in a process of its own: what it leaves in `result` goes to a file."""

import json
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for this kit, not one installed
from labkit.processes.supervision import end_before_others, leave
from virtualgpu import simulated_world
from virtualgpu.cluster import NETWORK
from virtualgpu.script import run_script

sys.path.pop(0)


def main(folder: str, script: str, number: str) -> None:
    """Run `script` in the world that the file `number`.json of `folder` describes, and leave `number`.result: a kind, and what it is."""
    end_before_others()
    world = json.loads(Path(folder, f"{number}.json").read_text())
    arguments = [str(argument) for argument in world.pop("arguments")]
    chosen: dict[str, Any] = {"nodes": 1, "rank": 0, "network": NETWORK, "like": None, "memory": None} | world
    told: tuple[str, Any]
    try:
        tempfile.tempdir = folder  # its nvidia-smi goes with the folder, even if this process is killed
        simulated_world.set_up(**chosen, tell=lambda sentence: None)
        tempfile.tempdir = None
        run_script(script, arguments)
        told = "result", vars(sys.modules["__main__"]).get("result")
    except BaseException as error:
        told = "raised", f"{type(error).__name__}: {error}"
    Path(folder, f"{number}.result").write_bytes(pickle.dumps(told))
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
