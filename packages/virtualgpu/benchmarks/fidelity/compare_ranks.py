"""Figures of ranks_further.py on two virtual GPUs beside those of real ones.

    python benchmarks/fidelity/compare_ranks.py [--all] VIRTUAL.json…

For each program, of allocated, reserved and peak memory at each point of each rank: how many figures on which all real runs agree are
equal to the byte; how many of those that vary lie within what was seen; and the step. With --all, each figure that differs.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path

RECORDED = Path(__file__).parent / "h100" / "ranks_further.json.gz"
MEMORY = ("allocated", "reserved", "peak")


def main(files: list[str], every: bool) -> None:
    real = defaultdict(list)
    for run in json.loads(gzip.decompress(RECORDED.read_bytes())).values():
        for name, result in run["results"].items():
            real[name].append(result)
    virtual = {name: result for file in files for name, result in json.loads(Path(file).read_text())["results"].items()}
    totals = defaultdict(lambda: [0, 0, 0, 0])
    for name, mine in virtual.items():
        if isinstance(mine, str):
            print(f"{name:28} did not run: {mine[:100]}")
            continue
        counts, different = compare(real[name], mine)
        seconds = sorted(run["seconds"] for run in real[name])
        within = "" if 0.8 * seconds[0] <= mine["seconds"] <= 1.2 * seconds[-1] else "   not within 0.8 and 1.2"
        step = f"step {mine['seconds'] * 1e3:.1f} ms, real {seconds[0] * 1e3:.1f} to {seconds[-1] * 1e3:.1f} ms{within}"
        print(f"{name:28} {told(counts)}   {step}")
        for line in different if every else []:
            print(f"    {line}")
        kind = name.split()[0]
        totals[kind] = [a + b for a, b in zip(totals[kind], counts, strict=True)]
    for kind, counts in totals.items():
        print(f"{kind:28} {told(counts)}")


def told(counts: list[int]) -> str:
    return "equal {:4} of {:4}, within what varies {:3} of {:3}".format(*counts)


def compare(runs: list[dict], mine: dict) -> tuple[list[int], list[str]]:
    """How many figures are equal, of how many; how many lie within, of how many; and what differs, in words."""
    counts, different = [0, 0, 0, 0], []
    for rank, points in enumerate(runs[0]["points"]):
        for point in points:
            for index, kind in enumerate(MEMORY):
                seen = sorted({run["points"][rank][point][index] for run in runs})
                found = mine["points"][rank][point][index]
                first = 0 if len(seen) == 1 else 2
                right = seen[0] <= found <= seen[-1]
                counts[first] += right
                counts[first + 1] += 1
                if not right:
                    different.append(f"rank {rank}, {point}, {kind}: {found}, real {seen}, {(found - seen[0]) / 2**20:+.3f} MiB")
    return counts, different


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main([argument for argument in arguments if argument != "--all"], "--all" in arguments)
