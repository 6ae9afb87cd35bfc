"""Compare published times of whole networks with the model, next to other predictors' errors.

    python benchmarks/public_networks.py NEUSIGHT

NEUSIGHT is a clone of https://github.com/sitar-lab/NeuSight, bare or not. The script needs
transformers.

Each label in its scripts/asplos/label is a network, a batch and a length, with the time of a
forward pass and, for training, of a backward pass, in float32 (neusight/Tracing/trace.py, torch
2.1). The times are between CUDA events, after the allocator's cache was emptied. Here the same runs
on a virtual GPU without values. No constant was fitted to these times. Compiled networks, networks
on several GPUs, and SwitchTransformer, whose experts' code the authors replaced, are left out. The
predictions of NeuSight and of three others are in its scripts/asplos/summary/summary.csv.

    python benchmarks/public_networks.py NEUSIGHT --sets

This compares the published times with each other: linear layers of one layer of a network, in its
label, with those of the same shape among the single operators (public_operators.py).
"""

import ast
import csv
import gc
import io
import json
import re
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import virtualgpu

FOLDER = "scripts/asplos"
PROFILES = {
    "Tesla_T4": "T4",
    "NVIDIA_L4": "L4",
    "NVIDIA_A100-PCIE-40GB": "A100",
    "NVIDIA_A100_80GB_PCIe": "A100-80",
    "NVIDIA_H100_80GB_HBM3": "H100",
}
# the columns of the other predictors
PREDICTORS = {
    "NeuSight": "neusight",
    "Li et al.": "micro",
    "Habitat": "habitat",
    "roofline": "roofline",
}
LABEL = re.compile(
    r"label/([^/]+)/(bert_large|gpt2_large|gpt3_xl|gpt3_27|opt_13)-(inf|train)-(\d+)-(\d+)\.json$"
)


def git(repository: str, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", repository, *command], capture_output=True, text=True, check=True
    ).stdout


def network(config: Any, train: bool) -> torch.nn.Module:
    """Return the network as the authors made it, on the GPU."""
    import transformers

    bert = (
        transformers.AutoModelForPreTraining
        if train
        else transformers.AutoModelForSequenceClassification
    )
    kind = bert if config.model_type == "bert" else transformers.AutoModelForCausalLM
    with torch.device("cuda"):
        return kind.from_config(config, attn_implementation="eager").train(train)


def milliseconds(model: torch.nn.Module, train: bool, batch: int, length: int) -> float:
    """Return the milliseconds of a second forward pass, and for training of a backward pass."""
    ids = torch.ones(batch, length, dtype=torch.int64, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        gc.collect()
        torch.cuda.empty_cache()
        with torch.set_grad_enabled(train):
            begin.record()
            result = model(ids)
            end.record()
        torch.cuda.synchronize()
        took = begin.elapsed_time(end)
        if train:
            logits = result["prediction_logits" if "prediction_logits" in result else "logits"]
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))
            del logits
            result = None
            begin.record()
            loss.backward()
            end.record()
            del loss
            torch.cuda.synchronize()
            took += begin.elapsed_time(end)
        result = None  # it holds the keys and values of all layers
    return took


def compare_sets(repository: str) -> None:
    """Compare the times of equal linear layers in the networks' labels and as single operators."""
    single: dict[tuple[str, int, int, int], float] = {}
    for row in csv.DictReader(
        io.StringIO(git(repository, "show", f"HEAD:{FOLDER}/data/dataset/test/linear.csv"))
    ):
        b, m, n, k = (int(row[size]) for size in "BMNK")
        single[row["Device"].replace(" ", "_"), b * m, n, k] = float(row["Latency"])
    ratios: dict[str, list[float]] = {device: [] for device in PROFILES}
    for name in git(repository, "ls-tree", "-r", "--name-only", "HEAD").split():
        found = LABEL.search(name.removesuffix(".csv") + ".json") if name.endswith(".csv") else None
        if found is None or found[1] not in PROFILES:
            continue
        for row in csv.DictReader(io.StringIO(git(repository, "show", f"HEAD:{name}"))):
            if "Linear" in row["type"] or "addmm" in row["target"]:
                (*rows, inner) = max(ast.literal_eval(row["input_shapes"])[:2], key=len)
                shape = found[1], prod(rows), inner, ast.literal_eval(row["output_shape"])[-1]
                if shape in single:
                    ratios[found[1]].append(float(row["fw_latency"]) / single[shape])
    for device, each in ratios.items():
        middle = (
            f"{median(each):.2f} at the median, {min(each):.2f} to {max(each):.2f}" if each else ""
        )
        print(
            f"{device:24}{len(each):>4} linear layers in a network's label, over the same among "
            f"the single operators: {middle}"
        )


def percent(errors: list[float]) -> str:
    return f"{errors[0]:>7.1f}%" + "".join(f"{error:>10.1f}%" for error in errors[1:])


def main() -> None:
    repository = sys.argv[1]
    if "--sets" in sys.argv[2:]:
        return compare_sets(repository)
    import transformers

    rows = csv.DictReader(
        io.StringIO(git(repository, "show", f"HEAD:{FOLDER}/summary/summary.csv"))
    )
    predicted = {
        (r["device"], r["model_name"], r["mode"], r["seqlen"], r["batch"]): r
        for r in rows
        if not r["option"]
    }
    labels = [
        found.groups()
        for name in git(repository, "ls-tree", "-r", "--name-only", "HEAD").split()
        if (found := LABEL.search(name))
    ]
    others = "".join(f"{name:>11}" for name in PREDICTORS)
    print(
        f"{'GPU':24}{'network':12}{'':7}{'length × batch':>16}{'published':>13}{'here':>10}"
        f"{'error':>8}{others}"
    )
    for device, like in PROFILES.items():
        errors: list[list[float]] = []  # errors of this model and of each predictor, by network
        for label in (label for label in labels if label[0] == device):
            _, name, mode, length, batch = label
            published = json.loads(
                git(repository, "show", f"HEAD:{FOLDER}/label/{device}/{'-'.join(label[1:])}.json")
            )["e2e_latency"]
            with (
                tempfile.TemporaryDirectory() as folder,
                virtualgpu.use(1, like=like, values=False),
            ):
                path = Path(folder) / "config.json"
                path.write_text(
                    git(repository, "show", f"HEAD:{FOLDER}/data/DLmodel_configs/{name}.json"),
                    encoding="utf-8",
                )
                model = network(transformers.AutoConfig.from_pretrained(folder), mode == "train")
                took = milliseconds(model, mode == "train", int(batch), int(length))
                del model
            times = [
                took,
                *(
                    float(predicted[label][f"{column}_all_e2e_latency"])
                    for column in PREDICTORS.values()
                ),
            ]
            errors.append([100 * abs(each / published - 1) for each in times])
            figures = f"{published:>10.1f} ms{took:>7.1f} ms{percent(errors[-1])}"
            print(f"{device:24}{name:12}{mode:7}{f'{length} × {batch}':>16}{figures}", flush=True)
        means = percent([mean(each) for each in zip(*errors, strict=True)])
        print(f"{device:24}{f'mean of {len(errors)}':58}{means}", flush=True)


if __name__ == "__main__":
    main()
