"""Fit the constants of the virtual H200 and of its host to measurements of a real one.

    python benchmarks/timing/fit.py

The script prints each constant with the figures that it came from. The profiles
(virtualgpu/profiles/h200.toml and host.toml) hold these values, and a test compares them.
Nothing here reads multi.json, because that recording judges the result (benchmarks/timing.py).

micro.json was recorded on one H200 with torch 2.11 on 2026-11-20 (micro.py). host_costs.json was
recorded on another one, a day later (benchmarks/fidelity/host_costs.py). The other host was faster.
`slower` is the factor, from an operator in both recordings that makes a tensor. host_functions.json
was recorded on seven machines in November 2026, with several runs each (host_functions.py). A
constant is a median over runs and functions. These machines needed about as long for an operator as
the first one, so their figures count unchanged.
"""

import json
from math import ceil, prod
from pathlib import Path
from statistics import linear_regression, mean, median

from virtualgpu import profiles
from virtualgpu.clock.costs import STAGING_BYTES, TILES

HERE = Path(__file__).parent
HOST_FUNCTIONS = HERE / "host_functions.json"
SMALL_KERNELS = HERE / "small_kernels.json"
VIEWS = ("view", "transpose", "reshape", "permute", "expand")
WITH_TWO_LEAVES = {"nn.LayerNorm": "layer_norm", "nn.BatchNorm2d": "batch_norm"}
FEW, MANY = "8", "200"  # parameters
HOST_COSTS = HERE.parent / "fidelity" / "h200" / "host_costs.json"
DTYPES = {
    "float32": "torch.float32", "tf32": "tf32", "float16": "torch.float16",
    "bfloat16": "torch.bfloat16", "float64": "torch.float64",
}  # fmt: skip
TINY = ("n=1", "n=1024")
OPERATORS = {"add_ms": 12, "relu_ms": 8, "exp_ms": 8, "sum_ms": 4}  # bytes per element
# Assumed: what profilers show for a kernel that does next to nothing. The figures here show only
# sums that include it.
KERNEL_MINIMUM = 2e-6
Fitted = dict[str, tuple[float, str]]


def fit() -> Fitted:
    """Return every fitted constant by its name in the profile: its value and its origin.

    An entry of a table is named table.key.
    """
    micro = json.loads((HERE / "micro.json").read_text(encoding="utf-8"))
    other = json.loads(HOST_COSTS.read_text(encoding="utf-8"))
    host = host_of_micro(micro)
    one_kernel = sum(
        host[name][0]
        for name in (
            "event_seconds",
            "launch_seconds",
            "allocate_seconds",
            "kernel_minimum_seconds",
        )
    )
    product = host["product_seconds"][0]
    between = host["event_seconds"][0] + host["launch_seconds"][0]
    found = (
        host
        | copies(micro, between)
        | memory(micro, one_kernel)
        | products(micro, one_kernel + product - KERNEL_MINIMUM)
    )
    slower = (host["launch_seconds"][0] + host["allocate_seconds"][0]) / (
        other["cuda"]["add"] * 1e-6
    )
    found |= host_of_the_other(other, slower)
    found |= host_of_functions(found)
    return {name: (float(f"{value:.3g}"), source) for name, (value, source) in found.items()}


def host_of_micro(micro: dict) -> Fitted:
    launch = micro["launch_us_host"] * 1e-6
    chains = micro["small kernels"]
    an_operator = (
        mean((chains["one chain"] / 200, chains["two serial"] / 400, chains["two streams"] / 400))
        * 1e-3
    )
    allocate = an_operator - launch
    tiny = (
        mean(
            micro[f"elementwise {n}"][name]
            for n in TINY
            for name in ("add_ms", "relu_ms", "exp_ms")
        )
        * 1e-3
    )
    event = tiny - an_operator - KERNEL_MINIMUM
    product = mean(micro[f"matmul {n} tf32"]["ms"] for n in (256, 512)) * 1e-3 - tiny
    synchronize = micro["launch_sync_us"] * 1e-6 - launch - KERNEL_MINIMUM
    empty = micro["cudaMalloc+free_64MiB_us"] * 1e-6 - allocate
    return {
        "launch_seconds": (launch, "launch_us_host: 1000 × x.add_(1)"),
        "allocate_seconds": (allocate, "small kernels: 200 and 400 × y = y.sin(), less a launch"),
        "kernel_minimum_seconds": (KERNEL_MINIMUM, "assumed"),
        "event_seconds": (
            event,
            "elementwise n=1, n=1024: add, relu, exp between two events, less operator and kernel",
        ),
        "product_seconds": (product, "matmul 256 and 512, tf32, less the same"),
        "synchronize_seconds": (synchronize, "launch_sync_us, less launch and kernel"),
        "empty_cache_seconds": (
            empty,
            "cudaMalloc+free_64MiB_us, where a block was left in the cache, less allocate_seconds",
        ),
    }


def host_of_the_other(other: dict, slower: float) -> Fitted:
    seconds = slower * other["cpu"]["add"] * 1e-6
    return {"cpu_launch_seconds": (seconds, f"add of small tensors on the CPU; × {slower:.2f}")}


def host_of_functions(host: Fitted) -> Fitted:
    """Return the host's time of each function of PyTorch that is measured outside kernels.

    `host` has the constants fitted so far. The text of each new one says how it was found.
    """
    machines = json.loads(HOST_FUNCTIONS.read_text(encoding="utf-8"))
    runs = [run for machine in machines for run in machine["runs"]]

    def middle(group: str, name: str, part: str) -> float:
        """Return the median over the runs that have this figure, in microseconds.

        `group`, `name` and `part` are its keys in the recording.
        """
        return median(run[group][name][part] for run in runs if part in run[group].get(name, {}))

    def operator(name: str, part: str) -> float:
        return middle("operators", name, part)

    def further(longer: str, shorter: str, part: str) -> float:
        """Return by how many microseconds one operator takes longer than another.

        It is the median over the runs. `longer` and `shorter` are the operators, and `part` is the
        part of their time.
        """
        rows = [run["operators"] for run in runs if longer in run["operators"]]
        return median(row[longer][part] - row[shorter][part] for row in rows)

    def per_parameter(group: str, name: str) -> float:
        few, many = (middle(group, name, count) for count in (FEW, MANY))
        return (many - few) / (int(MANY) - int(FEW))

    operators = [name for name in runs[0]["operators"] if name not in VIEWS]
    allocate, launch = (1e6 * host[name][0] for name in ("allocate_seconds", "launch_seconds"))
    view = median(operator(name, "no_grad") for name in VIEWS)
    node = median(operator(name, "backward node") - operator(name, "no_grad") for name in VIEWS)
    record = median(operator(name, "recorded") - operator(name, "no_grad") for name in operators)
    leaf = median(
        further(module, function, "backward node") / 2 - node - view
        for module, function in WITH_TWO_LEAVES.items()
    )
    backward = median(operator(name, "backward once") for name in operators) - node - view - leaf
    module = operator("nn.Identity", "no_grad")
    cudnn = mean(
        (
            operator("conv2d", "no_grad") - allocate,
            operator("conv2d", "backward node") - node - allocate,
        )
    )
    named = 2 * 1e6 * host["cpu_launch_seconds"][0]  # record_function: two operators on the CPU
    a_parameter = per_parameter("optimizers", "SGD")
    optimizer = middle("optimizers", "SGD", FEW) - int(FEW) * a_parameter - launch - named
    in_training = per_parameter_in_training(runs, "SGD, momentum")
    python = in_training - 3 * per_parameter("foreach", "_foreach_add_")
    cleared = per_parameter("optimizers", "zero_grad, memory freed")
    zero_grad = middle("optimizers", "zero_grad, memory freed", FEW) - int(FEW) * cleared - named
    gradient = per_parameter_in_training(runs, "zero_grad")
    found = {
        "view_seconds": (view, f"{', '.join(VIEWS)}"),
        "node_seconds": (node, "backward node of the same, less the view"),
        "record_seconds": (record, "operators recorded, less the same without gradients"),
        "leaf_seconds": (
            leaf,
            "backward node of modules, less the functions; for each of two parameters",
        ),
        "backward_seconds": (backward, "backward once, less a leaf"),
        "module_seconds": (module, "nn.Identity"),
        "cudnn_seconds": (cudnn, "conv2d, forward and backward, less memory and node"),
        "optimizer_seconds": (
            optimizer,
            "SGD of 8 parameters, less these, a launch and record_function",
        ),
        "parameter_seconds": (
            python,
            "SGD with momentum per parameter, in trainings, less three _foreach_add_",
        ),
        "zero_grad_seconds": (
            zero_grad,
            "zero_grad, memory freed, of 8 parameters, less these and record_function",
        ),
        "gradient_seconds": (gradient, "zero_grad per parameter, in trainings"),
    }
    return {name: (1e-6 * value, source) for name, (value, source) in found.items()}


def per_parameter_in_training(runs: list[dict], part: str) -> float:
    """Return the microseconds that this part of a step takes for each parameter of a network.

    A part that runs once a step does not find its code and data in the processor's caches, so it
    takes two to three times as long as when it is repeated. All parts of a step take longer than
    their functions by themselves. What the operators of the same networks take more belongs to the
    host's speed, so the figure is divided by that.
    """
    slopes = []
    for run in runs:
        trainings = run.get("trainings")
        if trainings is None:
            continue
        counts = [1 + network["parameters"] for network in trainings]
        slope = linear_regression(counts, [network[part] for network in trainings]).slope
        slopes.append(slope / median(slowdown(run, network) for network in trainings))
    return median(slopes)


def slowdown(run: dict, network: dict) -> float:
    """Return the factor by which a network's forward pass takes longer than its functions alone."""
    own = sum(
        run["operators"][name]["recorded"] * count for name, count in network["parts"].items()
    )
    return network["recorded"] / own


def copies(micro: dict, between: float) -> Fitted:
    """Return rates from 512 MiB, latencies from 4 KiB, and the time to fill the staging buffer."""
    large, small = 1 << 29, 1 << 12
    found: Fitted = {}
    for kind in ("h2d", "d2h"):
        for memory in ("pinned", "pageable"):
            rate = large / (micro[f"copy_ms {large}"][f"{kind}_{memory}"] * 1e-3 - between)
            found[f"{memory}_{kind}_bytes_per_second"] = (rate, f"copy_ms {large} {kind}_{memory}")

    def seconds(memory: str, nbytes: int) -> float:
        return mean(
            micro[f"copy_ms {nbytes}"][f"{kind}_{memory}"] * 1e-3 - between
            for kind in ("h2d", "d2h")
        )

    def carried(memory: str, nbytes: int) -> float:
        return mean(
            nbytes / found[f"{memory}_{kind}_bytes_per_second"][0] for kind in ("h2d", "d2h")
        )

    pinned = seconds("pinned", small) - carried("pinned", small)
    filled = [seconds("pageable", n) - carried("pageable", n) for n in (small, STAGING_BYTES)]
    staging = (STAGING_BYTES - small) / (filled[1] - filled[0])
    pin_rate = mean(n / micro[f"pin_memory_s {n}"] for n in (1 << 24, 1 << 27, 1 << 29))
    return found | {
        "pinned_latency_seconds": (pinned, "copy_ms 4096 pinned, both ways"),
        "pageable_latency_seconds": (
            filled[0] - small / staging,
            "copy_ms 4096 pageable, both ways",
        ),
        "staging_bytes_per_second": (
            staging,
            "copy_ms 65536 pageable, both ways, beside that of 4096",
        ),
        "pin_bytes_per_second": (pin_rate, "pin_memory_s of 16, 128 and 512 MiB"),
        "pin_latency_seconds": (micro["pin_memory_s 4096"] - 4096 / pin_rate, "pin_memory_s 4096"),
    }


def memory(micro: dict, one_kernel: float) -> Fitted:
    n = 1 << 28
    row = micro[f"elementwise n={n}"]
    rate = mean(n * item / (row[name] * 1e-3 - one_kernel) for name, item in OPERATORS.items())
    value = rate / profiles.load("H200").memory_bytes_per_second
    return {
        "memory_efficiency": (value, f"elementwise n={n}, all four, of the data sheet's bandwidth")
    }


def products(micro: dict, overhead: float) -> Fitted:
    """Return rates from 4096² and 8192², and the size of small tiles from 1024².

    The large products fill waves of large tiles, and the small one does not.
    """
    profile = profiles.load("H200")
    found: Fitted = {}
    small = []
    for format, dtype in DTYPES.items():

        def waves(n: int, tile: int) -> float:
            return ceil(n * n / tile / profile.multiprocessors) * profile.multiprocessors * tile

        def seconds(n: int, dtype: str = dtype) -> float:
            return micro[f"matmul {n} {dtype}"]["ms"] * 1e-3 - overhead - KERNEL_MINIMUM

        fill = profile.fill_terms if format == "float32" else 0
        rate = mean(
            2 * (n + fill) * waves(n, prod(TILES[format])) / seconds(n) for n in (4096, 8192)
        )
        found[f"matmul_efficiency.{format}"] = (
            rate / profile.peak_flops[format],
            f"matmul 4096 and 8192 {dtype}, in waves of tiles",
        )
        small.append(
            2 * (1024 + fill) * waves(1024, prod(TILES[format]) // 4) / rate / seconds(1024)
        )
        if format == "float32":
            found["fill_terms"] = fill_terms(rate)
    small.sort()
    found["small_tile_efficiency"] = (
        small[len(small) // 2],
        "matmul 1024, the median of the formats",
    )
    return found


def fill_terms(rate: float) -> tuple[float, str]:
    """Return for how many further terms a tile takes time, given the FLOP/s of all multiprocessors.

    The rate follows from this number and this number from the rate: the profile's satisfies both.
    Layers with more terms show the rate, and those with fewer also wait for memory.
    """
    profile, rows, tile = profiles.load("H200"), 16384, TILES["float32"]
    recorded = json.loads(SMALL_KERNELS.read_text(encoding="utf-8"))["microseconds"]
    found = []
    for terms, outputs in ((256, 256), (384, 1536), (1024, 1024)):
        seconds = (
            1e-6 * recorded[f"linear, {rows} rows, {terms} to {outputs}, float32"] - KERNEL_MINIMUM
        )
        tiles = ceil(rows / tile[0]) * ceil(outputs / tile[1])
        one_term = (
            ceil(tiles / profile.multiprocessors) * profile.multiprocessors * 2 * prod(tile) / rate
        )
        found.append(seconds / one_term - terms)
    return round(median(found)), f"linear layers of {rows} rows and 256 to 1024 terms in float32"


def main() -> None:
    for name, (value, source) in fit().items():
        print(f"{name:32} {value:<10.3g} {source}")


if __name__ == "__main__":
    main()
