"""The program that makes one attempt, `WISH FILE`, in a process of its own, for what it leaves patched; its outcome goes into FILE."""

import atexit
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # for this kit, not one installed
from gputrace.fit.attempt import Wish, attempt

sys.path.pop(0)

if __name__ == "__main__":
    wish, file = sys.argv[1:]  # the script gets its own
    outcome = attempt(Wish(**json.loads(wish)))
    Path(file).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    atexit._run_exitfuncs()
    os._exit(0)  # to take down an interpreter with torch in it takes a third of a second
