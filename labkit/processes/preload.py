"""What the fork server of Python's multiprocessing imports before anything else.

The server looks for nothing in the working folder, where a learner may have files with the names of
packages. Its children look where their parent does, but the kit's modules are already imported.
"""

import os
import sys
from pathlib import Path

_elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != os.getcwd()]
# The kit itself may be in the working folder.
sys.path[:] = [*_elsewhere, str(Path(__file__).absolute().parents[2])]

import labkit.machine  # noqa: E402
import labkit.processes.by_value  # noqa: E402, F401
