"""Puzzles about several GPUs: their memory, and the copies between them."""

import torch
from torch import nn
from torch.nn import functional as F

from labkit.puzzles.definitions import PEAK, SENT, TIME, Puzzle

MIB = 1 << 20
MODEL = "T4"  # its links are slow, so that one sees what is sent
GPUS = 4
ROWS, CLASSES = (96, 160, 128, 128), 16384
LENGTHS = (1024, 896, 768, 640, 512, 384, 256, 128)
FEATURES, WORDS = 64, 4096
STEPS, HIDDEN = 4096, 64
LAYERS, WIDTH, BATCH = 48, 192, 512


def loss_of_all(outputs, targets):
    gathered = torch.cat([output.to("cuda:0") for output in outputs])
    wanted = torch.cat([target.to("cuda:0") for target in targets])
    return F.cross_entropy(gathered, wanted)


def passed_on(tensors):
    arrived = []
    for gpu, tensor in enumerate(tensors):
        target = (gpu + 1) % len(tensors)
        arrived.append(tensor.to(f"cuda:{target}"))
    return arrived


def highest_scores(texts, weights):
    count = len(texts) // len(weights)
    highest = []
    for number, text in enumerate(texts):
        weight = weights[number // count]
        scores = text.to(weight.device, non_blocking=True) @ weight
        highest.append(scores.amax(dim=0))
    return [scores.to("cuda:0") for scores in highest]


def all_reduced(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to("cuda:0")
    return [total.to(tensor.device) for tensor in tensors]


def read_by_all(layers, x):
    for gpu, layer in enumerate(layers):
        state, outputs = None, []
        for part in x.to(f"cuda:{gpu}").split(1024):
            output, state = layer(part, state)
            outputs.append(output)
        x = torch.cat(outputs)
    return x


def gradients_sent(weights, inputs, error):
    gradients = []
    for weight, x in zip(reversed(weights), reversed(inputs), strict=True):
        gradients.append(error.T @ x)
        error = error @ weight
    return [gradient.to("cuda:1") for gradient in gradients]


def _on_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy each of the tensors to a GPU of its own."""
    return [tensor.to(f"cuda:{gpu}") for gpu, tensor in enumerate(tensors)]


def _outputs(generator: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs = [torch.randn(rows, CLASSES, generator=generator) for rows in ROWS]
    targets = [torch.randint(CLASSES, (rows,), generator=generator) for rows in ROWS]
    return _on_all(outputs), _on_all(targets)


def _tensors(generator: torch.Generator) -> tuple[list[torch.Tensor]]:
    return (_on_all(list(torch.randn(GPUS, MIB, generator=generator))),)


def _whole_numbers(generator: torch.Generator) -> tuple[list[torch.Tensor]]:
    """Return int32 numbers that use all bits, so that no shorter dtype can hold them."""
    int32 = torch.iinfo(torch.int32)
    shape = GPUS, MIB
    numbers = torch.randint(int32.min, int32.max + 1, shape, dtype=torch.int32, generator=generator)
    return (_on_all(list(numbers)),)


def _texts(generator: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    texts = [torch.randn(length, FEATURES, generator=generator).double() for length in LENGTHS]
    texts = [text.pin_memory() for text in texts]
    weight = torch.randn(FEATURES, WORDS, generator=generator).double()
    return texts, _on_all([weight] * GPUS)


def _recurrent(generator: torch.Generator) -> tuple[list[nn.Module], torch.Tensor]:
    layers: list[nn.Module] = []
    for gpu in range(GPUS):
        layer = nn.RNN(HIDDEN, HIDDEN)
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator) / HIDDEN**0.5
            parameter.requires_grad_(False).copy_(values)
        layers.append(layer.to(f"cuda:{gpu}"))
    return layers, torch.randn(STEPS, 1, HIDDEN, generator=generator).cuda()


def _layers(
    generator: torch.Generator,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    weights = torch.randn(LAYERS, WIDTH, WIDTH, generator=generator).cuda() / WIDTH**0.5
    inputs = torch.randn(LAYERS, BATCH, WIDTH, generator=generator).cuda()
    return list(weights), list(inputs), torch.randn(BATCH, WIDTH, generator=generator).cuda()


NO_GATHERED_OUTPUTS = Puzzle(
    name="no gathered outputs",
    task="Return the same mean loss of all rows with a lower peak of memory.",
    lesson="03",
    function=loss_of_all,
    inputs=_outputs,
    score=PEAK,
    budget=25 * MIB,
    par=11.5 * MIB,
    gpus=GPUS,
    like=MODEL,
)
COPIES_AT_ONCE = Puzzle(
    name="copies at once",
    task="Return the same tensors, each on the next GPU, in less time.",
    lesson="04",
    function=passed_on,
    inputs=_tensors,
    score=TIME,
    budget=1.6e-3,
    par=0.8e-3,
    gpus=GPUS,
    like=MODEL,
)
EVEN_LOAD = Puzzle(
    name="even load",
    task="Return the same highest scores in less time.",
    lesson="03",
    function=highest_scores,
    inputs=_texts,
    score=TIME,
    budget=4.1e-3,
    par=3.6e-3,
    gpus=GPUS,
    like=MODEL,
    tolerance=1e-9,  # float32 would be less than half of the work
)
FEWER_BYTES = Puzzle(
    name="fewer bytes",
    task="Return the same sums, one on each GPU, and let the busiest GPU send fewer bytes.",
    lesson="10",
    function=all_reduced,
    inputs=_whole_numbers,
    score=SENT,
    budget=8 * MIB,
    par=6 * MIB,
    gpus=GPUS,
    like=MODEL,
)
ONE_BUBBLE = Puzzle(
    name="one bubble",
    task="Return the same outputs of the last layer in less time.",
    lesson="04",
    function=read_by_all,
    inputs=_recurrent,
    score=TIME,
    budget=20e-3,
    par=16.2e-3,
    gpus=GPUS,
    like=MODEL,
)
SMALL_BUCKETS = Puzzle(
    name="small buckets",
    task="Return the same gradients on the other GPU in less time.",
    lesson="10",
    function=gradients_sent,
    inputs=_layers,
    score=TIME,
    budget=3e-3,
    par=2.5e-3,
    gpus=2,
    like=MODEL,
)
