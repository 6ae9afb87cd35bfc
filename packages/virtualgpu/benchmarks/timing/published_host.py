"""What a call of cuDNN takes of the host, beside an operator that launches one kernel: from traces that PyTorch published.

    python benchmarks/timing/published_host.py KINETO          a clone of https://github.com/pytorch/kineto, bare or not, with its history

The four sample traces of ResNet-50's training that the repository held until April 2026 (torch.profiler, a Tesla V100, June 2021) say when
each operator began and ended on the host. An operator's own time is that without the operators inside it, such as
those that ask for memory.
Printed are the mean times of cuDNN's five operators as multiples of that of `add_`, by which host.toml's launch_seconds was measured.
"""

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from statistics import mean

from virtualgpu import profiles

COMMIT = "041e7ce99f1562dd81232ee58b7c454ef16bfae2"  # the last one with the traces
SAMPLES = "tb_plugin/samples/resnet50_num_workers_{}.pt.trace.json.gz"
TRACES = ["0/worker0.1623143089861", "0/worker0.1623143566756", "4/worker0.1623212756351", "4/worker0.1623213129365"]
LAUNCH = "aten::add_"
CUDNN = [f"aten::cudnn_{name}" for name in ("convolution", "convolution_backward_input", "convolution_backward_weight")]
CUDNN += ["aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward"]
Event = dict


def own_times(events: list[Event]) -> dict[str, list[float]]:
    """The own time of each call, in microseconds, by operator."""
    operators = [e for e in events if e.get("cat") == "Operator" and e["ph"] == "X"]
    found: dict[str, list[float]] = defaultdict(list)
    inside: list[tuple[float, Event]] = []  # the operators that have begun, outermost first: until when each runs
    for event in sorted(operators, key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"])):
        while inside and not (_thread(inside[-1][1]) == _thread(event) and event["ts"] < inside[-1][0]):
            _leave(inside, found)
        event["own"] = event["dur"]
        if inside:
            inside[-1][1]["own"] -= event["dur"]
        inside.append((event["ts"] + event["dur"], event))
    while inside:
        _leave(inside, found)
    return found


def _thread(event: Event) -> tuple:
    return event["pid"], event["tid"]


def _leave(inside: list[tuple[float, Event]], found: dict[str, list[float]]) -> None:
    _, event = inside.pop()
    found[event["name"]].append(event["own"])


def main(repository: str) -> None:
    ratios = []
    for trace in TRACES:
        command = ["git", "-C", repository, "show", f"{COMMIT}:{SAMPLES.format(trace)}"]
        packed = subprocess.run(command, capture_output=True, check=True).stdout
        times = own_times(json.loads(gzip.decompress(packed))["traceEvents"])
        launch, each = mean(times[LAUNCH]), {name: mean(times[name]) for name in CUDNN}
        ratios.append(mean(each.values()) / launch)
        calls = ", ".join(f"{name.removeprefix('aten::cudnn_')} {value:.0f}" for name, value in each.items())
        print(f"{trace}: {LAUNCH} {launch:.1f} us; {calls}; {ratios[-1]:.2f} times")
    seconds = mean(ratios) * profiles.load("H200").launch_seconds
    print(f"a call of cuDNN takes {mean(ratios):.2f} times as long as {LAUNCH}: cudnn_seconds = {seconds:.3g}")


if __name__ == "__main__":
    main(sys.argv[1])
