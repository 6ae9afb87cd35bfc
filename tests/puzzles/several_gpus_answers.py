"""Right and wrong answers to the puzzles about several GPUs.

`RIGHT` has three or more right answers for each puzzle, the best one last. `WRONG_OF` has answers
that are wrong in one puzzle, each with a word of the reason why it is refused.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

GPUS = range(4)


def _send(x, gpu, leaves, arrives, waits=True):
    """Copy a tensor to `gpu` on two streams. Return the copy and the event of its arrival.

    `leaves` and `arrives` are the streams of the two GPUs. `waits` says whether the copy waits for
    earlier work.
    """
    if waits:
        leaves.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(leaves), torch.cuda.stream(arrives):
        copied = x.to(f"cuda:{gpu}", non_blocking=True)
    x.record_stream(leaves)
    copied.record_stream(torch.cuda.current_stream(gpu))
    return copied, arrives.record_event()


def _receive(sent):
    copied, event = sent
    torch.cuda.current_stream(copied.device).wait_event(event)
    return copied


# No gathered outputs


def _loss_of_sums(outputs, targets):
    total = torch.zeros((), device="cuda:0")
    for output, target in zip(outputs, targets, strict=True):
        total += F.cross_entropy(output, target, reduction="sum").to("cuda:0")
    return total / sum(map(len, targets))


def _loss_with_gather(outputs, targets):
    losses = []
    for output, target in zip(outputs, targets, strict=True):
        parts = zip(output.split(64), target.split(64), strict=True)
        losses.append(torch.cat([F.cross_entropy(*part, reduction="none") for part in parts]))
    return nn.parallel.gather(losses, 0).mean()


def _loss_by_hand(outputs, targets):
    losses = []
    for output, target in zip(outputs, targets, strict=True):
        for part, wanted in zip(output.split(32), target.split(32), strict=True):
            chosen = part.gather(1, wanted[:, None])[:, 0]
            losses.append((part.logsumexp(dim=1) - chosen).to("cuda:0"))
    return torch.cat(losses).mean()


def _loss_in_groups(outputs, targets):
    total = torch.zeros((), device="cuda:0")
    for output, target in zip(outputs, targets, strict=True):
        for part, wanted in zip(output.split(16), target.split(16), strict=True):
            total += F.cross_entropy(part, wanted, reduction="sum").to("cuda:0")
    return total / sum(map(len, targets))


def _mean_of_means(outputs, targets):
    means = [F.cross_entropy(*pair).to("cuda:0") for pair in zip(outputs, targets, strict=True)]
    return torch.stack(means).mean()


def _sum_of_means(outputs, targets):
    return sum(F.cross_entropy(*pair).to("cuda:0") for pair in zip(outputs, targets, strict=True))


def _loss_of_one_gpu_after_another(outputs, targets):
    total = 0.0
    for output, target in zip(outputs, targets, strict=True):
        on_first = output.to("cuda:0"), target.to("cuda:0")
        total = total + F.cross_entropy(*on_first, reduction="sum")
    return total / sum(map(len, targets))


def _loss_gathered_in_half(outputs, targets):
    gathered = torch.cat([output.half().to("cuda:0") for output in outputs])
    return F.cross_entropy(gathered.float(), torch.cat([target.to("cuda:0") for target in targets]))


def _loss_of_every_second_row(outputs, targets):
    return _loss_of_sums([x[::2] for x in outputs], [target[::2] for target in targets])


def _loss_of_the_host(outputs, targets):
    on_host = torch.cat([output.cpu() for output in outputs])
    return F.cross_entropy(on_host, torch.cat([target.cpu() for target in targets])).to("cuda:0")


def _loss_on_the_last_gpu(outputs, targets):
    return _loss_of_sums(outputs, targets).to("cuda:3")


# Copies at once


def _in_two_rounds(tensors):
    arrived = list(tensors)
    for gpu in (0, 2, 1, 3):
        arrived[gpu] = tensors[gpu].to(f"cuda:{(gpu + 1) % 4}")
    return arrived


def _on_two_streams_each(tensors):
    sent = []
    for gpu, tensor in enumerate(tensors):
        target = (gpu + 1) % 4
        sent.append(_send(tensor, target, torch.cuda.Stream(gpu), torch.cuda.Stream(target)))
    return [_receive(one) for one in sent]


def _and_the_host_waits(tensors):
    arrived = []
    for gpu, tensor in enumerate(tensors):
        with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream()):
            arrived.append(tensor.to(f"cuda:{(gpu + 1) % 4}", non_blocking=True))
    for gpu in GPUS:
        torch.cuda.synchronize(gpu)
    return arrived


def _on_the_source_streams(tensors):
    arrived = []
    for gpu, tensor in enumerate(tensors):
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            arrived.append(tensor.to(f"cuda:{(gpu + 1) % 4}"))
    return arrived


def _nobody_waits(tensors):
    streams = [(torch.cuda.Stream(gpu), torch.cuda.Stream((gpu + 1) % 4)) for gpu in GPUS]
    return [_send(x, (gpu + 1) % 4, *streams[gpu])[0] for gpu, x in enumerate(tensors)]


def _not_passed_on(tensors):
    return [tensor.clone() for tensor in tensors]


def _passed_back(tensors):
    return [tensor.to(f"cuda:{(gpu - 1) % 4}") for gpu, tensor in enumerate(tensors)]


def _through_the_host(tensors):
    return [tensor.cpu().to(f"cuda:{(gpu + 1) % 4}") for gpu, tensor in enumerate(tensors)]


def _passed_on_in_half(tensors):
    return [tensor.half().to(f"cuda:{(gpu + 1) % 4}").float() for gpu, tensor in enumerate(tensors)]


def _first_half_passed_on(tensors):
    arrived = [torch.zeros_like(x, device=f"cuda:{(gpu + 1) % 4}") for gpu, x in enumerate(tensors)]
    for target, tensor in zip(arrived, tensors, strict=True):
        half = len(tensor) // 2
        target[:half] = tensor[:half]
    return arrived


# Even load


def _scores(texts, weights, gpus):
    """Compute the scores of each text on the GPU with the number in `gpus`."""
    highest = []
    for text, gpu in zip(texts, gpus, strict=True):
        highest.append((text.to(f"cuda:{gpu}", non_blocking=True) @ weights[gpu]).amax(dim=0))
    return [scores.to("cuda:0") for scores in highest]


def _scores_of_parallel_apply(texts, weights):
    class Model(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, *texts):
            return torch.stack([(text @ self.weight).amax(dim=0) for text in texts])

    groups = [(gpu, 7 - gpu) for gpu in GPUS]
    given = [tuple(texts[i].to(f"cuda:{gpu}") for i in group) for gpu, group in enumerate(groups)]
    outputs = nn.parallel.parallel_apply([Model(weight) for weight in weights], given)
    results = nn.parallel.gather(outputs, 0)
    order = [number for group in groups for number in group]
    return [results[order.index(number)] for number in range(len(texts))]


def _scores_of_row_groups(texts, weights):
    """Give each GPU a quarter of each text, and combine the maxima."""
    highest = [[] for _ in weights]
    for text in texts:
        for gpu, part in enumerate(text.chunk(4)):
            scores = part.to(f"cuda:{gpu}", non_blocking=True) @ weights[gpu]
            highest[gpu].append(scores.amax(dim=0))
    parts = [torch.stack(each).to("cuda:0") for each in highest]
    return list(torch.stack(parts).amax(dim=0))


def _scores_of_word_groups(texts, weights):
    """Give each GPU a quarter of the words."""
    quarters = [weight.chunk(4, dim=1)[gpu].contiguous() for gpu, weight in enumerate(weights)]
    highest = [[] for _ in weights]
    for text in texts:
        for gpu, quarter in enumerate(quarters):
            scores = text.to(f"cuda:{gpu}", non_blocking=True) @ quarter
            highest[gpu].append(scores.amax(dim=0))
    return list(torch.cat([torch.stack(each).to("cuda:0") for each in highest], dim=1))


def _scores_of_the_longest_first(texts, weights):
    loads, gpus = [0] * 4, []
    for text in texts:
        gpus.append(loads.index(min(loads)))
        loads[gpus[-1]] += len(text)
    return _scores(texts, weights, gpus)


def _scores_there_and_back(texts, weights):
    return _scores(texts, weights, [0, 1, 2, 3, 3, 2, 1, 0])


def _scores_in_turn(texts, weights):
    return _scores(texts, weights, [0, 1, 2, 3] * 2)


def _scores_of_one_gpu(texts, weights):
    return _scores(texts, weights, [0] * 8)


def _scores_in_float32(texts, weights):
    texts = [text.float().pin_memory() for text in texts]
    weights = [weight.float() for weight in weights]
    return [scores.double() for scores in _scores_there_and_back(texts, weights)]


def _scores_of_every_second_row(texts, weights):
    return _scores_there_and_back([text[::2] for text in texts], weights)


def _scores_left_on_their_gpus(texts, weights):
    gpus = [0, 1, 2, 3, 3, 2, 1, 0]
    return [
        (text.to(f"cuda:{gpu}") @ weights[gpu]).amax(dim=0)
        for text, gpu in zip(texts, gpus, strict=True)
    ]


def _scores_gathered_too_early(texts, weights):
    gpus = [0, 1, 2, 3, 3, 2, 1, 0]
    return [
        (text.to(f"cuda:{gpu}", non_blocking=True) @ weights[gpu]).amax(dim=0).to("cuda:0")
        for text, gpu in zip(texts, gpus, strict=True)
    ]


def _scores_of_the_host(texts, weights):
    weight = weights[0].cpu()
    return [(text @ weight).amax(dim=0).cuda() for text in texts]


# Fewer bytes


def _sums_in_a_chain(tensors):
    total = tensors[0]
    for tensor in tensors[1:]:
        total = tensor + total.to(tensor.device)
    sums = [total]
    for gpu in (2, 1, 0):
        sums.insert(0, sums[0].to(f"cuda:{gpu}"))
    return sums


def _sums_of_parts(tensors, parts):
    """Sum the tensors. Each of the `parts` parts is added up on another GPU."""
    sums = [torch.empty_like(tensor) for tensor in tensors]
    for number in range(parts):
        home = f"cuda:{number % 4}"
        total = sum(tensor.tensor_split(parts)[number].to(home) for tensor in tensors)
        for result in sums:
            result.tensor_split(parts)[number].copy_(total)
    return sums


def _sums_of_three_parts(tensors):
    return _sums_of_parts(tensors, 3)


def _sums_of_seven_parts(tensors):
    return _sums_of_parts(tensors, 7)


def _sums_of_the_librarys_functions(tensors):
    chunks = [tensor.chunk(4) for tensor in tensors]
    whole = []
    for gpu in GPUS:
        total = nn.parallel.comm.reduce_add([parts[gpu] for parts in chunks], gpu)
        others = [other for other in GPUS if other != gpu]
        copies = nn.parallel.comm.broadcast(total, [gpu, *others])
        whole.append(sorted(copies, key=lambda part: part.get_device()))
    return [torch.cat(parts) for parts in zip(*whole, strict=True)]


def _sums_in_a_ring(tensors):
    chunks = [[part.clone() for part in tensor.chunk(4)] for tensor in tensors]
    for step in range(6):
        for gpu in GPUS:
            number, target = (gpu - step) % 4, (gpu + 1) % 4
            part = chunks[gpu][number].to(f"cuda:{target}")
            chunks[target][number] = part if step >= 3 else chunks[target][number] + part
    return [torch.cat(parts) for parts in chunks]


def _sums_of_rounded_numbers(tensors):
    """Sum tensors that are rounded to 16-bit integers, in units of the largest number."""

    def sent(tensor, gpu):
        unit = tensor.double().abs().max() / 32767
        rounded = (tensor / unit).round().to(torch.int16)
        return (rounded.to(gpu) * unit.to(gpu)).to(tensor.dtype)

    first, *others = tensors
    total = first.clone()
    for tensor in others:
        total += sent(tensor, "cuda:0")
    return [total, *(sent(total, tensor.device) for tensor in others)]


def _sums_in_half(tensors):
    return [sum.float() for sum in _sums_in_a_ring([tensor.half() for tensor in tensors])]


def _the_same_sum(tensors):
    return [sum(tensor.to("cuda:0") for tensor in tensors)] * 4


def _sums_of_the_host(tensors):
    total = sum(tensor.cpu() for tensor in tensors)
    return [total.to(tensor.device) for tensor in tensors]


def _sums_in_the_arguments(tensors):
    for tensor, total in zip(tensors, _sums_in_a_ring(tensors), strict=True):
        tensor.copy_(total)
    return tensors


def _everybody_sends_everything(tensors):
    return [sum(tensor.to(f"cuda:{gpu}") for tensor in tensors) for gpu in GPUS]


def _means(tensors):
    return [total // 4 for total in _sums_in_a_ring(tensors)]


def _neighbours_alone(tensors):
    return [tensors[gpu] + tensors[gpu - 1].to(f"cuda:{gpu}") for gpu in GPUS]


# One bubble


def _pipeline(layers, x, rows, send):
    """Send groups of `rows` rows through all layers, one group after the other.

    `send` copies a group to the next layer's GPU.
    """
    states, outputs = [None] * 4, []
    for part in x.split(rows):
        for gpu, layer in enumerate(layers):
            part = part if gpu == 0 else send(part, gpu)
            part, states[gpu] = layer(part, states[gpu])
        outputs.append(part)
    return torch.cat(outputs)


def _to(x, gpu):
    return x.to(f"cuda:{gpu}")


def _pipeline_of_eight_parts(layers, x):
    return _pipeline(layers, x, 512, _to)


def _pipeline_by_diagonals(layers, x):
    parts, states = list(x.split(256)), [None] * 4
    for round in range(len(parts) + 3):
        for gpu in reversed(GPUS):
            number = round - gpu
            if 0 <= number < len(parts):
                given = parts[number].to(f"cuda:{gpu}")
                parts[number], states[gpu] = layers[gpu](given, states[gpu])
    return torch.cat(parts)


def _layer_by_layer_with_sends(layers, x):
    parts = list(x.split(256))
    for gpu, layer in enumerate(layers):
        state, streams = None, None
        if gpu < 3:
            streams = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu + 1)
        for number, part in enumerate(parts):
            output, state = layer(part if gpu == 0 else _receive(part), state)
            parts[number] = _send(output, gpu + 1, *streams) if streams else output
    return torch.cat(parts)


def _on_four_streams_of_one_gpu(layers, x):
    layers = [copy.deepcopy(layer).to("cuda:0") for layer in layers]
    here, streams = torch.cuda.current_stream(0), [torch.cuda.Stream(0) for _ in layers]
    for stream in streams:
        stream.wait_stream(here)
    states, outputs = [None] * 4, []
    for part in x.split(256):
        for number, (layer, stream) in enumerate(zip(layers, streams, strict=True)):
            if number:
                stream.wait_stream(streams[number - 1])
            part.record_stream(stream)
            with torch.cuda.stream(stream):
                part, states[number] = layer(part, states[number])
        outputs.append(part)
    for stream in streams:
        here.wait_stream(stream)
    return torch.cat(outputs).to("cuda:3")


def _pipeline_with_sends(layers, x, waits=True):
    streams = [(torch.cuda.Stream(gpu), torch.cuda.Stream(gpu + 1)) for gpu in range(3)]

    def send(part, gpu):
        sent = _send(part, gpu, *streams[gpu - 1], waits)
        return _receive(sent) if waits else sent[0]

    return _pipeline(layers, x, 256, send)


def _pipeline_that_does_not_wait(layers, x):
    return _pipeline_with_sends(layers, x, waits=False)


def _pipeline_of_four_parts(layers, x):
    return _pipeline(layers, x, 1024, _to)


def _pipeline_of_short_parts(layers, x):
    return _pipeline(layers, x, 64, _to)


def _pipeline_without_states(layers, x):
    outputs = []
    for part in x.split(256):
        for gpu, layer in enumerate(layers):
            part, _ = layer(part.to(f"cuda:{gpu}"))
        outputs.append(part)
    return torch.cat(outputs)


def _pipeline_in_half(layers, x):
    layers = [copy.deepcopy(layer).half() for layer in layers]
    return _pipeline(layers, x.half(), 256, _to).float()


def _pipeline_without_the_last_layer(layers, x):
    return _pipeline(layers[:3], x, 256, _to).to("cuda:3")


def _every_second_step(layers, x):
    return _pipeline(layers, x[::2], 256, _to).repeat_interleave(2, dim=0)


def _outputs_on_the_first_gpu(layers, x):
    return _pipeline(layers, x, 256, _to).to("cuda:0")


# Small buckets


def _in_buckets(weights, inputs, error, size, orders=True, records=True):
    """Send buckets of `size` gradients to the first GPU on a stream of their own.

    With `orders` and `records` off, the answer forgets to wait or to call `record_stream`.
    """
    here, side, there = torch.cuda.current_stream(0), torch.cuda.Stream(0), torch.cuda.Stream(1)
    bucket, sent = [], []
    for number in reversed(range(len(weights))):
        bucket.append(error.T @ inputs[number])
        if len(bucket) == size or number == 0:
            flat, bucket = torch.stack(bucket), []
            if orders:
                side.wait_stream(here)
            with torch.cuda.stream(side), torch.cuda.stream(there):
                arrived = flat.to("cuda:1", non_blocking=True)
            if records:
                flat.record_stream(side)
            arrived.record_stream(torch.cuda.current_stream(1))
            sent += arrived
        if number:
            error = error @ weights[number]
    torch.cuda.current_stream(1).wait_stream(there)
    return sent


def _in_buckets_of_16(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 16)


def _in_buckets_of_two(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 2)


def _in_buckets_of_four(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 4)


def _all_products_of_a_bucket_at_once(weights, inputs, error):
    errors = [error]
    for weight in reversed(weights[1:]):
        errors.append(errors[-1] @ weight)
    errors, inputs = torch.stack(errors), torch.stack(inputs[::-1])
    here, side, sent = torch.cuda.current_stream(0), torch.cuda.Stream(0), []
    for first in range(0, len(weights), 8):
        part = slice(first, first + 8)
        gradients = errors[part].transpose(1, 2) @ inputs[part]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            sent += gradients.to("cuda:1", non_blocking=True)
        gradients.record_stream(side)
    return sent


def _in_one_tensor(weights, inputs, error, size=4):
    """Write the gradients into one tensor on the first GPU, and copy slices of it.

    A slice has `size` gradients.
    """
    count = len(weights)
    here = torch.empty(count, *weights[0].shape, device="cuda:0")
    there = torch.empty(here.shape, device="cuda:1")
    main, side = torch.cuda.current_stream(0), torch.cuda.Stream(0)
    for number, (weight, x) in enumerate(zip(weights[::-1], inputs[::-1], strict=True), 1):
        torch.mm(error.T, x, out=here[number - 1])
        if number % size == 0:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                there[number - size : number].copy_(here[number - size : number])
        if number < count:
            error = error @ weight
    here.record_stream(side)
    return list(there)


def _one_by_one(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 1)


def _sent_before_it_is_computed(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 4, orders=False)


def _freed_before_it_is_sent(weights, inputs, error):
    return _in_buckets(weights, inputs, error, 4, records=False)


def _all_in_one_bucket(weights, inputs, error):
    return _in_buckets(weights, inputs, error, len(weights))


def _gradients_in_half(weights, inputs, error):
    gradients = []
    for weight, x in zip(weights[::-1], inputs[::-1], strict=True):
        gradients.append((error.T @ x).half())
        error = error @ weight
    return list(torch.stack(gradients).to("cuda:1").float())


def _computed_on_the_other_gpu(weights, inputs, error):
    weights = list(torch.stack(weights).to("cuda:1"))
    inputs, error = list(torch.stack(inputs).to("cuda:1")), error.to("cuda:1")
    gradients = []
    for weight, x in zip(weights[::-1], inputs[::-1], strict=True):
        gradients.append(error.T @ x)
        error = error @ weight
    return gradients


def _from_the_first_layer_on(weights, inputs, error):
    return _in_buckets_of_four(weights, inputs, error)[::-1]


def _of_half_of_the_rows(weights, inputs, error):
    return _in_buckets_of_four(weights, [x[::2] for x in inputs], 2 * error[::2])


def _gradients_stay(weights, inputs, error):
    return [gradient.to("cuda:0") for gradient in _in_buckets_of_four(weights, inputs, error)]


RIGHT = {
    "no gathered outputs": [_loss_of_sums, _loss_with_gather, _loss_by_hand, _loss_in_groups],
    "copies at once": [
        _in_two_rounds,
        _and_the_host_waits,
        _on_two_streams_each,
        _on_the_source_streams,
    ],
    "even load": [
        _scores_of_word_groups,
        _scores_of_row_groups,
        _scores_of_parallel_apply,
        _scores_of_the_longest_first,
        _scores_there_and_back,
    ],
    "fewer bytes": [
        _sums_in_a_chain,
        _sums_of_three_parts,
        _sums_of_seven_parts,
        _sums_in_a_ring,
    ],
    "one bubble": [
        _layer_by_layer_with_sends,
        _pipeline_of_eight_parts,
        _pipeline_by_diagonals,
        _on_four_streams_of_one_gpu,
        _pipeline_with_sends,
    ],
    "small buckets": [
        _all_products_of_a_bucket_at_once,
        _in_buckets_of_16,
        _in_buckets_of_two,
        _in_buckets_of_four,
        _in_one_tensor,
    ],
}
WRONG_OF = [
    ("no gathered outputs", _mean_of_means, "differs"),
    ("no gathered outputs", _sum_of_means, "differs"),
    ("no gathered outputs", _loss_of_one_gpu_after_another, "budget"),
    ("no gathered outputs", _loss_gathered_in_half, "budget"),
    ("no gathered outputs", _loss_of_every_second_row, "differs"),
    ("no gathered outputs", _loss_of_the_host, "copies to the host"),
    ("no gathered outputs", _loss_on_the_last_gpu, "on cuda:3"),
    ("copies at once", _nobody_waits, "race"),
    ("copies at once", _not_passed_on, "on cuda:0"),
    ("copies at once", _passed_back, "on cuda:3"),
    ("copies at once", _through_the_host, "copies to the host"),
    ("copies at once", _passed_on_in_half, "differs"),
    ("copies at once", _first_half_passed_on, "differs"),
    ("even load", _scores_in_turn, "budget"),
    ("even load", _scores_of_one_gpu, "budget"),
    ("even load", _scores_in_float32, "differs"),
    ("even load", _scores_of_every_second_row, "differs"),
    ("even load", _scores_left_on_their_gpus, "on cuda:1"),
    ("even load", _scores_gathered_too_early, "budget"),
    ("even load", _scores_of_the_host, "copies to the host"),
    ("fewer bytes", _sums_in_half, "is a tensor of"),
    ("fewer bytes", _sums_of_rounded_numbers, "differs"),
    ("fewer bytes", _the_same_sum, "on cuda:0"),
    ("fewer bytes", _sums_of_the_host, "copies to the host"),
    ("fewer bytes", _sums_in_the_arguments, "changed a tensor"),
    ("fewer bytes", _everybody_sends_everything, "budget"),
    ("fewer bytes", _means, "differs"),
    ("fewer bytes", _neighbours_alone, "differs"),
    ("one bubble", _pipeline_that_does_not_wait, "race"),
    ("one bubble", _pipeline_of_four_parts, "budget"),
    ("one bubble", _pipeline_of_short_parts, "budget"),
    ("one bubble", _pipeline_without_states, "differs"),
    ("one bubble", _pipeline_in_half, "differs"),
    ("one bubble", _pipeline_without_the_last_layer, "differs"),
    ("one bubble", _every_second_step, "differs"),
    ("one bubble", _outputs_on_the_first_gpu, "on cuda:0"),
    ("small buckets", _one_by_one, "budget"),
    ("small buckets", _sent_before_it_is_computed, "race"),
    ("small buckets", _freed_before_it_is_sent, "race"),
    ("small buckets", _all_in_one_bucket, "budget"),
    ("small buckets", _gradients_in_half, "differs"),
    ("small buckets", _computed_on_the_other_gpu, "budget"),
    ("small buckets", _from_the_first_layer_on, "differs"),
    ("small buckets", _of_half_of_the_rows, "differs"),
    ("small buckets", _gradients_stay, "on cuda:0"),
]
