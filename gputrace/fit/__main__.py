"""`python -m gputrace.fit WISH FILE`: one attempt in a process of its own, for what it leaves patched; its outcome goes into FILE."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from gputrace.fit.attempt import Wish, attempt

if __name__ == "__main__":
    wish, file = sys.argv[1:]  # the script gets its own
    outcome = attempt(Wish(**json.loads(wish)))
    Path(file).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
