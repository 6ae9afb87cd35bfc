"""Compare the parts of a training step, and inference, on virtual GPUs with those on real ones.

python benchmarks/timing/network_phases.py record OUT.json [names…]    on a machine with a CUDA GPU
python benchmarks/timing/network_phases.py compare [names…]            on any machine

Both commands need torchvision, timm and transformers. network_phases.json has the recordings of two
machines. Each part of a step has two times in milliseconds. The first ends when the call returns
to the host, and the second when the GPU is done. If both are alike, the GPU waited for the host.
"busy" is the time of all kernels of one step, as PyTorch's profiler measured it. "kernels" is the
number of these kernels. "host step" is the time of a reference step, measured right before the
network. `labkit fit --host here` uses the same reference step. `compare` sets the host's speed from
it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from virtualgpu.host_speed import modelled_step_seconds, step_seconds

RECORDED = Path(__file__).with_suffix(".json")
MODES = ("sgd", "adamw", "bf16")
ROUNDS = 7
PARTS = ("forward", "backward", "optimizer", "zero_grad", "step", "no_grad")
BATCH = 8
WAITING = 0.5  # share of a step: a GPU that is busy for less waits for the host
Network = tuple[nn.Module, Callable[[], torch.Tensor]]


def labels(classes: int, count: int = BATCH) -> torch.Tensor:
    return torch.randint(0, classes, (count,), device="cuda")


def tokens(vocabulary: int, length: int = 256, count: int = BATCH) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count, length), device="cuda")


def mnist() -> Network:
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(128, 10), nn.LogSoftmax(1)),
    ).cuda()
    x, y = torch.randn(64, 1, 28, 28, device="cuda"), labels(10, 64)
    return model, lambda: F.nll_loss(model(x), y)


def mlp() -> Network:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).cuda()
    x, y = torch.randn(128, 256, device="cuda"), labels(10, 128)
    return model, lambda: F.cross_entropy(model(x), y)


class Block(nn.Module):
    """A block of a GPT with fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.size()
        parts = self.queries_keys_values(self.norm_1(x)).split(width, dim=2)
        shape = (count, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallGPT(nn.Module):
    def __init__(self, width: int = 192, vocabulary: int = 65, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def small_gpt() -> Network:
    model, ids = SmallGPT().cuda(), tokens(65, 128, 16)
    return model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def lstm() -> Network:
    words, head = nn.Embedding(10000, 512).cuda(), nn.Linear(512, 10000).cuda()
    recurrent, ids = nn.LSTM(512, 512, 2, batch_first=True).cuda(), tokens(10000, 64, 16)

    def loss() -> torch.Tensor:
        scores = head(recurrent(words(ids))[0])
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten())

    return nn.ModuleList([words, recurrent, head]), loss


class UNet(nn.Module):
    """U-Net with four levels of two 3 × 3 convolutions with group norms, down and up again."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.downs = nn.ModuleList(
            self.double(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        self.ups = nn.ModuleList(self.double(b, a) for a, b in pairs)
        self.lifts = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.out = nn.Conv2d(widths[0], 3, 1)

    @staticmethod
    def double(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU()),
            *(nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, down in enumerate(self.downs):
            if level:
                x = F.max_pool2d(x, 2)
            x = down(x)
            kept.append(x)
        for up, lift, skip in zip(
            reversed(self.ups), reversed(self.lifts), reversed(kept[:-1]), strict=True
        ):
            x = up(torch.cat([lift(x), skip], 1))
        return self.out(x)


def unet() -> Network:
    model, x = UNet().cuda(), torch.randn(8, 3, 128, 128, device="cuda")
    return model, lambda: F.mse_loss(model(x), x)


def pictures(make: Callable[[], nn.Module]) -> Network:
    model = make().cuda()
    x, y = torch.randn(BATCH, 3, 224, 224, device="cuda"), labels(1000)
    return model, lambda: F.cross_entropy(model(x), y)


def of_torchvision(name: str) -> Callable[[], Network]:
    def build() -> Network:
        import torchvision

        return pictures(lambda: getattr(torchvision.models, name)(weights=None))

    return build


def of_timm(name: str) -> Callable[[], Network]:
    def build() -> Network:
        import timm

        return pictures(lambda: timm.create_model(name, pretrained=False, num_classes=1000))

    return build


def of_transformers(name: str) -> Callable[[], Network]:
    def build() -> Network:
        import transformers as t

        return LANGUAGE[name](t)

    return build


def language(model: nn.Module, ids: torch.Tensor) -> Network:
    model = model.cuda()
    return model, lambda: model(input_ids=ids, labels=ids).loss


def deberta(t: Any) -> Network:
    config = t.DebertaV2Config(
        **{"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
        **{"intermediate_size": 1536, "vocab_size": 32000, "relative_attention": True},
        **{"position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "num_labels": 3},
    )
    model = t.DebertaV2ForSequenceClassification(config).cuda()
    ids, y = tokens(32000, 128), labels(3)
    return model, lambda: model(input_ids=ids, labels=y).loss


def mixtral(t: Any) -> Network:
    config = t.MixtralConfig(
        **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4},
        **{"vocab_size": 32000, "use_cache": False},
    )
    return language(t.MixtralForCausalLM(config), tokens(32000, 128, 4))


def llama(t: Any) -> Network:
    config = t.LlamaConfig(
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
        **{"vocab_size": 32000, "use_cache": False},
    )
    return language(t.LlamaForCausalLM(config), tokens(32000))


def whisper(t: Any) -> Network:
    config = t.WhisperConfig(
        **{"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "use_cache": False},
        **{"encoder_attention_heads": 6, "decoder_attention_heads": 6},
        **{"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536},
    )
    model = t.WhisperForConditionalGeneration(config).cuda()
    sound, ids = torch.randn(4, 80, 3000, device="cuda"), tokens(51865, 64, 4)
    return model, lambda: model(input_features=sound, labels=ids).loss


def segformer(t: Any) -> Network:
    model = t.SegformerForSemanticSegmentation(t.SegformerConfig(num_labels=20)).cuda()
    x = torch.randn(4, 3, 256, 256, device="cuda")
    y = torch.randint(0, 20, (4, 256, 256), device="cuda")
    return model, lambda: model(pixel_values=x, labels=y).loss


def t5(t: Any) -> Network:
    config = t.T5Config(use_cache=False, decoder_start_token_id=0)
    return language(t.T5ForConditionalGeneration(config), tokens(32128, 128))


def gru() -> Network:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(1000, 64), nn.Linear(128, 10)
            self.layers = nn.GRU(64, 128, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.layers(self.words(x))[0][:, -1])

    model = Classifier().cuda()
    x, y = tokens(1000, 32), labels(10)
    return model, lambda: F.cross_entropy(model(x), y)


def roberta(t: Any) -> Network:
    model = t.RobertaForMaskedLM(t.RobertaConfig(num_hidden_layers=6))
    return language(model, tokens(30000, 128))


def opt(t: Any) -> Network:
    model = t.OPTForCausalLM(t.OPTConfig(num_hidden_layers=6, use_cache=False))
    return language(model, tokens(30000, 128))


LANGUAGE: dict[str, Callable[[Any], Network]] = {
    "gpt2": lambda t: language(t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)), tokens(50257)),
    "bert": lambda t: language(t.BertForMaskedLM(t.BertConfig()), tokens(30522)),
    "deberta": deberta,
    "mixtral": mixtral,
    "llama": llama,
    "whisper": whisper,
    "segformer": segformer,
    "t5": t5,
    "roberta": roberta,
    "opt": opt,
}
TORCHVISION = (
    *("resnet18", "resnet50", "densenet121", "vit_b_16", "maxvit_t", "mobilenet_v3_large"),
    *("shufflenet_v2_x1_0", "regnet_y_400mf", "swin_t", "vgg11_bn", "resnext50_32x4d"),
)
TIMM = ("mixer_b16_224", "deit_tiny_patch16_224", "ghostnet_100", "poolformer_s12")
NETWORKS: dict[str, Callable[[], Network]] = {
    "mnist": mnist,
    "mlp": mlp,
    "small_gpt": small_gpt,
    "lstm": lstm,
    "unet": unet,
    "gru": gru,
    "efficientnet": of_torchvision("efficientnet_b0"),
    **{name: of_torchvision(name) for name in TORCHVISION},
    **{name: of_timm(name) for name in TIMM},
    "convnext": of_timm("convnext_tiny"),
    "swin": of_timm("swin_tiny_patch4_window7_224"),
    **{name: of_transformers(name) for name in LANGUAGE},
}


class Training:
    """One network, its optimizer, and the parts of its step as functions."""

    def __init__(self, name: str, mode: str) -> None:
        self.model, self.loss_of = NETWORKS[name]()
        self.model.train()
        self.mode = mode
        parameters = self.model.parameters()
        if mode == "sgd":
            self.optimizer: Any = torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(parameters, 1e-4)
        self.losses: list[torch.Tensor] = []

    def forward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.mode == "bf16"):
            self.losses.append(self.loss_of())

    def backward(self) -> None:
        self.losses.pop().backward()

    def parts(self) -> dict[str, Callable[[], object]]:
        return {
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer.step,
            "zero_grad": self.optimizer.zero_grad,
        }

    def step(self) -> None:
        for part in self.parts().values():
            part()


def timed(work: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Return the milliseconds until the call returns, and until the GPU is done."""
    torch.cuda.synchronize()
    start = clock()
    work()
    returned = clock() - start
    torch.cuda.synchronize()
    return [1e3 * returned, 1e3 * (clock() - start)]


def middle(rounds: list[list[float]]) -> list[float]:
    return [round(median(column), 3) for column in zip(*rounds, strict=True)]


def measure(name: str, mode: str, clock: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Return the two times of each part. Each is the median of several rounds."""
    training = Training(name, mode)
    for _ in range(4 if rounds > 1 else 2):
        training.step()
    found: dict[str, list[list[float]]] = {part: [] for part in PARTS}
    for _ in range(rounds):
        for part, work in training.parts().items():
            found[part].append(timed(work, clock))
    for _ in range(rounds):
        found["step"].append(timed(training.step, clock))
    training.model.eval()
    with torch.no_grad():
        training.loss_of()
        for _ in range(rounds):
            found["no_grad"].append(timed(training.loss_of, clock))
    return {part: middle(times) for part, times in found.items()}


def busy_milliseconds(name: str, mode: str) -> dict[str, float]:
    """Return the time of all kernels and copies of one step, and their number.

    From the first use of the profiler on, every launch of the process takes longer.
    """
    from torch.profiler import ProfilerActivity, profile

    step = Training(name, mode).step
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    work = [e for e in recorded.events() if str(e.device_type) == "DeviceType.CUDA"]
    busy = sum(e.time_range.elapsed_us() for e in work) / 1e3
    return {"busy": round(busy, 3), "kernels": len(work)}


def record(path: str, *names: str) -> None:
    results: dict[str, Any] = {}
    for name in names or NETWORKS:
        host = 1e3 * step_seconds(time.perf_counter)
        for mode in MODES:
            gc.collect()
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            results[f"{name} {mode}"] = measure(name, mode, time.perf_counter, ROUNDS)
            results[f"{name} {mode}"]["host step"] = round(host, 3)
            print(name, mode, results[f"{name} {mode}"], flush=True)
    for name in names or NETWORKS:  # after all times, because the profiler changes them
        for mode in MODES:
            gc.collect()
            torch.cuda.empty_cache()
            results[f"{name} {mode}"] |= busy_milliseconds(name, mode)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    with open(path, "w") as file:
        json.dump([{"machine": machine, "milliseconds": results}], file, indent=1)


def compare(*names: str) -> None:
    modelled = 1e3 * modelled_step_seconds()
    for recorded in json.loads(RECORDED.read_text()):
        like = "H200" if "H200" in recorded["machine"]["gpu"] else "H100"
        print(f"{like}: recorded milliseconds, and the virtual GPU's time as a multiple of each")
        milliseconds = {
            key: real
            for key, real in recorded["milliseconds"].items()
            if not names or key.split()[0] in names
        }
        ratios: dict[str, list[float]] = {part: [] for part in PARTS}
        for key, real in milliseconds.items():
            host = real["host step"] / modelled
            here = on_virtual_gpu(like, key, host)
            row = []
            for part in PARTS:
                ratio = here[part][1] / real[part][1]
                if share_busy(real) < WAITING:
                    ratios[part].append(ratio)
                row.append(f"{part}{real[part][1]:8.2f}{ratio:6.2f}")
            print(
                f"{key:18} host {host:.2f}  {'  '.join(row)}  busy {share_busy(real):.0%}",
                flush=True,
            )
        print(f"where the GPU is busy for less than {WAITING:.0%} of the step:")
        for part, found in ratios.items():
            error = median(abs(ratio - 1) for ratio in found)
            print(f"{part}: median {median(found):.2f}, median error {error:.0%}")


def on_virtual_gpu(like: str, key: str, host: float = 1.0) -> dict[str, Any]:
    import virtualgpu

    name, mode = key.split()
    with virtualgpu.use(1, like=like, values=False, host=host):
        return measure(name, mode, virtualgpu.host_time, 1)


def share_busy(real: dict[str, Any]) -> float:
    return real["busy"] / real["step"][1]


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]](*sys.argv[2:])
