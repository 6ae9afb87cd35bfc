"""Answers to the puzzles: three right ones for each, with different scores, the best one last.

There are also other right answers, and wrong ones.
"""

import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import cross_entropy, gelu, mse_loss
from torch.utils.checkpoint import checkpoint


def _contrast_with_del(image):
    centred = image - image.mean()
    root = centred.abs().sqrt()
    sign = centred.sign()
    del centred
    return root * sign


def _contrast_in_place(image):
    centred = image - image.mean()
    root = centred.abs().sqrt_()
    return root.mul_(centred.sign_())


def _contrast_in_parts(image):
    mean, result = image.mean(), torch.empty_like(image)
    for part, out in zip(image.split(1 << 18), result.split(1 << 18), strict=True):
        centred = part - mean
        torch.mul(centred.abs().sqrt_(), centred.sign_(), out=out)
    return result


def _nearest_with_cdist(points, centres):
    return torch.cdist(points, centres).amin(dim=1)


def _nearest_in_groups(points, centres):
    parts = []
    for part in points.split(256):
        parts.append((part[:, None] - centres).square_().sum(dim=2).amin(dim=1))
    return torch.cat(parts).sqrt()


def _nearest_in_small_groups(points, centres):
    parts = []
    for part in points.split(64):
        parts.append((part[:, None] - centres).square_().sum(dim=2).amin(dim=1))
    return torch.cat(parts).sqrt()


def _softmax_by_hand(scores):
    powers = (scores - scores.amax(dim=1, keepdim=True)).exp()
    return powers / powers.sum(dim=1, keepdim=True)


def _softmax_in_place(scores):
    return scores.log_softmax(dim=1).exp_()


def _softmax(scores):
    return scores.softmax(dim=1)


def _clipped_with_clamp(gradients):
    return [gradient / gradient.norm().clamp(min=1) for gradient in gradients]


def _clipped_with_where(gradients):
    results = []
    for gradient in gradients:
        norm = gradient.norm()
        results.append(torch.where(norm > 1, gradient / norm, gradient))
    return results


def _clipped_together(gradients):
    stacked = torch.stack(gradients)
    norms = torch.linalg.vector_norm(stacked, dim=1, keepdim=True)
    return list(stacked / norms.clamp(min=1))


RIGHT = {
    "free first": [_contrast_with_del, _contrast_in_place, _contrast_in_parts],
    "no temporary": [_nearest_with_cdist, _nearest_in_groups, _nearest_in_small_groups],
    "one launch": [_softmax_by_hand, _softmax_in_place, _softmax],
    "hidden wait": [_clipped_with_clamp, _clipped_with_where, _clipped_together],
}
# The best possible score of these puzzles is 0, so all right answers have the same score.
SAME_SCORE = {"hidden wait"}


def _loss_in_groups(rows, weight, targets, size=64):
    """Return the loss and the gradients, computed from groups of `size` rows."""
    loss, of_rows, of_weight = 0.0, [], torch.zeros_like(weight)
    for part, target in zip(rows.split(size), targets.split(size), strict=True):
        total = cross_entropy(part @ weight.T, target, reduction="sum") / len(rows)
        loss = loss + total.detach()
        gradient, more = torch.autograd.grad(total, (part, weight))
        del total
        of_rows.append(gradient)
        of_weight += more
        del more
    return loss, torch.cat(of_rows), of_weight


def _loss_in_small_groups(rows, weight, targets):
    return _loss_in_groups(rows, weight, targets, size=32)


def _loss_in_pieces(rows, weight, targets):
    return _loss_in_groups(rows, weight, targets, size=16)


def _cache_in_one_call(keys):
    return torch.cat(keys)


def _cache_of_two_halves(keys):
    half = len(keys) // 2
    return torch.cat([torch.cat(keys[:half]), torch.cat(keys[half:])])


def _cache_doubled(keys):
    """Return the cache of all keys. Its memory doubles whenever it is full."""
    cache, used = keys[0], len(keys[0])
    for key in keys[1:]:
        if used + len(key) > len(cache):
            cache = torch.cat([cache, torch.empty_like(cache)])
        cache[used : used + len(key)] = key
        used += len(key)
    return cache[:used]


def _mean_added_up(inputs, errors):
    total = torch.zeros(errors.shape[2], inputs.shape[2], device="cuda")
    for x, error in zip(inputs, errors, strict=True):
        total += error.T @ x
    return total.div_(len(inputs))


def _mean_of_new_sums(inputs, errors):
    total = torch.zeros(errors.shape[2], inputs.shape[2], device="cuda")
    for x, error in zip(inputs, errors, strict=True):
        total = total + error.T @ x
    return total.div_(len(inputs))


def _mean_in_the_product(inputs, errors):
    total = torch.zeros(errors.shape[2], inputs.shape[2], device="cuda")
    for x, error in zip(inputs, errors, strict=True):
        total.addmm_(error.T, x, alpha=1 / len(inputs))
    return total


def _gradients_of_all_losses(rows, weights):
    losses = []
    for number, weight in enumerate(weights, 1):
        rows = (rows @ weight).tanh()
        losses.append(rows.square().mean() * number)
    return list(torch.autograd.grad(losses, weights))


def _gradients_of_the_sum(rows, weights):
    total = 0.0
    for number, weight in enumerate(weights, 1):
        rows = (rows @ weight).tanh()
        total = total + rows.square().mean() * number
    return list(torch.autograd.grad(total, weights))


def _gradients_of_norms(rows, weights):
    losses = []
    for number, weight in enumerate(weights, 1):
        rows = (rows @ weight).tanh()
        losses.append(mse_loss(rows, torch.zeros_like(rows)) * number)
    return list(torch.autograd.grad(losses, weights))


RIGHT |= {
    "50,000 classes": [_loss_in_groups, _loss_in_small_groups, _loss_in_pieces],
    "growing cache": [_cache_doubled, _cache_of_two_halves, _cache_in_one_call],
    "no spike": [_mean_added_up, _mean_of_new_sums, _mean_in_the_product],
    "one backward pass": [_gradients_of_all_losses, _gradients_of_the_sum, _gradients_of_norms],
}


def _copied_beside(batches, weight):
    """Copy each batch on a second stream while the product before it runs."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    results = []
    for batch in batches:
        with torch.cuda.stream(side):
            x = batch.cuda(non_blocking=True)
        here.wait_stream(side)
        x.record_stream(here)
        results.append(x @ weight)
    return results


def _copied_beside_in_parts(batches, weight):
    """Copy the last batch in parts, so that less is left to do after its copy."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    results = _copied_beside(batches[:-1], weight)
    last = torch.empty(batches[-1].shape[0], weight.shape[1], device="cuda")
    for part, result in zip(batches[-1].split(128), last.split(128), strict=True):
        with torch.cuda.stream(side):
            x = part.cuda(non_blocking=True)
        here.wait_stream(side)
        x.record_stream(here)
        torch.mm(x, weight, out=result)
    return [*results, last]


def _copied_into_one_tensor(batches, weight):
    """Copy all batches into one tensor, which no other work uses."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    copies = torch.empty(len(batches), *batches[0].shape, device="cuda")
    side.wait_stream(here)
    results = []
    for batch, x in zip(batches, copies, strict=True):
        with torch.cuda.stream(side):
            x.copy_(batch, non_blocking=True)
        here.wait_stream(side)
        results.append(x @ weight)
    return results


def copied_with_events(batches, weight):
    """Launch all copies first. Each product waits for an event after its copy."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    copies, results = [], []
    with torch.cuda.stream(side):
        for batch in batches:
            copies.append((batch.cuda(non_blocking=True), side.record_event()))
    for x, ready in copies:
        here.wait_event(ready)
        results.append(x @ weight)
    side.wait_stream(here)
    return results


def ring(batches, shape, work, count=2):
    """Copy batches into `count` buffers in turn, and return `work(buffer)` of each batch.

    `shape` is the shape of a buffer.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [torch.empty(shape, device="cuda") for _ in range(count)]
    used = [None] * count
    side.wait_stream(here)
    results = []
    for index, batch in enumerate(batches):
        number = index % count
        if used[number] is not None:
            side.wait_event(used[number])
        with torch.cuda.stream(side):
            buffers[number].copy_(batch, non_blocking=True)
        here.wait_stream(side)
        results.append(work(buffers[number]))
        used[number] = here.record_event()
    return results


def _two_buffers(batches, weight):
    return ring(batches, batches[0].shape, lambda x: x @ weight)


def _three_buffers(batches, weight):
    return ring(batches, batches[0].shape, lambda x: x @ weight, count=3)


def checkpointed(tokens, blocks, block, which=0):
    """Return the gradients of a network with checkpointed blocks.

    `block` replaces the computation of the block with the number `which`.
    """
    for number, (up, down) in enumerate(blocks):
        if number == which:
            tokens = block(tokens, up, down)
        else:
            tokens = _block(tokens, up, down)
    weights = [weight for both in blocks for weight in both]
    return torch.autograd.grad(tokens.square().mean(), weights)


def _block(tokens, up, down):
    return tokens + gelu(tokens @ up) @ down


def _with_checkpoint(tokens, up, down):
    return checkpoint(_block, tokens, up, down, use_reentrant=False)


def _first_block(tokens, blocks):
    return checkpointed(tokens, blocks, _with_checkpoint)


def _first_block_in_halves(tokens, blocks):
    def halves(tokens, up, down):
        return torch.cat([_with_checkpoint(half, up, down) for half in tokens.chunk(2)])

    return checkpointed(tokens, blocks, halves)


def _first_block_by_hand(tokens, blocks):
    """Return the gradients. The first block is computed again by hand, without `checkpoint`."""
    (up, down), *others = blocks
    with torch.no_grad():
        first = _block(tokens, up, down)
    first.requires_grad_()
    result = first
    for block in others:
        result = _block(result, *block)
    weights = [weight for block in others for weight in block]
    gradient, *later = torch.autograd.grad(result.square().mean(), [first, *weights])
    del result
    again = _block(tokens, up, down)
    return (*torch.autograd.grad(again, (up, down), gradient), *later)


def _largest(weight):
    return lambda x: (x @ weight).amax(dim=1)


def _largest_with_two_buffers(batches, weight):
    return ring(batches, batches[0].shape, _largest(weight))


def _largest_with_three_buffers(batches, weight):
    return ring(batches, batches[0].shape, _largest(weight), count=3)


def _largest_of_parts(batches, weight):
    """Return each batch's result, after its quarters were copied through two small buffers.

    The results of the four quarters are joined.
    """
    parts = [part for batch in batches for part in batch.chunk(4)]
    largest = ring(parts, parts[0].shape, _largest(weight))
    return [torch.cat(largest[index : index + 4]) for index in range(0, len(largest), 4)]


def copies_freed_in_order(batches, work):
    """Copy batches on a second stream, and free each copy in order of its use.

    A copy is freed when the second stream has waited for the work that used the copy.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    old, results = [], []
    for batch in batches:
        if len(old) == 2:
            used, x = old.pop(0)
            side.wait_event(used)
            del x
        with torch.cuda.stream(side):
            x = batch.cuda(non_blocking=True)
        here.wait_stream(side)
        results.append(work(x))
        old.append((here.record_event(), x))
        del x
    side.wait_stream(here)
    return results


def largest_in_order(batches, weight):
    return copies_freed_in_order(batches, _largest(weight))


def largest_with_waits_of_the_host(batches, weight):
    """Return the results of a loop in which the host waits before each copy is reused.

    The host waits until the product before the last is done. The loop also calls `record_stream`.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    done, results = [], []
    for batch in batches:
        if len(done) > 1:
            done[-2].synchronize()
        with torch.cuda.stream(side):
            x = batch.cuda(non_blocking=True)
        here.wait_stream(side)
        x.record_stream(here)
        results.append((x @ weight).amax(dim=1))
        done.append(here.record_event())
    return results


class _Layers:
    """Layers that are applied to rows, one after the other."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, weight):
        self.rows = (self.rows @ weight).tanh()


def _layers_with_two_buffers(rows, weights):
    layers = _Layers(rows)
    ring(weights, weights[0].shape, layers)
    return layers.rows


def _layers_with_three_buffers(rows, weights):
    layers = _Layers(rows)
    ring(weights, weights[0].shape, layers, count=3)
    return layers.rows


def _layers_freed_in_order(rows, weights):
    layers = _Layers(rows)
    copies_freed_in_order(weights, layers)
    return layers.rows


def _step(weights, batch):
    """Change the weights in place by one training step on a batch."""
    rows = batch
    for weight in weights:
        rows = (rows @ weight).tanh()
    gradients = torch.autograd.grad(mse_loss(rows, batch), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= gradient


def _trained_with_a_graph(weights, batches, warm_up=0):
    """Return trained weights. A captured graph of one step is replayed for each batch.

    Before the capture, `warm_up` steps run, whose effect on the weights is undone.
    """
    weights = [weight.clone().requires_grad_() for weight in weights]
    batch = batches[0].clone()
    if warm_up:
        before = [weight.detach().clone() for weight in weights]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                _step(weights, batch)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _step(weights, batch)
    for each in batches:
        batch.copy_(each)
        graph.replay()
    return [weight.detach() for weight in weights]


def _trained_after_a_warm_up(weights, batches):
    return _trained_with_a_graph(weights, batches, warm_up=3)


def trained_two_steps_per_graph(weights, batches):
    weights = [weight.clone().requires_grad_() for weight in weights]
    both = [batch.clone() for batch in batches[:2]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in both:
            _step(weights, batch)
    for index in range(0, len(batches), 2):
        torch._foreach_copy_(both, batches[index : index + 2])
        graph.replay()
    return [weight.detach() for weight in weights]


def _trained_with_sgd(weights, batches):
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    batch = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = batch
        for weight in parameters:
            rows = (rows @ weight).tanh()
        optimizer.zero_grad()
        mse_loss(rows, batch).backward()
        optimizer.step()
    for each in batches:
        batch.copy_(each)
        graph.replay()
    return [weight.detach() for weight in parameters]


RIGHT |= {
    "hidden copies": [_copied_beside_in_parts, _copied_beside, _copied_into_one_tensor],
    "exact waits": [_copied_beside, _three_buffers, _two_buffers],
    "one checkpoint": [_first_block_by_hand, _first_block, _first_block_in_halves],
    "two streams, one allocator": [
        _largest_with_three_buffers,
        _largest_with_two_buffers,
        _largest_of_parts,
    ],
    "next layer": [
        _layers_freed_in_order,
        _layers_with_three_buffers,
        _layers_with_two_buffers,
    ],
    "one graph": [_trained_after_a_warm_up, _trained_with_sgd, _trained_with_a_graph],
}


def softmax_in_a_pool(scores):
    """Return the softmax, computed in a pool of threads that nobody closes."""
    return ThreadPoolExecutor(2).submit(torch.softmax, scores, 1).result()


class Contrast(torch.nn.Module):
    """An answer to the puzzle "contrast" that is a module instead of a function."""

    def forward(self, image):
        return _contrast_in_place(image)


def _cache_through_foreach(keys):
    cache = torch.empty(len(keys), *keys[0].shape, device=keys[0].device)
    torch._foreach_copy_(list(cache), keys)
    return cache.flatten(0, 1)


def _nearest_of_each_point(points, centres):
    def nearest(point):
        return (point - centres).norm(dim=1).min()

    return torch.vmap(nearest, chunk_size=64)(points)


def _mean_of_one_product(inputs, errors):
    return (errors.flatten(0, 1).T @ inputs.flatten(0, 1)).div_(len(inputs))


def _clipped_as_an_optimizer_does(gradients):
    norms = torch._foreach_norm(gradients)
    torch._foreach_clamp_min_(norms, 1.0)
    return torch._foreach_div(gradients, norms)


# Other ways in which an expert may write an answer. Their scores are those of answers above.
ALSO_RIGHT = [
    ("free first", Contrast()),
    ("growing cache", _cache_through_foreach),
    ("no spike", _mean_of_one_product),
    ("no temporary", _nearest_of_each_point),
    ("one launch", softmax_in_a_pool),
    ("hidden wait", _clipped_as_an_optimizer_does),
    ("hidden copies", copied_with_events),
    ("exact waits", copied_with_events),
    ("two streams, one allocator", largest_in_order),
    ("two streams, one allocator", largest_with_waits_of_the_host),
    ("one graph", trained_two_steps_per_graph),
]


def copied_without_a_wait(batches, weight):
    side, copies = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        for batch in batches:
            copies.append(batch.cuda(non_blocking=True))
    return [x @ weight for x in copies]


def copied_without_record_stream(batches, weight):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    results = []
    for batch in batches:
        with torch.cuda.stream(side):
            x = batch.cuda(non_blocking=True)
        here.wait_stream(side)
        results.append(x @ weight)
    return results


def copied_on_one_stream(batches, weight):
    return [batch.cuda(non_blocking=True) @ weight for batch in batches]


def products_in_half_precision(batches, weight):
    half = weight.half()
    return [result.float() for result in _copied_beside(batches, _Half(half))]


class _Half:
    """A matrix that rounds the matrices with which it is multiplied."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __rmatmul__(self, rows):
        return rows.half() @ self.matrix


def products_with_tf32(batches, weight):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return _copied_beside(batches, weight)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def buffers_without_events(batches, weight):
    """Return wrong results: a copy overwrites a buffer that a product may still read."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [torch.empty_like(batches[0], device="cuda") for _ in range(2)]
    side.wait_stream(here)
    results = []
    for index, batch in enumerate(batches):
        with torch.cuda.stream(side):
            buffers[index % 2].copy_(batch, non_blocking=True)
        here.wait_stream(side)
        results.append(buffers[index % 2] @ weight)
    return results


def buffers_with_one_wait_of_the_host(batches, weight):
    side, results = torch.cuda.Stream(), []
    buffers = [torch.empty_like(batches[0], device="cuda") for _ in range(2)]
    for index, batch in enumerate(batches):
        with torch.cuda.stream(side):
            buffers[index % 2].copy_(batch, non_blocking=True)
        torch.cuda.synchronize()
        results.append(buffers[index % 2] @ weight)
    return results


def buffers_with_waits_for_whole_streams(batches, weight):
    """Let each copy wait for the product before it, so that nothing overlaps."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [torch.empty_like(batches[0], device="cuda") for _ in range(2)]
    results = []
    for index, batch in enumerate(batches):
        side.wait_stream(here)
        with torch.cuda.stream(side):
            buffers[index % 2].copy_(batch, non_blocking=True)
        here.wait_stream(side)
        results.append(buffers[index % 2] @ weight)
    return results


def last_block(tokens, blocks):
    return checkpointed(tokens, blocks, _with_checkpoint, which=7)


def narrow_block(tokens, blocks):
    return checkpointed(tokens, blocks, _with_checkpoint, which=1)


def all_blocks(tokens, blocks):
    for up, down in blocks:
        tokens = _with_checkpoint(tokens, up, down)
    weights = [weight for both in blocks for weight in both]
    return torch.autograd.grad(tokens.square().mean(), weights)


def activations_on_the_host(tokens, blocks):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return checkpointed(tokens, blocks, _block)


def largest_with_record_stream_alone(batches, weight):
    return [product.amax(dim=1) for product in _copied_beside(batches, weight)]


def trained_with_the_graph_of_the_first_call(weights, batches, kept={}):  # noqa: B006
    if not kept:
        kept["weights"] = [weight.clone().requires_grad_() for weight in weights]
        kept["batch"] = batches[0].clone()
        kept["graph"] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(kept["graph"]):
            _step(kept["weights"], kept["batch"])
    with torch.no_grad():
        torch._foreach_copy_(kept["weights"], weights)
    for batch in batches:
        kept["batch"].copy_(batch)
        kept["graph"].replay()
    return [weight.detach().clone() for weight in kept["weights"]]


def contrast_when_it_is_read(image):
    """Compute the result only when it is read, through Python's profiler, after the recording."""

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "_result":
            sys.setprofile(None)
            centred = image - image.mean()
            result.copy_(centred.abs().sqrt() * centred.sign())

    result = torch.empty_like(image)
    sys.setprofile(profile)
    return result


def largest_on_one_stream(batches, weight):
    return [(batch.cuda(non_blocking=True) @ weight).amax(dim=1) for batch in batches]


def largest_of_freed_copies(batches, weight):
    return [product.amax(dim=1) for product in copied_without_record_stream(batches, weight)]


def layers_with_record_stream_alone(rows, weights):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for weight in weights:
        with torch.cuda.stream(side):
            copy = weight.cuda(non_blocking=True)
        here.wait_stream(side)
        copy.record_stream(here)
        rows = (rows @ copy).tanh()
    return rows


def layers_all_at_once(rows, weights):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        copies = [(weight.cuda(non_blocking=True), side.record_event()) for weight in weights]
    for copy, ready in copies:
        here.wait_event(ready)
        rows = (rows @ copy).tanh()
    side.wait_stream(here)
    return rows


def layers_in_a_buffer_without_events(rows, weights):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [torch.empty_like(weights[0], device="cuda") for _ in range(2)]
    side.wait_stream(here)
    for index, weight in enumerate(weights):
        with torch.cuda.stream(side):
            buffers[index % 2].copy_(weight, non_blocking=True)
        here.wait_stream(side)
        rows = (rows @ buffers[index % 2]).tanh()
    return rows


def trained_in_one_large_graph(weights, batches):
    """Capture the steps of all batches in one graph, and replay the graph once.

    The capture takes as long as the launches would.
    """
    weights, graph = [weight.clone().requires_grad_() for weight in weights], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            _step(weights, batch)
    graph.replay()
    return [weight.detach() for weight in weights]


def trained_on_one_batch(weights, batches):
    """Train wrongly: replay the graph without copying new batches into its input."""
    return _trained_with_a_graph(weights, [batches[0]] * len(batches))


def trained_after_a_warm_up_that_counts(weights, batches):
    weights = [weight.clone().requires_grad_() for weight in weights]
    _step(weights, batches[0])
    return _trained_with_a_graph([weight.detach() for weight in weights], batches)


def trained_in_place(weights, batches):
    """Train the given weights in place, although they are arguments."""
    graph, batch = torch.cuda.CUDAGraph(), batches[0].clone()
    given = [weight.requires_grad_() for weight in weights]
    with torch.cuda.graph(graph):
        _step(given, batch)
    for each in batches:
        batch.copy_(each)
        graph.replay()
    return [weight.requires_grad_(False).clone() for weight in weights]


def _clipped_by_norms(gradients, norms):
    pairs = zip(gradients, norms, strict=True)
    return [gradient / norm if norm > 1 else gradient for gradient, norm in pairs]


def clipped_with_saved_tensors(gradients):
    """Read the gradients' norms from the file that `torch.save` writes."""
    norms = []
    for gradient in gradients:
        file = io.BytesIO()
        torch.save(gradient.norm(), file)
        file.seek(0)
        norms.append(torch.load(file, map_location="cpu"))
    return _clipped_by_norms(gradients, norms)


def clipped_with_storages(gradients):
    """Read the gradients' norms from their storages."""
    norms = []
    for gradient in gradients:
        copied = gradient.norm().untyped_storage().cpu()
        norms.append(torch.empty(0).set_(copied, 0, ()))
    return _clipped_by_norms(gradients, norms)


def clipped_after_polling(gradients):
    """Clip the gradients after asking an event again and again whether their norms have arrived."""
    norms = torch.empty(len(gradients), pin_memory=True)
    for norm, gradient in zip(norms, gradients, strict=True):
        norm.copy_(gradient.norm(), non_blocking=True)
    arrived = torch.cuda.current_stream().record_event()
    while not arrived.query():
        pass
    return _clipped_by_norms(gradients, norms.tolist())


def cache_in_the_arguments(keys):
    """Return a part of the argument as the cache: a view in which the keys are in order."""
    rows, width = keys[0].shape
    return keys[0].as_strided((len(keys) * rows, width), (width, 1))


def contrast_with_a_kept_storage(image, kept=[]):  # noqa: B006
    if not kept:
        kept.append(torch.empty_like(image).untyped_storage())
    return _contrast_in_parts(image)


def softmax_in_a_thread_that_goes_on(scores):
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    return scores.softmax(dim=1)


class _Late(torch.nn.Module):
    """A module that computes its state when somebody reads it."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def state_dict(self, *given, **named):
        return [self.scores.softmax(dim=1)]


def softmax_in_a_module(scores):
    return _Late(scores)


def softmax_and_an_exit(scores):
    sys.exit(0)


# Wrong answers to single puzzles, and a part of the reason. Wrong answers to any puzzle are in
# `test_answers.py`.
WRONG_OF = [
    ("hidden wait", clipped_with_saved_tensors, "copies to the host"),
    ("hidden wait", clipped_with_storages, "copies to the host"),
    ("hidden wait", clipped_after_polling, "copies to the host"),
    ("growing cache", cache_in_the_arguments, "memory of an argument"),
    ("free first", contrast_with_a_kept_storage, "1 tensor was still on the GPU"),
    ("one launch", softmax_in_a_thread_that_goes_on, "was still running"),
    ("one launch", softmax_in_a_module, "an object of the class _Late"),
    ("one launch", softmax_and_an_exit, "your function raised SystemExit"),
    ("hidden copies", copied_without_a_wait, "race"),
    ("hidden copies", copied_without_record_stream, "race"),
    ("hidden copies", copied_on_one_stream, "budget"),
    ("hidden copies", products_in_half_precision, "differs"),
    ("hidden copies", products_with_tf32, "differs"),
    ("exact waits", buffers_without_events, "race"),
    ("exact waits", buffers_with_one_wait_of_the_host, "waits of the host"),
    ("exact waits", buffers_with_waits_for_whole_streams, "budget"),
    ("exact waits", copied_without_a_wait, "race"),
    ("one checkpoint", last_block, "budget"),
    ("one checkpoint", narrow_block, "budget"),
    ("one checkpoint", all_blocks, "time"),
    ("one checkpoint", activations_on_the_host, "time"),
    ("one graph", trained_in_one_large_graph, "budget"),
    ("one graph", trained_on_one_batch, "differs"),
    ("one graph", trained_after_a_warm_up_that_counts, "differs"),
    ("one graph", trained_in_place, "changed a tensor"),
    ("two streams, one allocator", largest_with_record_stream_alone, "budget"),
    ("free first", contrast_when_it_is_read, "sys.getprofile"),
    ("two streams, one allocator", largest_on_one_stream, "time"),
    ("one graph", trained_with_the_graph_of_the_first_call, "still on the GPU"),
    ("two streams, one allocator", largest_of_freed_copies, "race"),
    ("next layer", layers_with_record_stream_alone, "reserved memory"),
    ("next layer", layers_all_at_once, "reserved memory"),
    ("next layer", layers_in_a_buffer_without_events, "race"),
]
