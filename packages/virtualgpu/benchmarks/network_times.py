"""Compare the times of training steps of whole networks on an H200 and an H100 with the model.

    python benchmarks/network_times.py

This needs torchvision, timm and transformers.

timing/networks.json has the times of real GPUs, each in its own computer. The batches have 8
pictures of 224² or 8 sequences of 256 tokens (16 of 64 for the LSTM), and the weights are random.
Each time is the median of 7 steps with a wait after each, with SGD, with AdamW, and with AdamW
under autocast to bfloat16. No constant was fitted to these times.

A step keeps the GPU busy if the GPU works during nine tenths of the modelled step or more (`BUSY`).
The other steps wait for the host, whose speed the model cannot know. Each of them is therefore also
compared with a given speed of the host: the median of recorded over modelled time of the others on
that machine (`virtualgpu.use(host=…)`, `labkit fit --host`). The others are first all other steps,
and then those of other networks.
"""

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import virtualgpu
from virtualgpu import hardware
from virtualgpu.profiles import BUSY

RECORDED = json.loads(
    (Path(__file__).parent / "timing" / "networks.json").read_text(encoding="utf-8")
)
Loss = Callable[[], torch.Tensor]


def pictures(model: torch.nn.Module) -> tuple[torch.nn.Module, Loss]:
    x, y = torch.randn(8, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (8,), device="cuda")
    return model, lambda: F.cross_entropy(model(x), y)


def network(name: str) -> tuple[torch.nn.Module, Loss]:
    """Return the network on the GPU, and a function that returns its loss of a batch."""
    if name == "bert":
        import transformers

        bert = transformers.BertForMaskedLM(transformers.BertConfig()).cuda()
        ids = torch.randint(0, 30522, (8, 256), device="cuda")
        return bert, lambda: bert(input_ids=ids, labels=ids).loss
    if name == "lstm":
        words, lstm = (
            torch.nn.Embedding(10000, 512).cuda(),
            torch.nn.LSTM(512, 512, 2, batch_first=True).cuda(),
        )
        head, ids = (
            torch.nn.Linear(512, 10000).cuda(),
            torch.randint(0, 10000, (16, 64), device="cuda"),
        )
        return torch.nn.ModuleList([words, lstm, head]), lambda: F.cross_entropy(
            head(lstm(words(ids))[0]).flatten(0, 1), ids.flatten()
        )
    if name == "mixer":
        import timm

        return pictures(timm.create_model("mixer_b16_224", pretrained=False).cuda())
    import torchvision

    return pictures(getattr(torchvision.models, name)(weights=None).cuda())


def milliseconds(like: str, name: str, host: float) -> tuple[float, float]:
    """Return the milliseconds of the third step, and those during which the GPU works."""
    network_name, mode = name.split()
    with virtualgpu.use(1, like=like, values=False, host=host):
        model, loss_of = network(network_name)
        parameters = model.train().parameters()
        optimizer: Any = (
            torch.optim.SGD(parameters, 1e-3, momentum=0.9)
            if mode == "sgd"
            else torch.optim.AdamW(parameters, 1e-4)
        )

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=mode == "bf16"):
                loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        step()
        step()
        worked: list[float] = []
        clock = hardware.machine().clock

        def listen(span: Any) -> None:
            worked.append(getattr(span, "duration", 0.0))

        clock.listen(listen)
        begin = virtualgpu.host_time()
        step()
        took = virtualgpu.host_time() - begin
        clock.unlisten(listen)
    return 1e3 * took, 1e3 * sum(worked)


def row(name: str, recorded: float, took: float, host: float, worked: float) -> float:
    error = 100 * abs(took / recorded - 1)
    print(
        f"   {name:18}{recorded:>9.2f} ms{took:>9.2f} ms{error:>8.1f}%   host {host:.2f}, the GPU "
        f"works {min(1, worked / took):.0%}",
        flush=True,
    )
    return error


def nine_of_ten(errors: list[float]) -> str:
    """Return the least error that nine of ten errors do not exceed, in percent."""
    return f"nine of ten within {sorted(errors)[ceil(0.9 * len(errors)) - 1]:.1f}%"


def compare(like: str) -> None:
    recorded: dict[str, float] = RECORDED[like]["milliseconds"]
    model = {name: milliseconds(like, name, 1.0) for name in recorded}
    busy = {name for name, (took, worked) in model.items() if worked >= BUSY * took}
    print(f"{like}, what keeps the GPU busy{'recorded':>12}{'here':>12}{'error':>9}")
    errors = [
        row(name, recorded[name], model[name][0], 1.0, model[name][1])
        for name in recorded
        if name in busy
    ]
    print(f"   {len(errors)} steps, median error {median(errors):.1f}%")
    print(f"{like}, what keeps the GPU busy: {nine_of_ten(errors)}")
    all_errors = [100 * abs(took / recorded[name] - 1) for name, (took, _) in model.items()]
    print(
        f"{like}, all steps, the host's speed not given: {len(all_errors)}, median error "
        f"{median(all_errors):.1f}%, {nine_of_ten(all_errors)}"
    )
    waiting = [name for name in recorded if name not in busy]
    ratios = {name: recorded[name] / model[name][0] for name in waiting}
    errors = [100 * abs(1 / ratio - 1) for ratio in ratios.values()]
    print(
        f"{like}, what waits for the host, its speed not given: median error "
        f"{median(errors):.1f}%, {nine_of_ten(errors)}"
    )
    with_the_speed_given(like, recorded, ratios)


def with_the_speed_given(like: str, recorded: dict[str, float], ratios: dict[str, float]) -> None:
    """Print the errors of steps that wait for the host, if the host's speed is given.

    The speed comes from the other steps, and then only from those of other networks.
    """
    print(f"{like}, what waits for the host, its speed given by the other steps that do")
    others = {
        name: median(ratio for other, ratio in ratios.items() if other != name) for name in ratios
    }
    errors = [row(name, recorded[name], *_at(like, name, host)) for name, host in others.items()]
    print(f"   {len(errors)} steps, median error {median(errors):.1f}%, {nine_of_ten(errors)}")
    errors = []
    for name in ratios:
        host = median(
            ratio for other, ratio in ratios.items() if other.split()[0] != name.split()[0]
        )
        errors.append(100 * abs(milliseconds(like, name, host)[0] / recorded[name] - 1))
    print(
        f"{like}, what waits for the host, its speed given by the other networks alone: median "
        f"error {median(errors):.1f}%"
    )


def _at(like: str, name: str, host: float) -> tuple[float, float, float]:
    took, worked = milliseconds(like, name, host)
    return took, host, worked


def main() -> None:
    for like in RECORDED:
        compare(like)
    first, second = (RECORDED[like]["milliseconds"] for like in RECORDED)
    print(
        "Recorded on the H100's machine over recorded on the H200's: were it the host's speed "
        "alone, what waits for it would agree"
    )
    for name in first:
        print(f"   {name:18}{second[name] / first[name]:>6.2f}")


if __name__ == "__main__":
    main()
