"""Make one attempt in a process of its own: `WISH FILE`. The outcome goes into FILE.

The process ends afterwards, because the attempt leaves PyTorch patched. Processes that the script
starts leave their outcomes in the folder of FILE.
"""

import atexit
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

# Import this kit, and not another one that is installed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from gputrace.fit.attempt import attempt
from gputrace.fit.outcome import Wish

sys.path.pop(0)

if __name__ == "__main__":
    wish, file = sys.argv[1:]  # the attempt replaces sys.argv with the script's arguments
    outcome = attempt(Wish(**json.loads(wish)), os.path.dirname(file))
    Path(file).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    atexit._run_exitfuncs()
    os._exit(0)  # a normal exit of an interpreter with torch takes a third of a second
