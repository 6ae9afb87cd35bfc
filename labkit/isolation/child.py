"""The program that `isolated` starts."""

import os
import sys

# So that this kit is imported, and not another one that is installed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from labkit.isolation import run_call

if __name__ == "__main__":  # a process that the function spawns imports this file, too
    run_call(sys.argv[1])
