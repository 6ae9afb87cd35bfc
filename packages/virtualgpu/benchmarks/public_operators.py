"""Compare published times of single operators in float32 on real GPUs with the model.

    python benchmarks/public_operators.py NEUSIGHT

NEUSIGHT is a clone of https://github.com/sitar-lab/NeuSight, bare or not.

Each row of its scripts/asplos/data/dataset is an operator, its shape, a GPU, and a time in
milliseconds. The time is the mean of the five fastest of 25 calls, between two CUDA events, with
torch 2.1 (neusight/Dataset/collect.py). Here the same call runs twice on a virtual GPU without
values. The first call asks the driver for the result's memory, as the slowest of the 25 did, and
the second one is timed.

Every second row is for fitting a profile (--fit prints those). The table is about the other rows.
"Median" and "95th" are errors of the time, in percent of the published one. "Bias" is the median of
modelled over published time.
"""

import argparse
import csv
import io
import subprocess
from collections.abc import Callable, Iterator
from statistics import median, quantiles

import torch

import virtualgpu

FOLDER = "scripts/asplos/data/dataset"
FILES = [f"test/{family}.csv" for family in ("linear", "bmm", "softmax", "ln", "elem")]
FILES += [f"train/{family}.csv" for family in ("softmax", "ln", "elem")]
PROFILES = {
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
}
Row = dict[str, str]


def rows(repository: str) -> Iterator[Row]:
    """Yield the published rows of the GPUs that have a profile."""
    for name in FILES:
        command = ["git", "-C", repository, "show", f"HEAD:{FOLDER}/{name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} is not there, and is left out")
            continue
        yield from (
            row for row in csv.DictReader(io.StringIO(done.stdout)) if row["Device"] in PROFILES
        )


def call(row: Row) -> Callable[[], torch.Tensor]:
    """Return the operator's call on tensors of its shape, as in collect.py."""
    name = row["OPName"]
    if name in ("linear", "bmm"):
        b, m, n, k = (int(row[size]) for size in "BMNK")
        x = torch.empty(b, m, n, device="cuda")
        if name == "linear":
            layer = torch.nn.Linear(n, k, device="cuda")
            return lambda: layer(x)
        y = torch.empty(b, n, k, device="cuda")
        return lambda: torch.bmm(x, y)
    x = torch.empty(int(row["B"]), int(row["H"]), device="cuda")
    if name in ("add", "mul", "pow", "div"):
        y = torch.empty_like(x)
        return lambda: getattr(torch, name)(x, y)
    if name == "ln":
        norm = torch.nn.LayerNorm(x.shape[1], device="cuda")
        return lambda: norm(x)
    calls = {
        "softmax": lambda: x.softmax(1),
        "tanh": lambda: torch.tanh(x),
        "relu": lambda: torch.relu(x),
    }
    calls["gelu"] = lambda: torch.nn.functional.gelu(x)
    return calls[name] if name in calls else lambda: getattr(torch, name.removesuffix("u"))(x, 0.5)


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    """Return the time between two events, after all earlier work has ended."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("repository")
    parser.add_argument(
        "--fit", action="store_true", help="print the rows for fitting instead of those held back"
    )
    parser.add_argument("--rows", action="store_true", help="also print every row")
    options = parser.parse_args()
    chosen = [
        row
        for number, row in enumerate(rows(options.repository))
        if number % 2 == (not options.fit)
    ]
    print(f"{'GPU':22}{'operator':10}{'rows':>6}{'median':>9}{'95th':>9}{'worst':>9}{'bias':>7}")
    for device, like in PROFILES.items():
        ratios: dict[str, list[float]] = {}
        with virtualgpu.use(1, like=like, values=False), torch.no_grad():
            for row in (row for row in chosen if row["Device"] == device):
                timed = call(row)
                timed()
                ratio = milliseconds(timed) / float(row["Latency"])
                del timed
                torch.cuda.empty_cache()  # some operators fill most of the GPU
                ratios.setdefault(row["OPName"], []).append(ratio)
                if options.rows:
                    shape = "×".join(row[size] for size in "BMNKH" if row.get(size))
                    published = f"{row['OPName']:10}{shape:>24} {float(row['Latency']):>10.4f} ms"
                    print(f"{device:22}{published} {ratio:>6.2f} {row['Kernel Name'][:60]}")
        ratios["all"] = [ratio for each in ratios.values() for ratio in each]
        for name, each in ratios.items():
            errors = [100 * abs(ratio - 1) for ratio in each]
            columns = (
                f"{median(errors):>8.1f}%{quantiles(errors, n=20)[-1]:>8.1f}%{max(errors):>8.1f}%"
                f"{median(each):>7.2f}"
            )
            print(f"{device:22}{name:10}{len(each):>6}{columns}", flush=True)


if __name__ == "__main__":
    main()
