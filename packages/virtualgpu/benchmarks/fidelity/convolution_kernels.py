"""Record which kernels cuDNN runs for convolutions drawn at random, beside their workspaces.

usage: convolution_kernels.py OUT.json.gz SECONDS SEED

The convolutions are drawn as in convolution_sweep.py, about half of them as published networks have
them. Each row holds the convolution, the bytes of the three workspaces, and for each of the three
results the kernels in the order of their launches: the index of the name, the grid, the threads of a
block, and the microseconds. A memset has its bytes in place of the grid.
"""

import gzip
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time

from convolution_sweep import draw, typical

WORKERS = 14
BLOCK = 120  # convolutions in one session of the profiler
MOST_ROWS = 7000  # of a worker, so that the output stays below 10 MB
PARTS = ("forward", "input", "weight")


def requested(torch, work):
    """Return the bytes that were requested for a moment only, and the result of the work."""
    torch.cuda.reset_peak_memory_stats()
    name = "requested_bytes.all."
    before = torch.cuda.memory_stats()[name + "current"]
    result = work()
    after = torch.cuda.memory_stats()
    return after[name + "peak"] - max(after[name + "current"], before), result


def measure(torch, convolution, mark):
    """Run a convolution and its two gradients, and return the bytes of their workspaces."""
    dtype, last, transposed, first, out, kernel, stride, padding, dilation, added, groups, batch, extent = convolution
    layout = torch.channels_last if last else torch.contiguous_format
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    shape = (first, out // groups) if transposed else (out, first // groups)
    x = torch.zeros(batch, first, *extent, **options).to(memory_format=layout)
    weight = torch.zeros(*shape, *kernel, **options).to(memory_format=layout)
    settings = (stride, padding, dilation, bool(transposed), added, groups)
    aten = torch.ops.aten
    with mark("forward"):
        output, result = requested(torch, lambda: aten.convolution(x, weight, None, *settings))
    gradient = torch.zeros_like(result)
    del result
    found = [output]
    for part, mask in (("input", [True, False, False]), ("weight", [False, True, False])):
        with mark(part):
            work = lambda: aten.convolution_backward(gradient, x, weight, [0], *settings, mask)  # noqa: E731, B023
            space, result = requested(torch, work)
        found.append(space)
        del result
    return found


def launches(trace, names):
    """Return the kernels of each mark from a profiler's trace."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("mark ")
    )
    launched = {}
    for event in events:
        if str(event.get("cat", "")).startswith("cuda_"):
            launched[event["args"].get("correlation")] = float(event["ts"])
    found = {}
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    for event in sorted(on_gpu, key=lambda event: float(event["ts"])):
        moment = launched.get(event["args"].get("correlation"))
        if moment is None:
            continue
        mark = next((name for start, end, name in marks if start <= moment <= end), None)
        if mark is None:
            continue
        index = names.setdefault(event["name"], len(names))
        arguments = event["args"]
        if "grid" in arguments:
            entry = [index, arguments["grid"], arguments["block"]]
        else:
            entry = [index, arguments.get("bytes")]
        found.setdefault(mark, []).append([*entry, round(float(event["dur"]), 1)])
    return found


def worker(job):
    number, seconds, seed = job
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    source = random.Random(f"{seed} {number}")
    warm = torch.zeros(4, 4, device="cuda")
    warm @ warm
    end = time.monotonic() + seconds
    rows, names, failures = [], {}, []
    path = os.path.join(tempfile.gettempdir(), f"convolution_kernels_{os.getpid()}.json")
    while time.monotonic() < end and len(rows) < MOST_ROWS:
        drawn = [(typical if source.random() < 0.55 else draw)(source) for _ in range(BLOCK)]
        drawn = [convolution for convolution in drawn if convolution]
        measured = {}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for index, convolution in enumerate(drawn):
                mark = lambda part: record_function(f"mark {index} {part}")  # noqa: E731, B023
                try:
                    measured[index] = measure(torch, convolution, mark)
                except RuntimeError as error:
                    if len(failures) < 20:
                        failures.append(f"{convolution}: {error}"[:300])
                    torch.cuda.empty_cache()
                if time.monotonic() > end:
                    break
            torch.cuda.synchronize()
        kernels = {}
        try:
            profiler.export_chrome_trace(path)
            with open(path) as file:
                kernels = launches(json.load(file), names)
        except Exception as error:
            failures.append(f"trace: {error!r}"[:300])
        for index, found in measured.items():
            by_part = [kernels.get(f"mark {index} {part}", []) for part in PARTS]
            rows.append([drawn[index], found, by_part])
        if torch.cuda.memory_reserved() > 4 << 30:
            torch.cuda.empty_cache()
    if os.path.exists(path):
        os.unlink(path)
    return {"rows": rows, "names": list(names), "failures": failures}


def main():
    out, seconds, seed = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    started = time.monotonic()
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(WORKERS) as pool:
        answers = pool.map(worker, [(i, seconds, seed) for i in range(WORKERS)], chunksize=1)
    import torch

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    result = {**versions, "device": torch.cuda.get_device_name(0), "seed": seed, "answers": answers}
    with gzip.open(out, "wt", compresslevel=9) as file:
        json.dump(result, file, separators=(",", ":"))
    rows = [row for answer in answers for row in answer["rows"]]
    with_kernels = sum(any(row[2]) for row in rows)
    print(len(rows), "rows,", with_kernels, "with kernels,", os.path.getsize(out), "bytes,", round(time.monotonic() - started), "seconds")
    for answer in answers[:3]:
        print(answer["failures"][:3])


if __name__ == "__main__":
    main()
