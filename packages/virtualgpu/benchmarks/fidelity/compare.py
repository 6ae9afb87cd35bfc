"""Compare what a runner's allocator reports with what the real device reported, checkpoint by checkpoint.

usage: compare.py TRUTH.json MODULE [--need ALLOCATED,RESERVED,PEAK] -- RUNNER ARGS...
RUNNER is called with MODULE NAME appended and prints 'RESULT {json}', as harness.py --one does; for example
    compare.py ../h200/shared.json workloads_shared -- python -m labkit run --gpus 1 --like H200 harness.py --one
--need gives the least percentages equal to the byte; below them, or if a program stops early, the exit status is 1.
"""

import json
import subprocess
import sys

KEYS = ("allocated", "reserved", "peak_allocated")


def compare(truth, module, runner):
    totals = {k: [0, 0, []] for k in KEYS}
    finished = 0
    for name, expected in truth["workloads"].items():
        run = subprocess.run(runner + [module, name], capture_output=True, text=True, timeout=600)
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        got = json.loads(lines[0][7:]) if lines else {"points": [], "error": (run.stderr or run.stdout)[-300:] or "nothing printed"}
        points = got["points"]
        row = {}
        for key in KEYS:
            equal = count = 0
            for n, point in enumerate(expected["points"]):
                mine = points[n] if n < len(points) and points[n]["label"] == point["label"] else None
                for i, device in enumerate(point["devices"]):
                    count += 1
                    value = mine["devices"][i].get(key) if mine and i < len(mine["devices"]) else None
                    equal += value == device[key]
                    if value is not None:
                        totals[key][2].append(abs(value - device[key]) / max(device[key], 1 << 20))
            totals[key][0] += equal
            totals[key][1] += count
            row[key] = f"{equal}/{count}"
        finished += not got["error"] and len(got["points"]) == len(expected["points"])
        error = "ERROR " + got["error"].strip().splitlines()[-1][:110] if got["error"] else ""
        print(f"{name:26s} allocated {row['allocated']:>8s} reserved {row['reserved']:>8s} peak {row['peak_allocated']:>8s} {error}")
    return totals, finished


def told(totals):
    """How many figures of each kind are equal to the byte, and by how much those are off that a program got to."""
    parts = []
    for key, (equal, count, errors) in totals.items():
        percent = [100 * error for error in sorted(errors)] or [float("nan")]
        middle, most = percent[len(percent) // 2], percent[(len(percent) - 1) * 95 // 100]
        parts.append(f"{key} {equal}/{count} = {100 * equal / count:.1f}% (off by {middle:.2f}% at the median, {most:.2f}% at the 95th percentile)")
    return ", ".join(parts)


def main():
    split = sys.argv.index("--")
    args, runner = sys.argv[1:split], sys.argv[split + 1 :]
    need = [float(x) for x in args[args.index("--need") + 1].split(",")] if "--need" in args else [0, 0, 0]
    truth = json.load(open(args[0]))
    totals, finished = compare(truth, args[1], runner)
    shares = {k: 100 * a / n for k, (a, n, _) in totals.items()}
    print(f"ran to the end {finished}/{len(truth['workloads'])}; equal to the byte: {told(totals)}")
    short = finished < len(truth["workloads"]) or any(shares[k] < least for k, least in zip(KEYS, need))
    return 1 if short and any(need) else 0


if __name__ == "__main__":
    sys.exit(main())
