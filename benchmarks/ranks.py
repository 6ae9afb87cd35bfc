"""How long two ranks take that do nothing but meet: copies of the fork server beside processes started afresh.

python benchmarks/ranks.py [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import labkit
from labkit.processes import forkserver

SCRIPT = "import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\ndist.destroy_process_group()\n"


def seconds(script: Path) -> float:
    begin = time.perf_counter()
    labkit.torchrun(script, ranks=2, quiet=True, devices="cpu")
    return time.perf_counter() - begin


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "meet.py")
        script.write_text(SCRIPT)
        first = [seconds(script) for _ in range(2)]  # the server starts, and imports the rest
        warm = statistics.median(seconds(script) for _ in range(rounds))
        forkserver.end()
        forkserver.POSSIBLE = False
        afresh = statistics.median(seconds(script) for _ in range(rounds))
    print(f"first two jobs: {first[0]:.2f} s and {first[1]:.2f} s; then {warm:.2f} s each")
    print(f"started afresh: {afresh:.2f} s each, {afresh / warm:.1f} times as long")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
