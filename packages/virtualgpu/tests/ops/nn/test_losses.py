"""Losses that CUDA computes differently from the CPU."""

import torch
import torch.nn.functional as F


def test_the_length_of_one_sequence_may_be_a_number_on_the_gpu(machine):
    scores = torch.arange(30.0, device="cuda").view(10, 3).log_softmax(1)
    targets, length, target = (torch.tensor(x, device="cuda") for x in ([1, 2], 10, 2))
    found = F.ctc_loss(scores, targets, length, target)
    assert torch.isclose(
        found.cpu(), F.ctc_loss(scores.cpu(), targets.cpu(), length.cpu(), target.cpu())
    )
