"""Compare recorded times of real H200s with the same programs on the model's time.

    python benchmarks/timing.py [--micro] [--kernels] [--multi] [--others]

Without options, all programs run.

The script prints every figure next to its recording, in milliseconds, with their ratio, and then
the conclusions that a reader would draw. The profile was fitted to micro.json (timing/fit.py), and
the rules for what single operators do beyond moving their bytes are from kernels.json. The model is
therefore judged by multi.json, and by the work in others.json that keeps the GPU busy. Their median
error must be at most 25%, and no figure may be off by more than a factor of 2. Work in others.json
that is bound by launches is only printed, because another host launched it. The exit status is 1 if
a bound is missed or a conclusion differs.

micro.py ran on one H200 and multi.py on four of one host, with torch 2.11 and CUDA 13.0, on
2026-11-20. kernels.py and others.py ran on one H200 each, on 2026-11-22. The ranks of multi.py
(DistributedDataParallel) are refused by name on virtual GPUs, and are left out. micro.py measured
each figure of pin_memory once. Those of 64 KiB and 1 MiB do not grow with the size, so something
else was measured, too. The first run of others.py was before there were rules for single operators,
and showed that they were needed. None of its figures was used for them.

small_kernels.py ran on one H200 on 2026-11-27. Its times are those of the kernels alone. The model
adds a microsecond to each kernel, because a GPU pauses that long between two of them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent / "timing"
PROGRAMS = {"micro": 1, "kernels": 1, "multi": 4, "others": 1}  # GPUs
FACTOR = 2.0
# The largest median error of figures that nothing was fitted to.
LIMITS = {"multi": 0.25, "others": 0.25}
OTHER_HOST = "host, "  # figures of others.json that depend on another host
Figures = dict[str, float]  # milliseconds by name


def run(program: str) -> dict:
    """Run a program of benchmarks/timing on virtual H200s, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        options = [
            "--gpus",
            str(PROGRAMS[program]),
            "--like",
            "H200",
            "--virtual-time",
            "--no-values",
        ]
        command = [
            sys.executable,
            "-m",
            "virtualgpu",
            "run",
            *options,
            str(HERE / f"{program}.py"),
            str(output),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{program}.py failed:\n{done.stderr}")
        return json.loads(output.read_text(encoding="utf-8"))


def figures(report: dict) -> Figures:
    """Return the times of a report by name."""
    return dict(_times(report))


def _times(report: dict, inside: str = "") -> Iterator[tuple[str, float]]:
    for name, value in report.items():
        whole = f"{inside}{name}"
        if (
            whole.startswith(
                ("props", "mem_get_info", "devices", "peer", "topo", "ddp", "machine", "host_add")
            )
            or name == "tflops"
        ):
            continue
        if isinstance(value, dict):
            yield from _times(value, f"{whole}, ")
        else:
            milliseconds = 1.0
            if name.startswith("pin_memory_s"):
                milliseconds = 1e3
            elif "_us" in name:
                milliseconds = 1e-3
            yield whole, value * milliseconds


def compare(program: str, model: Figures, recorded: Figures) -> bool:
    """Print a program's figures on the model and as recorded.

    Returns whether they are within the bounds.
    """
    print(
        f"\n{program}.py on {PROGRAMS[program]} × "
        f"H200{'':38}{'model':>12}{'recorded':>12}{'ratio':>8}"
    )
    ratios = {name: model[name] / value for name, value in recorded.items()}
    for name, ratio in ratios.items():
        far = "" if 1 / FACTOR <= ratio <= FACTOR else f"  over a factor of {FACTOR:.0f}"
        print(f"{name:60}{model[name]:>9.4f} ms{recorded[name]:>9.4f} ms{ratio:>8.2f}{far}")
    ratios = {name: ratio for name, ratio in ratios.items() if not name.startswith(OTHER_HOST)}
    error = median(abs(ratio - 1) for ratio in ratios.values())
    far = sum(not 1 / FACTOR <= ratio <= FACTOR for ratio in ratios.values())
    print(
        f"{program}: {len(ratios)} figures, median error {100 * error:.0f}%, {far} over a factor "
        f"of {FACTOR:.0f}"
    )
    return program not in LIMITS or (error <= LIMITS[program] and not far)


def conclusions(program: str, of: Figures) -> Iterator[tuple[str, bool]]:
    """Yield (conclusion, whether the figures `of` support it) for a program."""
    if program == "micro":
        for size in (1 << 16, 1 << 20, 1 << 24, 1 << 27, 1 << 29):
            for kind in ("h2d", "d2h"):
                row = f"copy_ms {size}, {kind}"
                yield (
                    f"pinned beats pageable memory: {kind}, {size} bytes",
                    of[f"{row}_pinned"] < of[f"{row}_pageable"],
                )
        yield (
            "a copy beside a product beats one after the other",
            of["overlap, overlap"] < 0.95 * of["overlap, serial"],
        )
        yield (
            "two streams of tiny kernels are no faster",
            of["small kernels, two streams"] > 0.95 * of["small kernels, two serial"],
        )
        return
    if program != "multi":
        return
    for width, batch, better in ((1024, 512, False), (4096, 8192, True)):
        step = f"dp w={width} batch={batch}, dp_step_ms"
        for gpus in (2, 4):
            said = (
                f"DataParallel on {gpus} GPUs is {'faster' if better else 'slower'}: width "
                f"{width}, batch {batch}"
            )
            yield said, (of[f"{step} {gpus}"] < of[f"{step} 1"]) == better
    splits = {n: of[f"mp pipeline {n}"] for n in (1, 2, 4, 8, 16, 32, 64)}
    yield (
        "the pipeline's best number of splits is 4, 8 or 16",
        min(splits, key=splits.__getitem__) in (4, 8, 16),
    )
    yield (
        "two devices without a pipeline are no faster than one",
        of["mp naive 2 devices"] > 0.98 * of["mp one device fwd+bwd"],
    )


def judge(program: str) -> bool:
    """Run one program and print everything about it.

    Return whether the model is within the bounds and supports the recording's conclusions.
    """
    recorded = figures(json.loads((HERE / f"{program}.json").read_text(encoding="utf-8")))
    model = figures(run(program))
    kept = compare(program, model, recorded)
    rows = list(zip(conclusions(program, model), conclusions(program, recorded), strict=True))
    for (said, on_model), (_, on_gpu) in rows:
        print(
            f"{said:72} model: {'yes' if on_model else 'NO':4} "
            f"recorded: {'yes' if on_gpu else 'no'}"
        )
    return kept and all(on_model for (_, on_model), _ in rows)


def main() -> int:
    chosen = [program for program in PROGRAMS if f"--{program}" in sys.argv[1:]] or list(PROGRAMS)
    return 0 if all([judge(program) for program in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
