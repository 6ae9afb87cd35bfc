"""What the fork server of multiprocessing prepares for its children."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import virtualgpu.preload
from virtualgpu.ops import faults
print(gc.get_freeze_count() > len(gc.get_objects()), faults.native_functions.cache_info().currsize)
"""


@pytest.mark.slow
def test_children_neither_search_its_imports_for_garbage_nor_read_pytorchs_list_again():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "1"], done.stderr
