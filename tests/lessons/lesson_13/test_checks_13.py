"""The check of a network on two GPUs, on machines that come one after the other."""

import pytest
from torch import nn

import labkit


class Halves(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first.to("cuda:0"), second.to("cuda:1")

    def forward(self, x):
        assert isinstance(x.type(), str)
        return self.second(self.between(self.first(x.to("cuda:0"))))

    def between(self, x):
        return x.to("cuda:1")


class ThroughTheCPU(Halves):
    def between(self, x):
        return x.cpu().to("cuda:1")


@pytest.mark.parametrize(("answer", "said"), [(Halves, "Right."), (ThroughTheCPU, "a tensor went through the CPU")])
def test_a_copy_through_the_cpu_is_noticed_on_each_machine(answer, said):
    for _ in range(2):
        with labkit.use(gpus=2, virtual=True, quiet=True):
            assert said in labkit.check("13.5", answer).message
