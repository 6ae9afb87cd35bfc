"""Compare operators with a recording quickly: a forked process a case instead of a fresh one, and the differences in full.

usage: quick.py RECORDING.json [NAME ...] [--summary]      NAME may be a beginning, such as "conv"
"""

import json
import sys
from pathlib import Path

import operators
import torch  # noqa: F401 (before the fork)
from compare_operators import parts
from forked import forked

import virtualgpu


def answer(line: str) -> dict:
    with virtualgpu.use(gpus=1, like="H200"):
        return operators.one(line)


def main() -> None:
    summary = "--summary" in sys.argv
    recording, *names = [x for x in sys.argv[1:] if not x.startswith("--")]
    cases = [c for c in json.loads(Path(recording).read_text())["cases"] if "error" not in c]
    if names:
        cases = [c for c in cases if any(c["name"].startswith(n) for n in names)]
    same = peaks = total = 0
    for case, got in zip(cases, forked(answer, [case["line"] for case in cases], at_once=2), strict=True):
        mine = {} if "error" in got else {name: (events, peak) for name, events, peak in parts(got)}
        bad = []
        for name, events, peak in parts(case):
            total += 1
            have, mine_peak = mine.get(name, (None, None))
            same += have == events
            peaks += mine_peak == peak
            if have != events or mine_peak != peak:
                bad.append((name, events, have, peak, mine_peak))
        if bad and summary:
            print(case["name"], "|", ", ".join(b[0] + (" (peak too)" if b[3] != b[4] else "") for b in bad), got.get("error", "")[:100])
        elif bad:
            print(f"\n{case['line']}  {got.get('error', '')[:200]}")
            for name, events, have, peak, mine_peak in bad:
                print(f"  {name}: peak {peak} mine {mine_peak}")
                print("    real", " ".join(f"{s}{n}" for s, n in events))
                print("    mine", " ".join(f"{s}{n}" for s, n in have or []))
    print(
        f"{len(cases)} operators, {total} parts: same sequence {same} = {100 * same / total:.1f}%, same peak {peaks} = {100 * peaks / total:.1f}%"
    )


if __name__ == "__main__":
    main()
