"""Controls of lesson 04."""

CONTROLS = {
    # cut in the middle
    "04.1": (
        r"the layers belong on",
        r"""
def in_two(model, cut):
    class InTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model[:len(model)//2+1].cuda(0), model[len(model)//2+1:].cuda(1)
        def forward(self, x):
            return self.second(self.first(x.cuda(0)).cuda(1))
    return InTwo()
""",
    ),
    # one after the other
    "04.2": (
        r"Draw it",
        r"""
def forward_seconds(stage_seconds, micro_batches): return micro_batches * sum(stage_seconds)
""",
    ),
    # the middle layer
    "04.3": (
        r"Another cut",
        r"""
def best_cut(layer_seconds): return len(layer_seconds) // 2
""",
    ),
    # in one piece
    "04.4": (
        r"each half was to see",
        r"""
def step(first, second, x, splits):
    loss = second(first(x).to("cuda:1")).square().mean()
    loss.backward()
    return loss
""",
    ),
    # GPipe
    "04.5": (
        r"micro-batches wait for their backward at once",
        r"""
def one_forward_one_backward(stage, stages, micro_batches):
    return [f"{letter}{number}" for letter in "FB" for number in range(1, micro_batches + 1)]
""",
    ),
}
