"""Record allocator_random.json on a real GPU: PyTorch's statistics after each random step.

usage: python record_allocator.py OUT.json

Each program is a seeded list of steps. The recording keeps the steps, so that the tests replay them
without PyTorch: ["malloc", name, bytes, stream], ["free", name], ["record_stream", name, stream],
["busy", stream] (work that lasts until the next "synchronize"), ["synchronize"], ["empty_cache"],
["limit", bytes].
"""

import json
import os
import random
import subprocess
import sys
from datetime import date

MiB = 1 << 20
SIZES = {
    "small": [1, 511, 512, 513, 1000, 4096, 100_000, 300_000, MiB - 512, MiB],
    "large": [
        MiB + 1,
        2 * MiB,
        3 * MiB + 7,
        5 * MiB,
        9 * MiB + MiB // 2,
        10 * MiB - 1,
        10 * MiB,
        10 * MiB + 1,
        19 * MiB,
    ],
    "huge": [21 * MiB, 33 * MiB - 3, 49 * MiB, 64 * MiB, 100 * MiB],
}
PROGRAMS = {  # name: (settings, seed, streams, limit in MiB or None)
    "default": ("", 1, 1, None),
    "streams": ("", 2, 3, None),
    "limit": ("", 3, 1, 300),
    "limit_streams": ("", 4, 2, 300),
    "expandable": ("expandable_segments:True", 5, 1, None),
    "expandable_streams": ("expandable_segments:True", 6, 2, None),
    "expandable_limit": ("expandable_segments:True", 7, 1, 200),
    "max_split": ("max_split_size_mb:25", 8, 1, None),
    "max_split_limit": ("max_split_size_mb:25", 9, 1, 400),
    "roundup": ("roundup_power2_divisions:4", 10, 1, None),
    "roundup_list": ("roundup_power2_divisions:[1:8,4:4,16:2,>:1]", 11, 1, None),
    "roundup_gaps": ("roundup_power2_divisions:[2:8,16:4,>:2]", 12, 1, None),
    "large_segment": ("large_segment_size_mb:40", 13, 1, None),
    "non_split_rounding": ("max_split_size_mb:21,max_non_split_rounding_mb:40", 14, 1, None),
}
KEYS = (
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "active_bytes.all.current",
    "requested_bytes.all.current",
    "inactive_split_bytes.all.current",
    "active.all.current",
    "segment.all.current",
    "num_alloc_retries",
    "num_ooms",
)


def program(seed, streams, limit, length=160):
    choose = random.Random(seed)
    steps = [] if limit is None else [["limit", limit * MiB]]
    live, busy = [], False
    while len(steps) < length:
        kind = choose.random()
        if kind < 0.52 or not live:
            size = choose.choice(SIZES[choose.choices(["small", "large", "huge"], [5, 5, 2])[0]])
            name = f"t{len(steps)}"
            steps.append(["malloc", name, size, choose.randrange(streams)])
            live.append(name)
        elif kind < 0.94:
            steps.append(["free", live.pop(choose.randrange(len(live)))])
        elif kind < 0.96:
            steps.append(["empty_cache"])
        elif streams > 1 and not busy:
            stream = choose.randrange(streams)
            steps.append(["busy", stream])
            steps += [["record_stream", choose.choice(live), stream] for _ in range(3)]
            busy = True
        elif busy:
            steps.append(["synchronize"])
            busy = False
    return steps


def run(steps):
    import torch

    streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(2)]
    tensors, rows = {}, []
    torch.cuda.memory._record_memory_history(context=None)
    for action, *details in steps:
        failed = ""
        if action == "malloc":
            name, size, stream = details
            with torch.cuda.stream(streams[stream]):
                try:
                    tensors[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError as error:
                    failed = str(error)
        elif action == "free":
            tensors.pop(details[0], None)
        elif action == "record_stream" and details[0] in tensors:
            tensors[details[0]].record_stream(streams[details[1]])
        elif action == "busy":
            with torch.cuda.stream(streams[details[0]]):
                torch.cuda._sleep(3_000_000_000)
        elif action == "synchronize":
            torch.cuda.synchronize()
        elif action == "empty_cache":
            torch.cuda.empty_cache()
        elif action == "limit":
            torch.cuda.set_per_process_memory_fraction(
                details[0] / torch.cuda.get_device_properties(0).total_memory
            )
        stats = torch.cuda.memory_stats()
        rows.append([stats[key] for key in KEYS] + [failed])
    last = torch.cuda.memory_stats_as_nested_dict()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    # only distances are kept
    first = min(e["addr"] for e in trace if e["action"].startswith("segment"))
    events = [
        [e["action"], e.get("addr", first) - first, e["size"]]
        for e in trace
        if e["action"] != "snapshot"
    ]
    return {
        "rows": rows,
        "stats": {key: value for key, value in last.items() if not isinstance(key, tuple)},
        "events": events,
    }


def main():
    if sys.argv[1] == "--one":
        _, seed, streams, limit = PROGRAMS[sys.argv[2]]
        print("RESULT " + json.dumps(run(program(seed, streams, limit))))
        return
    import torch

    properties = torch.cuda.get_device_properties(0)
    recorded = {}
    for name, (settings, seed, streams, limit) in PROGRAMS.items():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings} if settings else None
        done = subprocess.run(
            [sys.executable, __file__, "--one", name],
            capture_output=True,
            text=True,
            env=environment,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(name, "failed:", done.stderr[-800:])
            continue
        recorded[name] = {
            "settings": settings,
            "steps": program(seed, streams, limit),
            **json.loads(lines[0][7:]),
        }
        print(name, len(recorded[name]["rows"]), "steps,", recorded[name]["rows"][-1])
    whole = {
        "gpu": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "total_memory": properties.total_memory,
        "made": f"{date.today()} by record_allocator.py on one GPU",
        "keys": KEYS,
    }
    with open(sys.argv[1], "w") as file:
        json.dump({**whole, "programs": recorded}, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
