"""Compare the memory of recorded programs and operators on H200s with virtual GPUs, to the byte.

    python benchmarks/fidelity.py [--programs] [--operators] [--databases]

Without options, programs and operators are compared.

For programs, these are the values of memory_allocated, memory_reserved and max_memory_allocated at
each checkpoint of each device. For operators, they are the sequences of allocations and frees of
the first and of the second call, forward and backward. The programs, the operators and the
recordings, with versions, are in benchmarks/fidelity/. The first rules were derived from "shared".
The others, "more" and then "further", were recorded later with other programs and operators. Each
row of the output names what differs.

There are two known causes of differences. If a backward pass runs on several GPUs (pipeline,
split_conv), each GPU has its own thread on a real machine, and gradients arrive before they are
needed, so the recorded peaks differ between runs. The workspaces of cuDNN for convolutions that
were not measured (unet), and for packed sequences with dropout (lstm_classifier), are estimates.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "fidelity"
PROGRAMS = (
    ("h200/shared.json", "workloads_shared", 1),
    ("h200/multi_shared.json", "workloads_multi_shared", 4),
    ("h200/more.json", "workloads_more", 1),
    ("h200/multi_more.json", "workloads_multi_more", 4),
    ("h200/further.json", "workloads_further", 1),
    ("h200/multi_further.json", "workloads_multi_further", 4),
)
OPERATORS = (
    "h200/operators_shared.json",
    "h200/operators_more.json",
    "h200/operators_further.json",
)


def programs() -> list[str]:
    """Run every program on virtual H200s and print a row for each.

    Return a summary for each recording.
    """
    from compare import compare, told

    summaries = []
    for recording, module, gpus in PROGRAMS:
        print(f"\n{recording}: {gpus} × NVIDIA H200")
        runner = [
            sys.executable,
            "-m",
            "virtualgpu",
            "run",
            "--gpus",
            str(gpus),
            "--like",
            "H200",
            "harness.py",
            "--one",
        ]
        truth = json.loads(Path(recording).read_text())
        totals, finished = compare(truth, module, runner)
        summaries.append(
            f"{Path(recording).stem}: {finished}/{len(truth['workloads'])} programs to their end, "
            f"{told(totals)}"
        )
    return summaries


def operators() -> list[str]:
    """Run every operator on a virtual H200 and print those that differ.

    Return a summary for each recording.
    """
    summaries = []
    for recording in OPERATORS:
        print(f"\n{recording}: 1 × NVIDIA H200")
        done = subprocess.run(
            [sys.executable, "quick.py", recording, "--summary"],
            capture_output=True,
            text=True,
            check=True,
        )
        *rows, last = done.stdout.splitlines()
        print("\n".join(rows))
        summaries.append(f"{Path(recording).stem}: {last}")
    return summaries


def databases() -> list[str]:
    """Run PyTorch's databases of operators and modules, and print the operators that differ.

    This needs the package expecttest.
    """
    recording = "h200/databases.json.gz"
    print(f"\n{recording}: 1 × NVIDIA H200")
    with tempfile.TemporaryDirectory() as folder:
        mine = str(Path(folder, "mine.json"))
        runner = [sys.executable, "-m", "virtualgpu", "run", "--gpus", "1", "--like", "H200"]
        subprocess.run([*runner, "databases.py", mine], check=True, stderr=subprocess.DEVNULL)
        done = subprocess.run(
            [sys.executable, "databases.py", "--compare", recording, mine],
            capture_output=True,
            text=True,
            check=True,
        )
    *rows, last = done.stdout.splitlines()
    print("\n".join(rows))
    return [f"databases: {last}"]


def main() -> None:
    chosen = set(sys.argv[1:])
    if chosen - {"--programs", "--operators", "--databases"}:
        sys.exit(__doc__)
    os.chdir(HERE)  # the programs are imported from the folder of their recordings
    sys.path.insert(0, str(HERE))
    summaries = []
    if not chosen or "--programs" in chosen:
        summaries += programs()
    if not chosen or "--operators" in chosen:
        summaries += operators()
    if "--databases" in chosen:
        summaries += databases()
    print("\nEqual to the byte:")
    print("\n".join(summaries))


if __name__ == "__main__":
    main()
