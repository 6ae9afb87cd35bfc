"""Compare operator by operator what a runner asks of the allocator with what the real device was asked.

usage: compare_operators.py TRUTH.json [--need SAME,PEAK] -- RUNNER ARGS...
RUNNER is called with one case's line appended and prints 'RESULT {json}', as operators.py --one does; for example
    compare_operators.py ../h200/operators_shared.json -- python -m labkit run --gpus 1 --like H200 operators.py --one
Each case has up to four parts (cold and warm, forward and backward). SAME: the sequences of allocations and frees that are equal,
sizes as requested, segments left out; PEAK: the parts whose peak is equal to the byte. Both in percent.
"""

import concurrent.futures as cf
import json
import subprocess
import sys


def parts(case):
    for turn in ("cold", "warm"):
        for way in ("forward", "backward"):
            if way in case.get(turn, {}):
                peak = case[turn]["peak" if way == "forward" else "backward_peak"]
                yield f"{turn} {way}", [e for e in case[turn][way] if e[0] in "+-"], peak


def main():
    split = sys.argv.index("--")
    args, runner = sys.argv[1:split], sys.argv[split + 1 :]
    need = [float(x) for x in args[args.index("--need") + 1].split(",")] if "--need" in args else [0, 0]
    truth = json.load(open(args[0]))["cases"]

    def run(case):
        p = subprocess.run(runner + [case["line"]], capture_output=True, text=True, timeout=300)
        lines = [x for x in p.stdout.splitlines() if x.startswith("RESULT ")]
        return json.loads(lines[0][7:]) if lines else {"error": (p.stderr or p.stdout)[-200:]}

    same = peaks = total = 0
    with cf.ThreadPoolExecutor(2) as pool:
        for case, got in zip(truth, pool.map(run, truth)):
            mine = {name: (events, peak) for name, events, peak in parts(got)} if "error" not in got else {}
            row = []
            for name, events, peak in parts(case):
                total += 1
                e, p = mine.get(name, (None, None))
                same += e == events
                peaks += p == peak
                if e != events:
                    row.append(name)
            if row:
                print(
                    f"{case['name']:26s} differs: {', '.join(row)} {got.get('error', '').strip().splitlines()[-1][:90] if got.get('error') else ''}"
                )
    print(
        f"{len(truth)} operators, {total} parts: same sequence {same} = {100 * same / total:.1f}%, same peak {peaks} = {100 * peaks / total:.1f}%"
    )
    return 1 if any(need) and (100 * same / total < need[0] or 100 * peaks / total < need[1]) else 0


if __name__ == "__main__":
    sys.exit(main())
