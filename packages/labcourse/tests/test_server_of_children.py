"""The children of an answer are copies of the sandbox's process, as it was before the cells ran."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

FORKED = """
import os, sys
from labcourse import server_of_children
from labkit import processes

LOOK = '''
import os, torch
is_original = torch.cuda.is_available.__name__ == "is_available"
line.send([os.getppid(), os.environ["WHEN"], is_original])
'''
os.environ["WHEN"] = "before"
path = list(sys.path)
server_of_children.load_for_children()
server = server_of_children.fork_server()
os.environ["WHEN"] = "later"
import torch
torch.cuda.is_available = lambda: True

ours, theirs = processes.context().Pipe()
with processes.children(exec, [(LOOK, {"line": theirs})]):
    parent, *rest = ours.recv()
print([parent == server, *rest])
assert path == sys.path
"""


def test_a_forked_server_has_what_its_process_had_before_and_nothing_later():
    told = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=280, check=True
    ).stdout
    assert told == "[True, 'before', True]\n"
