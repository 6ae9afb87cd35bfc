"""Snapshots of memory name the lines that allocated it."""

import sys

import torch

from virtualgpu import script


def test_the_stack_of_a_script_begins_at_its_first_line(machine, tmp_path, monkeypatch):
    file = tmp_path / "script.py"
    file.write_text(
        "import torch\ndef make():\n    return torch.ones(1000, device='cuda')\nx = make()\n"
    )
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    torch.cuda.memory._record_memory_history()
    script.run_script(str(file), [])
    block = next(
        b
        for s in torch.cuda.memory_snapshot()
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    )
    assert [(frame["name"], frame["line"]) for frame in block["frames"]] == [
        ("make", 3),
        ("<module>", 4),
    ]
