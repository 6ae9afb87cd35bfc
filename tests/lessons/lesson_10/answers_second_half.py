"""Wrong answers to exercise 10.4, and a part of what the check says to each; and right ones unlike the solution."""

TRAIN = """
def train(model, optimizer, work, steps, path):
    import os
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        {load}
    for step in range(first, steps):
        {step}
"""
LOAD = "model.load_state_dict(state['model']); optimizer.load_state_dict(state['optimizer']); first = state['step'] + 1"
STATE = "{'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}"
SAVE_WHOLE = f"{{condition}} or (torch.save({STATE.replace('{', '{{').replace('}', '}}')}, path + '.part'), os.replace(path + '.part', path))"
WHOLE_SAVE = f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank()')}"

WRONG = {
    "10.4": {
        "from the start": (
            TRAIN.format(
                load="model.load_state_dict(state['model'])",
                step="work(step); dist.get_rank() or torch.save({'model': model.state_dict()}, path)",
            ),
            r"started again, rank 0 did \[0, 1",
        ),
        "the last step twice": (
            TRAIN.format(
                load=LOAD.replace(" + 1", ""),
                step=f"work(step); dist.get_rank() or torch.save({STATE}, path)",
            ),
            "steps were done when the ranks died",
        ),
        "saved before the step": (
            TRAIN.format(
                load=LOAD, step=f"dist.get_rank() or torch.save({STATE}, path); work(step)"
            ),
            "steps were done when the ranks died|your answer raised",  # rank 1 may find the file half written when it begins
        ),
        "every rank saves": (
            TRAIN.format(load=LOAD, step=f"work(step); torch.save({STATE}, path)"),
            "2 ranks saved the checkpoint|your answer raised",
        ),
        "saved straight to its place": (
            TRAIN.format(
                load=LOAD, step=f"work(step); dist.get_rank() or torch.save({STATE}, path)"
            ),
            "written in its place",
        ),
        "opened and written": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step)\n        with open(path if not dist.get_rank() else os.devnull, 'wb') as file: torch.save({STATE}, file)",
            ),
            "written in its place|your answer raised",
        ),
        "copied to its place": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); import shutil; dist.get_rank() or (torch.save({STATE}, path + '.part'), "
                "shutil.copy(path + '.part', path))",
            ),
            "written in its place",
        ),
        "written in the system's folder, and moved": (
            TRAIN.format(
                load=LOAD,
                step="work(step)\n        if dist.get_rank() == 0:\n            import shutil, tempfile\n"
                "            with tempfile.NamedTemporaryFile(delete=False) as file:\n"
                f"                torch.save({STATE}, file)\n            shutil.move(file.name, path)",
            ),
            "may be on another file system",
        ),
        "written in the system's folder, and renamed": (
            TRAIN.format(
                load=LOAD,
                step="work(step)\n        if dist.get_rank() == 0:\n            import tempfile\n"
                "            handle, name = tempfile.mkstemp()\n            os.close(handle)\n"
                f"            torch.save({STATE}, name)\n            os.replace(name, path)",
            ),
            "may be on another file system",
        ),
        "removed, then renamed": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); dist.get_rank() or (torch.save({STATE}, path + '.part'), "
                "os.path.exists(path) and os.remove(path), os.rename(path + '.part', path))",
            ),
            "the file was removed",
        ),
        "removed when all is done": (
            TRAIN.format(load=LOAD, step=WHOLE_SAVE + "\n    dist.get_rank() or os.remove(path)"),
            "the file was removed",
        ),
        "whole, but before the step": (
            TRAIN.format(
                load=LOAD, step=f"{SAVE_WHOLE.format(condition='dist.get_rank()')}; work(step)"
            ),
            r"steps were done.*Did you save before `work\(step\)`|You save before `work\(step\)`|your answer raised",
        ),
        "before each step, and resumed there": (
            TRAIN.format(
                load=LOAD.replace(" + 1", ""),
                step=f"{SAVE_WHOLE.format(condition='dist.get_rank()')}; work(step)",
            ),
            r"You save before `work\(step\)`: save when the step is done|your answer raised",
        ),
        "every other step": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); {SAVE_WHOLE.format(condition='step % 2 or dist.get_rank()')}",
            ),
            "Save after every step",
        ),
        "one file beside it for both": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); torch.save({STATE}, path + '.part'); dist.barrier(); "
                "dist.get_rank() or os.replace(path + '.part', path)",
            ),
            "2 ranks saved the checkpoint",
        ),
        "rank 0 alone goes on": (
            TRAIN.format(load=LOAD, step=WHOLE_SAVE).replace(
                "if os.path.exists(path)", "if dist.get_rank() == 0 and os.path.exists(path)"
            ),
            "started again, rank|waited for one another in vain",
        ),
        "saved at the end": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); step < steps - 1 or dist.get_rank() or torch.save({STATE}, path)",
            ),
            "Save after every step",
        ),
    },
}

RIGHT = {
    "10.4": {
        "rank 1 saves": TRAIN.format(
            load=LOAD, step=f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank() != 1')}"
        ),
        "the step that comes next": TRAIN.format(
            load=LOAD.replace(" + 1", ""),
            step=f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank()')}".replace(
                "'step': step", "'step': step + 1"
            ),
        ),
        "before the first, too": TRAIN.format(load=LOAD, step=WHOLE_SAVE).replace(
            "    for step",
            "    dist.barrier(); step = first - 1; "
            + SAVE_WHOLE.format(condition="dist.get_rank()")
            + "\n    for step",
        ),
        "pickled": TRAIN.format(
            load=LOAD,
            step="work(step)\n        if dist.get_rank() == 0:\n            import pickle, pathlib\n"
            f"            pathlib.Path(path + '.new').write_bytes(pickle.dumps({STATE}))\n"
            "            pathlib.Path(path + '.new').rename(path)",
        ).replace("torch.load(path)", "__import__('pickle').load(open(path, 'rb'))"),
        "a file of another name": TRAIN.format(
            load=LOAD,
            step="work(step)\n        if dist.get_rank() == 0:\n            import tempfile\n"
            "            with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:\n"
            f"                torch.save({STATE}, file)\n            os.replace(file.name, path)\n        dist.barrier()",
        ),
    },
}
