"""The cache of cuFFT's plans, as an H200 counts them."""

import torch


def test_a_plan_for_each_shape(machine):
    plans = torch.backends.cuda.cufft_plan_cache
    assert (plans.size, plans.max_size) == (0, 4096)
    x = torch.ones(8, device="cuda")
    torch.fft.ifft(torch.fft.fft(x))
    assert plans.size == 1
    torch.fft.fft(torch.ones(9, device="cuda"))
    assert (plans.size, plans[0].size) == (2, 2)
    plans.max_size = 1
    assert plans.size == 1
    plans.clear()
    assert plans.size == 0
