"""Imported by the fork server of Python's multiprocessing, before anything else that its children
need.

The server looks for nothing in the working folder, where a learner may keep files named like
packages. The children look where their parent does, but they have what the kit needs already.
"""

import os
import sys

_KIT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)  # perhaps the working folder
sys.path[:] = [*(folder for folder in sys.path if os.path.abspath(folder) != os.getcwd()), _KIT]

import labkit.machine  # noqa: E402
import labkit.processes.by_value  # noqa: E402, F401
