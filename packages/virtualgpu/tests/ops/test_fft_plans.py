"""The cache of cuFFT's plans: one for each type of transform and each shape."""

import torch


def test_a_plan_for_each_shape(machine):
    plans = torch.backends.cuda.cufft_plan_cache
    assert (plans.size, plans.max_size) == (0, 4096)
    x = torch.ones(8, device="cuda")
    torch.fft.ifft(torch.fft.fft(x))  # of real numbers, and back from complex ones
    torch.fft.fft(x)
    assert plans.size == 2
    torch.fft.fft(torch.ones(9, device="cuda"))
    assert (plans.size, plans[0].size) == (3, 3)
    plans.max_size = 1
    assert plans.size == 1
    plans.clear()
    assert plans.size == 0
