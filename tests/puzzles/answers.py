"""Right answers to the puzzles: three for each, with different scores, the best one last."""

import torch
from torch.nn.functional import cross_entropy, mse_loss


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
    """Return the loss and the gradients, from groups of this number of rows."""
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
    """Return the cache, which doubles when it is full."""
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
