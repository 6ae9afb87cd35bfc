"""Compare the predictions of `labkit fit` for training scripts with runs on real GPUs.

    python benchmarks/fit_measured.py record FOLDER FILE     on a machine with a GPU
    python benchmarks/fit_measured.py compare FOLDER FILE    on any machine

Both commands need torchvision and transformers. FOLDER has pytorch/examples, minGPT and nanoGPT,
with files of random content for data sets. The networks train in timing/train_network.py.

A step's time on the GPU is the median time from the end of one step's work to that of the next, by
CUDA events. A loader repeats its first batches, because `fit` does not count loading data either.
Peaks are those of the first four steps. The host's speed is measured after each script's steps, as
`--host here` does, because it changes within minutes.
"""

import datetime
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from gputrace.fit import Wish
from gputrace.fit.attempt import Outcome
from gputrace.fit.processes import run
from virtualgpu.host_speed import modelled_step_seconds, step_seconds
from virtualgpu.script import run_script

STEPS, MEASURED = 4, 40  # those of `labkit fit`, and those whose times are taken
KEPT = 4  # batches of a loader
PATIENCE = 100  # seconds for one script
BUSY = 0.1  # of a step: a GPU that waits for less is busy
OURS = Path(__file__).parent / "timing" / "train_network.py"


@dataclass(frozen=True)
class Case:
    folder: str
    script: str
    arguments: str = ""
    by_hand: bool = False  # it changes its parameters without an optimizer


def ours(network: str, mode: str, batch: int, length: int | str = "") -> Case:
    return Case(".", str(OURS), f"{network} {mode} {batch} {length}")


CASES = {
    "mnist": Case("examples/mnist", "main.py"),
    "mnist_rnn": Case("examples/mnist_rnn", "main.py", "--accel"),
    "mnist_forward_forward": Case("examples/mnist_forward_forward", "main.py"),
    "vae": Case("examples/vae", "main.py"),
    "siamese_network": Case("examples/siamese_network", "main.py"),
    "dcgan": Case("examples/dcgan", "main.py", "--dataset fake --accel"),
    "super_resolution": Case(
        "examples/super_resolution", "main.py", "--upscale_factor 3 --accel --batchSize 4"
    ),
    "word_language_model": Case("examples/word_language_model", "main.py", "--accel", by_hand=True),
    "word_language_model, Transformer": Case(
        "examples/word_language_model", "main.py", "--accel --model Transformer", by_hand=True
    ),
    "imagenet, ResNet-50": Case("examples/imagenet", "main.py", "--dummy -a resnet50"),
    "imagenet, ViT-B/16": Case("examples/imagenet", "main.py", "--dummy -a vit_b_16 -b 64"),
    "imagenet, MobileNetV2": Case("examples/imagenet", "main.py", "--dummy -a mobilenet_v2 -b 32"),
    "minGPT, adder": Case("minGPT", "projects/adder/adder.py"),
    "minGPT, chargpt": Case("minGPT", "projects/chargpt/chargpt.py"),
    "nanoGPT, characters": Case(
        "nanoGPT", "train.py", "config/train_shakespeare_char.py --compile=False"
    ),
    "nanoGPT, GPT-2": Case(
        "nanoGPT",
        "train.py",
        "--compile=False --batch_size=8 --gradient_accumulation_steps=4 --eval_iters=2",
    ),
}
for _network, _small, _large in (
    ("efficientnet_b0", 8, 128),
    ("mobilenet_v3_large", 8, 256),
    ("densenet121", 8, 64),
    ("convnext_tiny", 8, 64),
    ("swin_t", 8, 64),
    ("regnet_y_400mf", 8, 256),
    ("resnext50_32x4d", 8, 64),
):
    for _mode in ("sgd", "adamw", "bf16"):
        CASES[f"{_network} {_mode}"] = ours(_network, _mode, _small)
    CASES[f"{_network} sgd, large"] = ours(_network, "sgd", _large)
for _network in (
    "gpt2",
    "gpt2_medium",
    "distilbert",
    "electra",
    "albert",
    "t5",
    "opt",
    "llama",
    "pythia",
):
    CASES[f"{_network} adamw"] = ours(_network, "adamw", 8, 256)
    CASES[f"{_network} bf16"] = ours(_network, "bf16", 4, 128)


class _Enough(BaseException):
    """Exception that ends a script when all steps are done."""


def on_gpu(case: Case, queue: Any) -> None:
    """Run a case in this process, and put its measurements into the queue."""
    ends: list[torch.cuda.Event] = []
    found: dict[str, Any] = {}
    first: list[Any] = []

    def count() -> None:
        if len(ends) + 1 == STEPS:
            torch.cuda.synchronize()
            found.update(
                allocated=torch.cuda.max_memory_allocated(),
                reserved=torch.cuda.max_memory_reserved(),
            )
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        ends.append(event)
        if len(ends) == MEASURED:
            raise _Enough

    def after_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        first[:] = first or [optimizer]
        if optimizer is first[0]:
            count()

    os.chdir(case.folder)
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    _give_batches_again()
    if case.by_hand:
        _before_each_backward_but_the_first(count)
    register_optimizer_step_post_hook(after_step)
    try:
        run_script(case.script, case.arguments.split())
    except _Enough:
        pass
    except BaseException as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    found["milliseconds"] = [round(a.elapsed_time(b), 4) for a, b in pairwise(ends)]
    found["host step"] = step_seconds(time.perf_counter)
    queue.put(found)


def _give_batches_again() -> None:
    load = DataLoader.__iter__

    def again(self: DataLoader) -> Iterator[Any]:
        kept: list[Any] = []
        loaded = load(self)
        for _ in range(min(KEPT, len(self))):
            kept.append(next(loaded))
        del loaded
        for index in range(len(self)):
            yield kept[index % len(kept)]

    DataLoader.__iter__ = again  # type: ignore[method-assign, assignment]


def _before_each_backward_but_the_first(count: Any) -> None:
    backward, begun = torch.Tensor.backward, [False]

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if begun[0]:
            count()
        begun[0] = True
        backward(self, *args, **kwargs)

    torch.Tensor.backward = counted  # type: ignore[method-assign]


def record(folder: Path, file: Path) -> None:
    """Run each script in a fork of this process, which has loaded the libraries but no GPU."""
    import torchvision
    import transformers

    os.chdir(folder)
    fork = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    versions = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
    }
    whole: dict[str, Any] = versions | {"date": datetime.date.today().isoformat(), "scripts": found}
    for name, case in CASES.items():
        queue = fork.Queue()
        process = fork.Process(target=on_gpu, args=(case, queue))
        process.start()
        try:
            found[name] = queue.get(timeout=PATIENCE)
        except Exception:
            found[name] = {"failed": f"no answer in {PATIENCE} seconds, or a crash"}
        process.kill()
        process.join()
        times = found[name].get("milliseconds")
        print(
            name,
            found[name].get("failed", ""),
            f"{median(times):.2f} ms" if times else "",
            flush=True,
        )
        # what is there stays, if it is broken off
        file.write_text(json.dumps(whole), encoding="utf-8")
    whole["gpu"] = torch.cuda.get_device_name()
    whole["driver"] = (
        os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split()[0]
    )
    whole["modelled step"] = modelled_step_seconds()
    file.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    print(
        "host",
        [
            round(script["host step"] / whole["modelled step"], 2)
            for script in found.values()
            if "host step" in script
        ],
    )


def by_fit(wish: Wish, folder: str) -> Outcome:
    os.chdir(folder)
    return run(wish)


def compare(folder: Path, file: Path) -> None:
    recorded = json.loads(file.read_text(encoding="utf-8"))
    like = "H200" if "H200" in recorded["gpu"] else "H100"
    print(
        f"{recorded['gpu']}, driver {recorded['driver']}, torch {recorded['torch']}; here "
        f"torch {torch.__version__}"
    )
    print(
        f"{'':34}{'allocated':>13}{'by fit':>9}{'reserved':>14}{'by fit':>9}"
        f"{'a step':>12}{'by fit':>9}{'host':>6}{'waits for it':>14}"
    )
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        names = [name for name in CASES if "host step" in recorded["scripts"][name]]
        hosts = {
            name: recorded["scripts"][name]["host step"] / recorded["modelled step"]
            for name in names
        }
        wishes = [
            Wish(CASES[n].script, CASES[n].arguments.split(), False, like, STEPS, hosts[n])
            for n in names
        ]
        found = list(pool.map(by_fit, wishes, [str(folder / CASES[n].folder) for n in names]))
    errors: dict[str, list[float]] = defaultdict(list)
    for name, fit in zip(names, found, strict=True):
        real = recorded["scripts"][name]
        if real.get("failed") or fit.failed or not real["milliseconds"] or not fit.step:
            print(
                f"{name:34} on the GPU: {real.get('failed') or 'ran'}; by fit: "
                f"{fit.failed or 'ran'}"
            )
            continue
        took = median(real["milliseconds"]) / 1e3
        shares = [
            fit.allocated / real["allocated"] - 1,
            fit.reserved / real["reserved"] - 1,
            fit.step / took - 1,
        ]
        errors["allocated"].append(abs(shares[0]))
        errors["reserved"].append(abs(shares[1]))
        whose, how = (
            "networks" if CASES[name].script == str(OURS) else "public scripts",
            "waits" if fit.idle > BUSY else "is busy",
        )
        errors[f"steps of {whose} in which the GPU {how}"].append(abs(shares[2]))
        print(
            f"{name:34}{real['allocated']:>13}{shares[0]:>+9.2%}{real['reserved']:>14}{shares[1]:>+9.2%}"
            f"{1e3 * took:>9.2f} ms{shares[2]:>+9.1%}{hosts[name]:>6.2f}{fit.idle:>14.0%}"
        )
    for what in sorted(errors):
        print(
            f"{what}: {len(errors[what])}, median error {median(errors[what]):.2%}, worst "
            f"{max(errors[what]):.1%}"
        )


if __name__ == "__main__":
    work, folder, file = sys.argv[1:]
    {"record": record, "compare": compare}[work](Path(folder).resolve(), Path(file).resolve())
